"""What a new user types: each is answered with what to type instead."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import jpipe

from .model import KEY, TARGETS, X, mse, says


@dataclasses.dataclass
class Output:
    """As models return it that were not written for a pipeline."""

    logits: jax.Array


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        (lambda x: "text", "output is 'text', a str"),
        (lambda x: (x, nn.Dense), "output[1] is <class"),
        (lambda x: {"module": nn.Dense(2)}, "a Dense"),
        (lambda x: Output(x), "a Output"),
        (lambda x: (row for row in x), "a generator"),
    ],
    ids=["text", "class", "module", "dataclass", "generator"],
)
def test_a_layer_that_returns_no_arrays(returned, told):
    def head(x):
        return returned(x)

    pipe = jpipe.pipeline([nn.Dense(3), head], 2)
    match = says("layer 1 (head) must return a pytree of arrays", told)
    with pytest.raises(TypeError, match=match):
        pipe.init(KEY, X)
    with pytest.raises(TypeError, match="register_dataclass"):
        pipe.init_train_state(KEY, X, optax.sgd(0.1))


@pytest.mark.parametrize(
    ("key", "given"),
    [
        (0, "key is 0; needs a random key, such as jax.random.key(0)"),
        (7, "such as jax.random.key(7)"),
        (None, "key is None"),
        (X, "key is a float32[4, 3]"),
        (jax.random.split(KEY), "key is a key<fry>[2]"),
    ],
    ids=["zero", "seven", "nothing", "batch", "keys"],
)
def test_a_key_that_is_none(pipe, variables, key, given):
    with pytest.raises(TypeError, match=says(given)):
        pipe.init(key, X)
    with pytest.raises(TypeError, match=says(given)):
        pipe.init_train_state(key, X, optax.sgd(0.1), variables=variables)


def test_raw_keys_are_keys(pipe, variables):
    raw = pipe.init(jax.random.PRNGKey(0), X)
    for a, e in zip(jax.tree.leaves(raw), jax.tree.leaves(variables), strict=True):
        np.testing.assert_array_equal(a, e)
    state = pipe.init_train_state(np.asarray(jax.random.PRNGKey(0)), X, optax.sgd(0.1))
    assert state.rng.dtype == jnp.uint32


def test_parameters_in_a_list(pipe):
    tx = optax.adam(0.1)
    step = pipe.train_step(mse, tx)
    first = pipe.init_train_state(KEY, X, tx)
    listed = first.replace(params=list(first.params))
    assert jax.tree.structure(listed) == jax.tree.structure(first)
    strange = dataclasses.replace(first, params=list(first.params))
    with pytest.raises(ValueError, match=says("state.params is a list", "tuple")):
        step(strange, X, TARGETS)
    strange = first.replace(params=first.params[:2])
    with pytest.raises(ValueError, match=says("2 entries", "model_state 3", "per lay")):
        step(strange, X, TARGETS)
    assert step(listed, X, TARGETS)[0].step == 1


def test_an_axis_that_nobody_maps():
    note = "a pipeline maps no axis: drop axis_name"
    norm = nn.BatchNorm(use_running_average=False, axis_name="batch")

    def train(layer):
        pipe = jpipe.pipeline([layer], 2)
        state = pipe.init_train_state(KEY, X, optax.sgd(0.1))
        pipe.train_step(mse, optax.sgd(0.1))(state, X, X)

    for layer in (norm, lambda x: jax.lax.pmean(x, "batch")):
        with pytest.raises(NameError) as raised:
            train(layer)
        assert any(text.startswith(note) for text in raised.value.__notes__)


def test_a_constraint_on_activations_in_the_mesh_of_the_caller():
    def constrained(x):
        return jax.lax.with_sharding_constraint(x, jax.P("data"))

    mesh = jax.make_mesh((2, 2), ("stage", "data"), devices=jax.devices()[:4])
    pipe = jpipe.pipeline([nn.Dense(4), constrained], 2, mesh=mesh)
    with jax.set_mesh(mesh), pytest.raises(RuntimeError) as raised:
        pipe.init(KEY, X)
    notes = raised.value.__notes__
    assert any("drop constraints on how activations lie" in text for text in notes)


def test_outputs_without_the_axis_of_the_examples(pipe, variables):
    flat = jpipe.pipeline([lambda x: x.reshape(-1)], 2)
    match = says(
        "cannot be joined on out_axes=0",
        "reshape what apply returns",
        "num_microbatches=1",
        "outputs has shape (6,)",
    )
    with pytest.raises(ValueError, match=match):
        flat.apply(({},), X)


def test_arguments_in_another_order(pipe, variables):
    match = says("variables is a ndarray", "3 layers", "Pipeline.init")
    for call in (
        lambda: pipe.apply(X, variables),
        lambda: pipe.value_and_grad(mse)(X, variables, TARGETS),
        lambda: pipe.place(X),
    ):
        with pytest.raises(ValueError, match=match):
            call()
    with pytest.raises(TypeError, match=says("state is a tuple", "init_train_state")):
        pipe.profile_step(variables, (X, TARGETS), mse)


@pytest.mark.parametrize("devices", [1, "cpu"])
def test_devices_by_number_or_name(devices):
    match = says(f"devices={devices!r} is a", "such as devices=jax.devices()[:2]")
    with pytest.raises(TypeError, match=match):
        jpipe.pipeline([nn.relu], 2, devices=devices)
