"""Batch norms called once, twice, with masks, frozen, in transformations of Flax."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import errors, nnx
from flax import linen as nn
from flax.core import FrozenDict

import jpipe

from .. import reference as ref
from .normed import Normed, committed

TWICE = "is called twice in one layer: the second time it would start from"
READ = "is copied or changed in the same step"
MASK = "is given a mask: statistics"
STACKED = {"batch_stats": 0, "params": 0}
KEY = jax.random.key(0)
X, TARGETS = ref.regression(8)


class Norm(nn.Module):
    """A batch norm in a module that is transformed."""

    @nn.compact
    def __call__(self, x, train):
        return nn.BatchNorm(not train, momentum=0.9, name="norm")(x)


class Layer(nn.Module):
    """Does what a function does that is given it, an input and whether it is trained.

    The function is an attribute, so that each case is one line of a table.
    """

    function: Any

    @nn.compact
    def __call__(self, x, train):
        return self.function(self, x, train)


class LayerNnx(nnx.Module):
    """Two batch norms, and what a function does with them."""

    def __init__(self, function, kind=nnx.BatchNorm, frozen=False):
        options = {"momentum": 0.9, "use_running_average": frozen}
        self.function = function
        self.a, self.b = (kind(5, rngs=nnx.Rngs(0), **options) for _ in range(2))

    def __call__(self, x):
        return self.function(self, x)


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


def frozen_first(norm, x, train):
    return norm(nn.remat(lambda norm, x: norm(x, False))(norm, x), train)


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


def masked(layer, x, train):
    norm = nn.BatchNorm(not train, momentum=0.9)
    return norm(x, mask=jnp.arange(len(x))[:, None] > 0)


def call(norm, x):
    return norm(x)


def call_masked(norm, x):
    return norm(x, mask=jnp.arange(len(x))[:, None] > 0)


class MasksItself(nnx.BatchNorm):
    """A class of the user's own, which gives that of Flax a mask."""

    def __call__(self, x, use_running_average=None, *, mask=None):
        mask = jnp.arange(len(x))[:, None] > 0
        return super().__call__(x, use_running_average, mask=mask)


# What needs one micro-batch, and what is said of several.
REFUSED = {
    "twice": (Layer(calls(lambda kind: kind, "a", "a")), TWICE),
    "jit, twice": (Layer(calls(lambda kind: jit(remat(kind)), "a", "b", "a")), TWICE),
    "branch, and then": (Layer(made_first(perhaps_and_then)), f"{TWICE}|{READ}"),
    "carried by a scan": (Layer(made_first(carried)), f"{TWICE}|{READ}"),
    "twice in a scan": (Layer(along(2)), f"{TWICE}|{READ}"),
    "mask": (Layer(masked), MASK),
    "nnx, twice": (LayerNnx(lambda own, x: own.a(x) + own.a(2 * x)), TWICE),
    "nnx, in a body": (
        LayerNnx(lambda own, x: nnx.jit(lambda norm, x: norm(norm(x)))(own.a, x)),
        TWICE,
    ),
    "nnx, after": (LayerNnx(lambda own, x: own.a(nnx.remat(call)(own.a, x))), TWICE),
    "nnx, mask": (LayerNnx(lambda own, x: nnx.remat(call_masked)(own.a, x)), MASK),
    "nnx, class": (LayerNnx(lambda own, x: own.a(x), MasksItself), MASK),
}
ONCE = {
    "jit of remat": Layer(calls(lambda kind: jit(remat(kind)), "a", "b")),
    "remat": Layer(calls(remat, "a", "b")),
    "frozen first": Layer(made_first(frozen_first)),
    "branch": Layer(made_first(perhaps)),
    "vmap": Layer(side_by_side),
    "nnx, jit": LayerNnx(lambda own, x: (f := nnx.jit(call))(own.a, x) + f(own.b, x)),
    "nnx, remat": LayerNnx(lambda own, x: nnx.remat(call)(own.a, x) + own.b(2 * x)),
    "nnx, read": LayerNnx(lambda own, x: own.a(x + own.a.mean[...])),
}


def compare(layer, num_microbatches):
    """Asserts that statistics after a step are those of Flax on the whole batch."""
    pipe = jpipe.sequential([layer, ref.dense(4)], num_microbatches)
    if isinstance(layer, nn.Module):
        variables = jax.device_get(pipe.init(KEY, X))[0]
        _, expected = layer.apply(variables, X, True, mutable=["batch_stats"])
    else:
        own = nnx.clone(layer)
        own(X)
        expected = {"batch_stats": nnx.to_pure_dict(nnx.state(own, nnx.BatchStat))}
    state = committed(pipe, X, TARGETS)
    ref.assert_close(jax.device_get(state.model_state[0]), expected, ref.FLOAT32)


@pytest.mark.parametrize(("layer", "match"), REFUSED.values(), ids=REFUSED)
def test_calls_that_need_one_micro_batch_are_refused_with_several(layer, match):
    pipe = jpipe.sequential([layer, ref.dense(4)], 2)
    with pytest.raises(ValueError, match=match) as refusal:
        committed(pipe, X, TARGETS)
    assert "num_microbatches=1" in str(refusal.value)
    compare(layer, 1)


@pytest.mark.parametrize("name", ONCE)
def test_statistics_of_one_call_are_those_of_flax(name):
    compare(ONCE[name], 2)


def test_branch_that_leaves_out_a_norm_leaves_its_statistics():
    def never(norm, x, train):
        left_out = lambda norm, x: norm(x, train)  # noqa: E731
        return nn.cond((x**2).sum() < 0, left_out, lambda norm, x: x, norm, x)

    compare(Layer(made_first(never)), 2)


def test_frozen_batch_norms_may_be_called_twice_and_masked():
    def linen(layer, x, train):
        norm = nn.BatchNorm(use_running_average=True, name="norm")
        return norm(x) + norm(2 * x, mask=x > 0)

    def of_nnx(own, x):
        return own.a(x) + own.a(2 * x, mask=x > 0)

    for layer in (Layer(linen), LayerNnx(of_nnx, frozen=True)):
        pipe = jpipe.sequential([layer, ref.dense(4)], 2)
        variables = pipe.init(KEY, X)
        loss, grads = pipe.value_and_grad(ref.mse)(variables, X, TARGETS)
        y = pipe.apply(variables, X)
        np.testing.assert_allclose(loss, ref.mse(y, TARGETS), rtol=1e-5)
        state = committed(pipe, X, TARGETS)
        ref.assert_equal(
            jax.device_get(state.model_state[0]["batch_stats"]),
            jax.device_get(variables[0]["batch_stats"]),
        )
        assert any(leaf.any() for leaf in jax.tree.leaves(grads[0]))


def test_statistics_inside_a_jit_of_flax_are_taken_from_every_stage():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, train: bool):
            return nn.BatchNorm(not train, momentum=0.9, name="norm")(x) + 5.0

    x, tx = jax.random.normal(jax.random.key(1), (8, 3)), optax.sgd(0.0)

    def statistics(block, stages):
        pipe = jpipe.pipeline([block(), block()], 2, balance=stages)
        state = pipe.init_train_state(KEY, x, tx)
        state, _ = pipe.train_step(ref.mse, tx)(state, x, x)
        return jax.device_get(state.model_state)

    jitted = nn.jit(Block, static_argnums=(2,))
    ref.assert_close(statistics(jitted, [1, 1]), statistics(Block, [2]), ref.FLOAT32)
    # Nor does what was traced here come out where the momentum is the user's.
    variables = jitted().init(KEY, x, False)
    _, changed = jitted().apply(variables, x[:4], True, mutable=["batch_stats"])
    np.testing.assert_allclose(
        changed["batch_stats"]["norm"]["mean"], 0.1 * x[:4].mean(axis=0), rtol=1e-5
    )


class Always(nn.Module):
    """Normalizes by the batch, trained or not."""

    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(use_running_average=False)(x)


def test_batch_norm_that_never_evaluates_trains_and_is_refused_in_evaluation():
    layers, tx = [Always(), nn.Dense(4)], optax.sgd(0.1)
    pipe = jpipe.pipeline(layers, 1)
    state = pipe.init_train_state(KEY, X, tx)
    own, params = (ref.on_host(tree) for tree in (state.model_state, state.params))
    state, metrics = pipe.train_step(ref.mse, tx)(state, X, TARGETS)

    def loss(params):
        given = {"params": params[0], **own[0]}
        y, changed = Always().apply(given, X, mutable=["batch_stats"])
        y = nn.Dense(4).apply({"params": params[1]}, y)
        return ref.mse(y, TARGETS), changed

    (expected, changed), grads = jax.value_and_grad(loss, has_aux=True)(params)
    ref.assert_close(metrics["loss"], expected, ref.FLOAT32)
    ref.assert_close(state.model_state[0], changed, ref.FLOAT32)
    after = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    ref.assert_close(state.params, after, ref.FLOAT32)
    for evaluate in (
        lambda: pipe.apply(state.variables, X),
        lambda: pipe.value_and_grad(ref.mse)(state.variables, X, TARGETS, train=False),
    ):
        with pytest.raises(errors.ModifyScopeVariableError) as refusal:
            evaluate()
        assert "use_running_average=not train" in "".join(refusal.value.__notes__)


class Named(nnx.BatchNorm):
    """Takes another switch, and registers those that derive from it."""

    derived: ClassVar = []

    def __init_subclass__(cls, *, why, **options):
        super().__init_subclass__(**options)
        Named.derived.append(cls)

    def __call__(self, x, train=False):
        assert type(self) is Named
        return super().__call__(x, use_running_average=not train)


@pytest.mark.parametrize("kind", [Named, Normed])
def test_classes_stay_what_they_are_and_no_tracer_outlives_its_trace(kind, small_heap):
    layer = kind(5, momentum=0.5, rngs=nnx.Rngs(0)) if kind is Named else kind()
    with jax.check_tracer_leaks():
        state = committed(jpipe.sequential([layer, ref.dense(4)], 2), X, TARGETS)
    if kind is Named:
        mean, var = jax.tree.leaves(state.model_state[0])
        np.testing.assert_allclose(mean, 0.5 * X.mean(0), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(var, 0.5 + 0.5 * X.var(0), rtol=1e-5)
    assert Named.derived == []


# What becomes of the statistics is not its subject.
@pytest.mark.filterwarnings("ignore:(value_and_grad|apply) leaves:UserWarning")
def test_statistics_may_be_in_a_frozen_dictionary():
    pipe = jpipe.sequential([Normed(), ref.dense(4)], 2)
    variables = pipe.init(KEY, X)
    frozen = tuple(FrozenDict(entry) for entry in variables)
    expected = pipe.value_and_grad(ref.mse)(variables, X, TARGETS)
    found = pipe.value_and_grad(ref.mse)(frozen, X, TARGETS)
    ref.assert_equal(*(jax.tree.leaves(ref.on_host(v)) for v in (found, expected)))
