"""Batch norms inside transformations of Flax: called once, called twice, or two."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jpipe

from .. import reference as ref
from .normed import committed

TWICE = "is called twice in one layer: the second time it would start from"
READ = "is copied or changed in the same step"
STACKED = {"batch_stats": 0, "params": 0}


class Norm(nn.Module):
    """A batch norm in a module that is transformed."""

    @nn.compact
    def __call__(self, x, train):
        return nn.BatchNorm(not train, momentum=0.9, name="norm")(x)


class Layer(nn.Module):
    """Does what a function does that is given it, an input and whether it is trained.

    The function is an attribute, so that each case is one line of a table.
    """

    function: object

    @nn.compact
    def __call__(self, x, train):
        return self.function(self, x, train)


def remat(kind):
    return nn.remat(kind, static_argnums=(2,))


def jit(kind):
    return nn.jit(kind, static_argnums=(2,))


def calls(wrap, *names):
    """Calls a wrapped module for each name, the same for the same name."""

    def call(layer, x, train):
        kind = wrap(Norm)  # one, of which JAX traces equal calls once
        norms = {name: kind(name=name) for name in sorted(set(names))}
        return sum(norms[name](k * x, train) for k, name in enumerate(names, 1))

    return call


def in_a_body(norm, x, train):
    return nn.remat(lambda norm, x: norm(norm(x, train), train))(norm, x)


def frozen_first(norm, x, train):
    return norm(nn.remat(lambda norm, x: norm(x, False))(norm, x), train)


def either(norm, x, train):
    first, second = lambda norm, x: norm(x, train), lambda norm, x: norm(2 * x, train)
    return nn.cond((x**2).sum() >= 0, first, second, norm, x)


def perhaps(norm, x, train):
    first = lambda norm, x: norm(x, train)  # noqa: E731
    return nn.cond((x**2).sum() >= 0, first, lambda norm, x: x, norm, x)


def perhaps_and_then(norm, x, train):
    return norm(perhaps(norm, x, train), train)


def carried(norm, x, train):
    def body(norm, x, _):
        return norm(x, train), None

    if not train:  # Flax carries nothing that may not change
        return norm(x, train)
    options = {"variable_carry": "batch_stats", "variable_broadcast": "params"}
    return nn.scan(body, length=3, **options)(norm, x, None)[0]


def made_first(function):
    """Calls a module once to make what it holds, which a branch must not."""

    def call(layer, x, train):
        norm = Norm(name="inner")
        making = layer.is_initializing()
        return norm(x, train) if making else function(norm, x, train)

    return call


def along(count):
    """A scan over layers, each with statistics of its own."""

    def call(layer, x, train):
        def body(norm, x, _):
            for _ in range(count):
                x = norm(x, train)
            return x, None

        split = {"params": True}
        scan = nn.scan(body, variable_axes=STACKED, split_rngs=split, length=3)
        return scan(Norm(name="inner"), x, None)[0]

    return call


def side_by_side(layer, x, train):
    split = {"params": True}
    options = {"variable_axes": STACKED, "split_rngs": split, "axis_size": 2}
    kind = nn.vmap(Norm, in_axes=(None, None), **options)
    return kind(name="inner")(x, train).sum(0)


TWO_CALLS = [
    *(calls(wrap, "a", "a") for wrap in (remat, jit)),
    calls(lambda kind: jit(remat(kind)), "a", "b", "a"),
    made_first(in_a_body),
    made_first(perhaps_and_then),
    made_first(carried),
    along(2),
]


@pytest.mark.parametrize("function", TWO_CALLS, ids=lambda f: f.__qualname__)
def test_twice_is_refused_through_transformations(function):
    x, targets = ref.regression(8)
    layers = [ref.dense(5), Layer(function), ref.dense(4)]
    pipe = jpipe.pipeline(layers, 2, balance=[3])
    with pytest.raises(ValueError, match=f"{TWICE}|{READ}") as refusal:
        committed(pipe, x, targets)
    notes = "".join(refusal.value.__notes__)
    assert "layer 1 (Layer) of stage 0" in notes + str(refusal.value)


@pytest.mark.parametrize(
    "function",
    [
        *(calls(wrap, "a", "b") for wrap in (remat, jit)),
        calls(lambda kind: jit(remat(kind)), "a", "b"),
        calls(lambda kind: remat(jit(kind)), "a", "b"),
        made_first(frozen_first),
        made_first(perhaps),
        side_by_side,
    ],
    ids=lambda function: function.__qualname__,
)
def test_once_is_that_of_flax_through_transformations(function):
    x, targets = ref.regression(8)
    layer = Layer(function)
    pipe = jpipe.pipeline([layer, ref.dense(4)], 2)
    variables = jax.device_get(pipe.init(jax.random.key(0), x))[0]
    _, expected = layer.apply(variables, x, True, mutable=["batch_stats"])
    state = committed(pipe, x, targets)
    ref.assert_close(jax.device_get(state.model_state[0]), expected, ref.FLOAT32)


@pytest.mark.parametrize(
    "function", [along(1), made_first(either), *TWO_CALLS], ids=lambda f: f.__qualname__
)
def test_of_one_micro_batch_any_calls_are_those_of_flax(function):
    # Of several micro-batches the second norm sees what was normalized by each.
    x, targets = ref.regression(8)
    layer = Layer(function)
    pipe = jpipe.pipeline([layer, ref.dense(4)], 1)
    variables = jax.device_get(pipe.init(jax.random.key(0), x))[0]
    _, expected = layer.apply(variables, x, True, mutable=["batch_stats"])
    state = committed(pipe, x, targets)
    ref.assert_close(jax.device_get(state.model_state[0]), expected, ref.FLOAT32)


class Two(nnx.Module):
    """Two batch norms, and what a function does with them."""

    def __init__(self, function):
        self.function = function
        self.a, self.b = (
            nnx.BatchNorm(5, momentum=0.9, rngs=nnx.Rngs(0)) for _ in range(2)
        )

    def __call__(self, x):
        return self.function(self, x)


def call(norm, x):
    return norm(x)


NNX_TWICE = {
    "remat": lambda own, x: nnx.remat(call)(own.a, x) + nnx.remat(call)(own.a, 2 * x),
    "in a body": lambda own, x: nnx.jit(lambda norm, x: norm(norm(x)))(own.a, x),
    "after": lambda own, x: own.a(nnx.remat(call)(own.a, x)),
}
NNX_ONCE = {
    "remat": lambda own, x: (f := nnx.remat(call))(own.a, x) + f(own.b, 2 * x),
    "jit": lambda own, x: (f := nnx.jit(call))(own.a, x) + f(own.b, 2 * x),
    "both": lambda own, x: nnx.jit(nnx.remat(call))(own.a, x) + own.b(2 * x),
    "read": lambda own, x: own.a(x + own.a.mean[...]),
}


@pytest.mark.parametrize("case", NNX_TWICE)
def test_twice_is_refused_through_those_of_nnx(case):
    x, targets = ref.regression(8)
    with pytest.raises(ValueError, match=f"batch norm a {TWICE}"):
        committed(jpipe.pipeline([Two(NNX_TWICE[case]), ref.dense(4)], 2), x, targets)


@pytest.mark.parametrize("case", NNX_ONCE)
def test_once_is_that_of_flax_through_those_of_nnx(case):
    x, targets = ref.regression(8)
    own = Two(NNX_ONCE[case])
    state = committed(jpipe.pipeline([own, ref.dense(4)], 2), x, targets)
    own(x)
    actual = jax.device_get(state.model_state[0]["batch_stats"])
    for name in ("a", "b"):
        norm = getattr(own, name)
        expected = {"mean": norm.mean[...], "var": norm.var[...]}
        ref.assert_close(actual[name], jax.device_get(expected), ref.FLOAT32)


def test_a_branch_that_leaves_out_a_norm_leaves_its_statistics():
    layer = Layer(
        made_first(
            lambda norm, x, train: nn.cond(
                (x**2).sum() < 0,
                lambda norm, x: norm(x, train),
                lambda norm, x: x,
                norm,
                x,
            )
        )
    )
    x, targets = ref.regression(8)
    state = committed(jpipe.pipeline([layer, ref.dense(4)], 2), x, targets)
    stats = state.model_state[0]["batch_stats"]["inner"]["norm"]
    np.testing.assert_allclose(stats["mean"], jnp.zeros(5), atol=1e-6)
    np.testing.assert_allclose(stats["var"], jnp.ones(5), rtol=1e-6)
