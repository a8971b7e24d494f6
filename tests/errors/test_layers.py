"""Errors inside a layer: which layer it was, where, and on what input."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import errors
from flax import linen as nn

import jpipe

from .model import KEY, TARGETS, Unlucky, X, fragile, mse, on_host, rows

SGD = optax.sgd(0.1)


def train(pipe):
    state = pipe.init_train_state(KEY, X, SGD)
    pipe.train_step(mse, SGD)(state, X, X)


def notes_of(call) -> list[str]:
    """The notes of an exception that kept its type."""
    with pytest.raises(Unlucky, match="no luck") as raised:
        call()
    assert type(raised.value) is Unlucky
    return raised.value.__notes__


NOTE = "raised by layer 3 (Fragile) of stage 2, whose input was float32[2,3]"
NOTE_IN_INIT = NOTE.replace("2,3", "4,3")


def test_exception_in_each_call_names_the_layer():
    assert NOTE_IN_INIT in notes_of(lambda: fragile("always").init(KEY, X))
    # Micro-batches of twice as many examples went through.
    pipe = fragile("small")
    variables = pipe.init(KEY, jnp.concatenate([X, X]))
    assert NOTE in notes_of(lambda: pipe.apply(variables, X))
    pipe = fragile("training")
    state = pipe.init_train_state(KEY, X, SGD)
    run, step = pipe.value_and_grad(mse), pipe.train_step(mse, SGD)
    assert NOTE in notes_of(lambda: run(state.variables, X, TARGETS))
    assert NOTE in notes_of(lambda: step(state, X, TARGETS))


def test_exception_in_a_function_or_an_apply_names_the_layer():
    def broken(x):
        raise Unlucky("no luck in functions")

    def apply(variables, x):
        raise Unlucky("no luck in layers")

    def two(x):
        return {"a": x, "n": x[:, 0] > 0}

    scale = jpipe.Layer(init=lambda key, x: {}, apply=apply, name="Scale")
    for layer, name in ((broken, "broken"), (scale, "Scale")):
        pipe = jpipe.pipeline([two, layer], 2)
        shapes = "{'a': float32[4,3], 'n': bool[4]}"
        note = f"raised by layer 1 ({name}) of stage 1, whose input was {shapes}"
        assert note in notes_of(lambda pipe=pipe: pipe.init(KEY, X))


def pairs(x):
    return x.reshape(-1, 2, *x.shape[1:]).sum(1)


def test_micro_batches_that_do_not_fit_are_answered_with_their_sizes():
    x, targets = jnp.ones((12, 3)), jnp.ones((12, 2))
    layer, loss_fn = nn.Dense(2), lambda y, t: mse(pairs(y), pairs(t))
    in_layers, in_loss = jpipe.pipeline([layer, pairs], 4), jpipe.pipeline([layer], 4)
    variables = in_loss.init(KEY, x)
    for call in (
        lambda: in_layers.apply((*variables, {}), x),
        lambda: in_loss.value_and_grad(loss_fn)(variables, x, targets),
    ):
        with pytest.raises(TypeError, match="cannot reshape") as raised:
            call()
        assert (
            "micro-batches have 3 of the 12 examples: where that is too few, give a "
            "larger batch or a smaller num_microbatches="
        ) in raised.value.__notes__
    # What it says works.
    in_loss.value_and_grad(loss_fn)(variables, jnp.ones((16, 3)), jnp.ones((16, 2)))
    pipe = jpipe.pipeline([layer], 3)
    pipe.value_and_grad(loss_fn)(variables, x, targets)


class Counting(nn.Module):
    @nn.compact
    def __call__(self, x):
        count = self.variable("counts", "calls", jnp.zeros, ())
        if not self.is_initializing():
            count.value += 1
        return x


class MakingMore(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False)(x)
        if not self.is_initializing():
            self.put_variable("others", "sum", x.sum())
        return x


class Measuring(nn.Module):
    @nn.compact
    def __call__(self, x):
        self.variable("sizes", "size", lambda: jnp.mean(x**2))
        return x


class OnlyTrained(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(3)(x)
        return nn.Dense(2)(x) if train else x


class ActNorm(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + self.param("shift", lambda key: -x.mean(0))


def returning(value):
    return [nn.Dense(3), lambda x: value]


def initialized_to(variables):
    return [jpipe.Layer(lambda key, x: variables, lambda _, x: x)]


NORM = nn.BatchNorm(use_running_average=False, axis_name="batch")
NO_AXIS = "a pipeline maps no axis: drop axis_name"
MAPPING = "init of a jpipe.Layer returns a mapping"
ARRAYS = "layer 1 (<lambda>) must return a pytree of arrays"
SAME = "use the same parameters in training"
# Layers that cannot be trained, by what is raised, what it says, and what to type.
LAYERS = {
    errors.ModifyScopeVariableError: {
        "let its __call__ take train": [MakingMore()],
    },
    errors.ScopeParamNotFoundError: {SAME: [OnlyTrained()]},
    errors.ScopeParamShapeError: {
        "its parameters are those of layer 0 (Dense), as both hold one module": (
            [nn.Dense(5)] * 2
        ),
    },
    ValueError: {
        "from its values, as sizes/size of layer 0 would": [Measuring()],
        "params/shift of layer 0 would; ... variables=[None, module.init": [ActNorm()],
    },
    NameError: {
        NO_AXIS: [NORM],
    },
    TypeError: {
        f"{ARRAYS} ... output is 'text', a str": (returning("text")),
        f"{ARRAYS} ... a Dense": returning({"module": nn.Dense(2)}),
        MAPPING: initialized_to(jnp.ones(3)),
    },
}


@pytest.mark.parametrize(("layers", "error", "match"), rows(LAYERS))
def test_layers_that_cannot_be_trained_are_answered(layers, error, match):
    """Flax's ImageNet example has the norm along an axis; Inception a head in training.

    An error of Flax names a collection or an axis, and nothing to type.
    """
    with pytest.raises(error) as raised:
        train(jpipe.pipeline(layers, 2))
    notes = getattr(raised.value, "__notes__", [])
    assert re.search(match, "\n".join([str(raised.value), *notes]))


def test_a_model_that_reduces_along_a_mapped_axis_is_told_to_drop_it():
    with pytest.raises(NameError) as raised:
        train(jpipe.pipeline(NORM, 2, num_stages=1))
    assert any(NO_AXIS in note for note in raised.value.__notes__)


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        (Counting(), "let its __call__ take train"),
        (nn.BatchNorm(use_running_average=False), "use_running_average=not train"),
    ],
)
def test_layer_that_writes_in_evaluation_raises_there_alone(layer, says):
    pipe = jpipe.pipeline([layer, nn.Dense(2)], 2)
    state = pipe.init_train_state(KEY, X, SGD)
    before = on_host(state).model_state
    state, _ = pipe.train_step(mse, SGD)(state, X, TARGETS)
    changed = zip(*map(jax.tree.leaves, (before, state.model_state)), strict=True)
    assert all(np.any(old != new) for old, new in changed)
    with pytest.raises(errors.ModifyScopeVariableError) as raised:
        pipe.apply(state.variables, X)
    notes = "".join(raised.value.__notes__)
    assert says in notes
    assert f"raised by layer 0 ({type(layer).__name__}) of stage 0" in notes


def test_constraint_on_activations_in_the_mesh_of_the_caller_is_explained():
    """A model of MaxText: JAX asks for a mesh, which ``jax.set_mesh`` has set."""

    def constrained(x):
        return jax.lax.with_sharding_constraint(x, jax.P("data"))

    mesh = jax.make_mesh((2, 2), ("stage", "data"), devices=jax.devices()[:4])
    pipe = jpipe.pipeline([nn.Dense(4), constrained], 2, mesh=mesh)
    with jax.set_mesh(mesh), pytest.raises(RuntimeError) as raised:
        pipe.init(KEY, X)
    notes = raised.value.__notes__
    assert any("drop constraints on how activations lie" in text for text in notes)
