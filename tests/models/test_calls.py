"""How a model as it is may be called, and what crosses between its stages."""

import functools
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import errors, nnx
from flax import linen as nn

import jpipe

from .. import reference as ref
from ..compiling import log_compiled
from . import small_models as models
from .small_models import VOCAB, WIDTH

KEY = jax.random.key(0)
RNG = np.random.default_rng(1)
TOKENS = RNG.integers(1, VOCAB, (8, 6), np.int32)
MASK = np.arange(6) < RNG.integers(2, 7, (8, 1))
X, TARGETS = RNG.normal(size=(8, 6)), RNG.normal(size=(8, 3))
TX = optax.adam(1e-2)


def squares(y, targets):
    return jnp.mean((y - targets) ** 2)


@functools.cache
def small(num_stages=2):
    """A pipeline of a small model."""
    return jpipe.pipeline(models.LoRA(), 3, num_stages=num_stages)


def plain(variables, x, targets):
    """The loss and the gradients of the small model without jpipe."""

    def loss(params):
        return squares(models.LoRA().apply({"params": params}, x), targets)

    return jax.jit(jax.value_and_grad(loss))(ref.on_host(variables)["params"])


GPT = models.GPT(layers=1, rate=0.0)
CALLS = {
    "by position": lambda: jpipe.inputs(TOKENS, MASK[:, None, None]),
    "None": lambda: jpipe.inputs(TOKENS, None),
    "a static bool": lambda: jpipe.inputs(TOKENS, None, return_hidden=True),
    "a mask by name": lambda: jpipe.inputs(TOKENS, mask=MASK[:, None, None]),
}


@pytest.mark.parametrize("name", CALLS)
def test_inputs_are_given_as_in_a_call_of_the_model(double, name):
    x = CALLS[name]()
    pipe = jpipe.pipeline(GPT, 3, num_stages=2)
    variables = pipe.init(KEY, x)
    args, kwargs = x.call
    apply = jax.jit(lambda variables: GPT.apply(variables, *args, **kwargs))
    expected = apply(ref.on_host(variables))
    ref.assert_close(pipe.apply(variables, x), expected, ref.FLOAT64)


def test_a_function_is_a_model_too(double):
    table = jnp.asarray(RNG.normal(size=(6, 6)))

    def function(x, scale, *, shift):
        for _ in range(4):
            x = jnp.tanh(scale[:, None] * x @ table) + shift
        return {"x": x}

    inputs = jpipe.inputs(X, TARGETS[:, 0], shift=0.5)
    pipe = jpipe.pipeline(function, 3, num_stages=2)
    expected = function(X, TARGETS[:, 0], shift=0.5)
    ref.assert_close(pipe.apply({}, inputs), expected, ref.FLOAT64)


def test_random_streams_have_keys_by_name(double):
    model, key = models.VAE(), jax.random.key(7)
    pipe = jpipe.pipeline(model, 3, num_stages=2)
    variables = pipe.init(KEY, X)
    found = pipe.apply(variables, X, rngs={"noise": key})
    apply = jax.jit(lambda v, x, key: model.apply(v, x, rngs={"noise": key}))
    parts = [
        apply(ref.on_host(variables), x, jpipe.microbatch_key(key, m))
        for m, x in enumerate(np.array_split(X, 3))
    ]
    expected = jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
    ref.assert_close(found, expected, ref.FLOAT64)


def test_a_batch_of_another_size_is_divided_alike(double):
    pipe = jpipe.pipeline(models.LoRA(), 3, num_stages=2)
    variables = pipe.init(KEY, X[:1])
    ref.assert_equal(variables, small().init(KEY, X))
    find, rows = pipe.value_and_grad(squares), []
    for size in (8, 7):
        loss, grads = find(variables, X[:size], TARGETS[:size])
        expected = plain(variables, X[:size], TARGETS[:size])
        ref.assert_close((loss, grads), expected, ref.FLOAT64)
        for leaf, grad in zip(
            jax.tree.leaves(variables), jax.tree.leaves(grads), strict=True
        ):
            assert leaf.device == grad.device
        rows.append([stage.num_params for stage in find.plan.stages])
    assert len(rows[0]) == 2
    assert rows[0] == rows[1]


def test_check_and_compile_name_the_model(double):
    pipe = small()
    variables = pipe.init(KEY, X)
    find = pipe.value_and_grad(squares)
    assert find.check(variables, X, TARGETS)
    table = str(find.check(variables, X, TARGETS))
    assert "the model (LoRA)" in table
    assert "layer" not in table
    largest = pipe.value_and_grad(lambda y, t: jnp.max((y - t) ** 2))
    assert not largest.check(variables, X, TARGETS)
    report = find.compile(variables, X, TARGETS)
    assert any("backward" in program.name for program in report.programs)


def test_after_compile_the_first_step_compiles_nothing(double):
    pipe, tx = small(), optax.adam(1e-2)
    state = pipe.init_train_state(KEY, X, tx)
    step = pipe.train_step(squares, tx)
    report = step.compile(state, X, TARGETS)
    assert any("update" in program.name for program in report.programs)
    with log_compiled() as compiled:
        step(state, X, TARGETS)
    # The key and the number of the next step; the loss, which is tried by itself.
    assert set(compiled) <= {"_advance", "run"}


def test_an_error_about_a_changed_model_names_the_model():
    model = nnx.Linear(6, 3, rngs=nnx.Rngs(0))
    pipe = jpipe.pipeline(model, 2, num_stages=1)
    variables = pipe.init(None, X)
    model.added = 3
    with pytest.raises(ValueError, match=r"^the model .Linear. was changed after"):
        pipe.apply(variables, X)


def test_place_refuses_missing_and_surplus_variables(double):
    pipe = small()
    variables = pipe.init(KEY, X)
    with pytest.raises(ValueError, match=r"have 0 arrays, those of the model \d"):
        pipe.place({"params": {}})
    with pytest.raises(ValueError, match="such as init makes"):
        pipe.place({**variables, "more": jnp.ones(3)})


def test_an_input_that_does_not_fit_is_named(double):
    variables = small().init(KEY, X)
    for call in (
        lambda: small().apply(variables, TARGETS),
        lambda: small().value_and_grad(squares)(variables, TARGETS, X),
    ):
        says = r"x is float\d+\[\d,3\], and the variables fit float\d+\[\d+,\d+\], with"
        with pytest.raises(ValueError, match=says) as caught:
            call()
        raised_by_flax = caught.value.__context__
        assert isinstance(raised_by_flax, errors.ScopeParamShapeError)
        assert re.search(
            r"by the model .LoRA., whose input was float\d+\[\d,3\]",
            "\n".join(raised_by_flax.__notes__),
        )


def test_sequential_draws_what_a_pipeline_draws(double):
    model, x, found = models.Feedforward(rate=0.5), RNG.normal(size=(8, WIDTH)), []
    for pipe in (jpipe.pipeline(model, 3, num_stages=2), jpipe.sequential(model, 3)):
        variables = pipe.init(KEY, x)
        found.append(pipe.value_and_grad(squares)(variables, x, x, rngs=KEY))
    assert len({leaf.device for leaf in jax.tree.leaves(variables)}) == 1
    ref.assert_close(*found, ref.FLOAT64, 1.0)


def test_a_state_goes_on_in_another_number_of_stages(double, tmp_path):
    first, second = small(), small(3)
    state = first.init_train_state(KEY, X, TX)
    step = first.train_step(squares, TX, donate=False)
    state, _ = step(state, X, TARGETS)
    jpipe.checkpoint.save(tmp_path / "state", state)
    like = second.init_train_state(jax.random.key(1), X, TX)
    restored = jpipe.checkpoint.restore(tmp_path / "state", like)
    ref.assert_equal(restored, state)
    ref.assert_equal(second.place(ref.on_host(state), X), ref.on_host(state))
    expected = step(state, X, TARGETS)
    found = second.train_step(squares, TX)(restored, X, TARGETS)
    ref.assert_close(found, expected, ref.FLOAT64, 1.0)


def with_aux(y, targets):
    errors = jnp.mean((y - targets) ** 2, axis=1)
    return errors.mean(), {
        "errors": errors,
        "near": jnp.exp(-errors).mean(),
        "most": errors.max(),
    }


def test_aux_is_joined_on_axes_stacked_or_averaged(double):
    pipe, ends = small(), [0, 3, 6, 8]
    variables = pipe.init(KEY, X)
    axes = {"errors": 0, "near": jpipe.MEAN, "most": None}
    find = pipe.value_and_grad(with_aux, has_aux=True, aux_axes=axes)
    (loss, aux), grads = find(variables, X, TARGETS)
    _, expected = with_aux(models.LoRA().apply(ref.on_host(variables), X), TARGETS)
    errors = np.asarray(expected["errors"])
    parts = [errors[a:b].max() for a, b in itertools.pairwise(ends)]
    ref.assert_close(aux, {**expected, "most": jnp.stack(parts)}, ref.FLOAT64)
    ref.assert_close((loss, grads), plain(variables, X, TARGETS), ref.FLOAT64)


class Watched(nn.Module):
    """Two layers that leave what they have seen."""

    @nn.compact
    def __call__(self, x, train=False):
        level = self.variable("seen", "level", jnp.zeros, (), x.dtype)
        first = self.variable("seen", "first", jnp.zeros, (), jnp.int32)
        if train:
            level.value, first.value = x.mean(), (100 * x[0, 0]).astype(jnp.int32)
        return models.Dense(3)(jnp.tanh(models.Dense(8)(x)))


def test_floats_that_are_written_are_averaged_and_integers_are_the_last(double):
    pipe = jpipe.pipeline(Watched(), 3, num_stages=2)
    variables = pipe.init(KEY, X)
    find = pipe.value_and_grad(squares, has_state=True)
    (_, new), _ = find(variables, X, TARGETS)
    expected = {"level": X.mean(), "first": np.int32(100 * X[6, 0])}
    ref.assert_close(new, {"seen": expected}, ref.FLOAT64)


def test_a_loop_that_is_most_of_a_model_is_not_divided():
    x = jpipe.inputs(TOKENS, TOKENS)
    pipe = jpipe.pipeline(models.Seq2Seq(), 3, num_stages=8)
    says = r"num_stages=8: .* in 5 at most: one operation, scan of Seq2Seq/RNN_0, at "
    with jax.enable_x64(True), pytest.raises(ValueError, match=says):
        pipe.init(KEY, x)


@jax.tree_util.register_dataclass
@dataclass
class Linear:
    weight: Any
    bias: Any

    def __call__(self, x):
        return self.weight @ x + self.bias


@jax.tree_util.register_dataclass
@dataclass
class Perceptron:
    """A model that is a pytree of its layers, called on one example."""

    layers: list[Linear]
    scale: Any
    activation: Callable[..., Any] = field(metadata={"static": True})

    def __call__(self, x):
        for layer in self.layers[:-1]:
            x = self.activation(layer(x)) + self.scale * x
        return self.layers[-1](x)


def test_a_pytree_of_callables_is_its_own_parameters(double):
    widths = [(6, 6), (6, 6), (6, 6), (3, 6)]
    layers = [Linear(RNG.normal(size=w), RNG.normal(size=w[0])) for w in widths]
    model = Perceptron(layers, np.array(0.5), jnp.tanh)

    def loss(model, x, targets):
        return squares(jax.vmap(model)(x), targets)

    grad_fn = jpipe.value_and_grad(loss, 3, num_stages=2)
    placed = grad_fn.place(model, X, TARGETS)
    assert isinstance(placed, Perceptron)
    expected = jax.value_and_grad(loss)(model, X, TARGETS)
    ref.assert_close(grad_fn(placed, X, TARGETS), expected, ref.FLOAT64)


def crossing(pipe):
    """The bytes of a micro-batch that leave each stage but the last."""
    return [stage.sent_bytes for stage in pipe.plan.stages[:-1]]


# Of a micro-batch of two, in single precision; half of that in bfloat16.
ACTIVATIONS = 2 * 6 * WIDTH * 4


def test_masks_targets_and_casts_do_not_cross(double):
    """They are made by each stage that reads them, of tokens and parameters."""
    model = models.GPT(rate=0.0)
    wide = jax.jit(model.init)(KEY, TOKENS)

    def loss(params, tokens, mask):
        low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
        padding = mask[:, None, None] & mask[:, None, :, None]
        logits = model.apply(low, tokens, padding).astype(jnp.float32)
        targets = jax.nn.one_hot(jnp.roll(tokens, -1, 1), VOCAB)
        return -(targets * jax.nn.log_softmax(logits) * mask[..., None]).mean()

    grad_fn = jpipe.value_and_grad(loss, 4, num_stages=2)
    params = grad_fn.place(wide, TOKENS, MASK)
    assert crossing(grad_fn) == [ACTIVATIONS // 2]
    found, grads = grad_fn(params, TOKENS, MASK)
    expected, wanted = jax.jit(jax.value_and_grad(loss))(wide, TOKENS, MASK)
    ref.assert_close(found, expected, 1e-2)
    ref.assert_close(grads, wanted, 5e-2, 1.0)


def test_a_decoder_is_embedded_where_it_runs():
    x = jpipe.inputs(TOKENS, TOKENS)
    with jax.enable_x64(True):
        pipe = jpipe.pipeline(models.Translator(), 4, num_stages=3)
        pipe.compile(pipe.init(KEY, x), x)
    # Those of the encoder; then the memory, and those of the decoder beside it.
    assert crossing(pipe) == [2 * ACTIVATIONS, 4 * ACTIVATIONS]


class Ensemble(nn.Module):
    """Two equal parts by `nn.vmap`, a number given whole, and a fixed one."""

    @nn.compact
    def __call__(self, x, scale=1.0, power=1):
        parts = nn.vmap(
            nn.Dense,
            in_axes=None,
            out_axes=0,
            axis_size=2,
            variable_axes={"params": 0},
            split_rngs={"params": True},
        )
        return nn.Dense(3)(scale * parts(8)(x).mean(0)) ** power


def test_inputs_have_axes_of_their_own_and_fixed_numbers_their_types(double):
    x, scale = np.ones((8, 6)), np.array(0.5)
    pipe = jpipe.pipeline(
        Ensemble(), 4, num_stages=2, in_axes=jpipe.inputs(0, scale=None)
    )
    given = [jpipe.inputs(x, scale=scale, power=power) for power in (2, 2.0)]
    variables = pipe.init(jax.random.key(0), given[0])
    whole = jax.device_get(variables)
    ref.assert_equal(whole, jax.jit(Ensemble().init)(jax.random.key(0), x))
    for one, power in zip(given, (2, 2.0), strict=True):
        expected = Ensemble().apply(whole, x, scale, power)
        ref.assert_close(pipe.apply(variables, one), expected, 1e-6)
    assert jax.tree.structure(given[0]) != jax.tree.structure(given[1])
