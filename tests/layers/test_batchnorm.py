"""Running statistics: those of the whole mini-batch, however it is split and called."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.core import FrozenDict

import jpipe

from .. import reference as ref
from ..slow import slow
from .normed import Normed, committed

# Flax keeps running statistics in single precision: an ulp is 1.2e-7. The merged
# ones are rounded once per micro-batch, the reference once.
ULPS = 1e-6


def test_statistics_far_from_zero_are_those_of_the_whole_batch():
    x, targets = ref.regression(14)
    x = x * 5 + 1000  # E[x^2] - E[x]^2 would lose it all here
    pipe = jpipe.pipeline([nn.BatchNorm(momentum=0.5), ref.dense(4)], 4)
    stats = committed(pipe, x, targets, steps=2).model_state[0]["batch_stats"]
    whole = np.asarray(x, np.float64)
    np.testing.assert_allclose(stats["mean"], 0.75 * whole.mean(0), rtol=ULPS)
    # Flax itself takes E[x^2] - E[x]^2 of each micro-batch: at 1000 with a spread of
    # 5 that leaves three digits of the variance within a micro-batch.
    expected = 0.25 + 0.75 * whole.var(0)
    np.testing.assert_allclose(stats["var"], expected, rtol=2e-2)


@pytest.mark.parametrize(
    ("microbatches", "shape"),
    [
        (4, (14, 5)),
        (5, (14, 3, 3, 2)),
        slow(1, (14, 5)),
        slow(1, (14, 3, 3, 2)),
        slow(4, (14, 3, 3, 2)),
        slow(5, (14, 5)),
    ],
)
def test_statistics_equal_one_full_batch_step_of_flax(shape, microbatches):
    """Images too, whose positions count as examples."""
    x = jax.random.normal(jax.random.key(3), shape)
    norm = nn.BatchNorm(momentum=0.9)
    variables = norm.init(jax.random.key(0), x, use_running_average=False)
    _, expected = norm.apply(
        variables, x, use_running_average=False, mutable=["batch_stats"]
    )
    pipe = jpipe.pipeline([norm, lambda x: x.reshape(len(x), -1)], microbatches)
    state = committed(pipe, x, jnp.zeros((14, 1)))
    actual = state.model_state[0]["batch_stats"]
    ref.assert_close(actual, expected["batch_stats"], ULPS)


def test_statistics_of_single_precision_keep_it(double):
    """Also where a call computes them in double precision, in which they are summed."""
    norm = nnx.BatchNorm(5, momentum=0.5, rngs=nnx.Rngs(0))
    for layer, dtype, offset, relative in (
        (norm, jnp.float32, 0, 1e-5),
        # Sums in single precision would lose the variance.
        (nn.BatchNorm(momentum=0.5), jnp.float64, 1e6, 1e-4),
    ):
        x, targets = ref.regression(8, dtype)
        x = x * 5 + offset
        state = committed(jpipe.pipeline([layer, ref.dense(4)], 4), x, targets)
        stats = state.model_state[0]["batch_stats"]
        expected = {"mean": 0.5 * x.mean(0), "var": 0.5 + 0.5 * x.var(0)}
        expected = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), expected)
        ref.assert_close(stats, expected, relative)


# What becomes of the statistics is not its subject.
@pytest.mark.filterwarnings("ignore:value_and_grad leaves:UserWarning")
def test_statistics_may_be_in_a_frozen_dictionary():
    x, targets = ref.regression(8)
    pipe = jpipe.sequential([Normed(), ref.dense(4)], 2)
    variables = pipe.init(jax.random.key(0), x)
    frozen = tuple(FrozenDict(entry) for entry in variables)
    expected = pipe.value_and_grad(ref.mse)(variables, x, targets)
    result = pipe.value_and_grad(ref.mse)(frozen, x, targets)
    ref.assert_equal(*(jax.tree.leaves(ref.on_host(v)) for v in (result, expected)))


# ------------------------------------------ how a layer calls them

TWICE = "is called twice, or in a loop such as nn.scan: a second call"
CHANGED = "is copied or changed in the same step"
MASK = "is given a mask: statistics"
KEY = jax.random.key(0)
X, TARGETS = ref.regression(8)


class Norm(nn.Module):
    """A batch norm in a module that is transformed."""

    @nn.compact
    def __call__(self, x, train):
        return nn.BatchNorm(not train, momentum=0.9, name="norm")(x)


class Masked(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        norm = nn.BatchNorm(not train, momentum=0.9)
        return norm(x, mask=jnp.arange(len(x))[:, None] > 0)


class Again(nn.Module):
    """Two calls, of one norm or of two, which JAX traces once."""

    names: tuple[str, str]

    @nn.compact
    def __call__(self, x, train):
        norm_class = nn.jit(nn.remat(Norm, static_argnums=(2,)), static_argnums=(2,))
        norms = {name: norm_class(name=name) for name in sorted(set(self.names))}
        return sum(norms[name](k * x, train) for k, name in enumerate(self.names, 1))


class SideBySide(nn.Module):
    """Norms with statistics of their own, along an axis."""

    @nn.compact
    def __call__(self, x, train):
        axes = {"batch_stats": 0, "params": 0}
        options = {"split_rngs": {"params": True}, "axis_size": 2}
        norm_class = nn.vmap(Norm, in_axes=(None, None), variable_axes=axes, **options)
        return norm_class(name="inner")(x, train).sum(0)


class InScan(nn.Module):
    """A loop over norms, each with statistics of its own."""

    @nn.compact
    def __call__(self, x, train):
        axes = {"batch_stats": 0, "params": 0}
        options = {"split_rngs": {"params": True}, "length": 2, "in_axes": nn.broadcast}
        scanned = nn.scan(Loop, variable_axes=axes, **options)
        return scanned(name="loop")(x, train)[0]


class Loop(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        return nn.Dense(5)(Norm(name="inner")(x, train)), None


class ChangesAgain(nn.BatchNorm):
    """A class of the user's own, which changes what that of Flax has left."""

    def __call__(self, x, train):
        y = super().__call__(x, use_running_average=not train)
        if train and not self.is_initializing():
            mean = self.get_variable("batch_stats", "mean")
            self.put_variable("batch_stats", "mean", 0.9 * mean)
        return y


class LayerNnx(nnx.Module):
    """Two batch norms, and what a function does with them."""

    def __init__(self, function, norm_class=nnx.BatchNorm, **options):
        self.function = function
        options = {"momentum": 0.9, **options}
        self.a, self.b = (norm_class(5, rngs=nnx.Rngs(0), **options) for _ in range(2))

    def __call__(self, x):
        return self.function(self, x)


class MasksItself(nnx.BatchNorm):
    """A class of the user's own, which gives that of Flax a mask."""

    def __call__(self, x, use_running_average=None, *, mask=None):
        mask = jnp.arange(len(x))[:, None] > 0
        return super().__call__(x, use_running_average, mask=mask)


def call(norm, x):
    return norm(x)


def clipped(norm, x):
    y = norm(x)
    norm.var[...] = jnp.clip(norm.var[...], 0.5, 2)
    return y


# What needs one micro-batch, and what is said of several.
REFUSED = {
    "twice": (Again(("a", "a")), TWICE),
    "scan": (InScan(), TWICE),
    "mask": (Masked(), MASK),
    "nnx, twice": (
        LayerNnx(lambda norms, x: norms.a(nnx.remat(call)(norms.a, x))),
        TWICE,
    ),
    "nnx, mask": (LayerNnx(lambda norms, x: norms.a(x), MasksItself), MASK),
    "changed": (ChangesAgain(), CHANGED),
    "nnx, changed": (LayerNnx(lambda norms, x: nnx.jit(clipped)(norms.a, x)), CHANGED),
}
ONCE = {
    "jit of remat": Again(("a", "b")),
    "vmap": SideBySide(),
    "nnx, remat": LayerNnx(
        lambda norms, x: nnx.remat(call)(norms.a, x) + norms.b(2 * x)
    ),
}


def compare(layer, num_microbatches):
    """Asserts that statistics after a step are those of Flax on the whole batch."""
    pipe = jpipe.sequential([layer, ref.dense(4)], num_microbatches)
    if isinstance(layer, nn.Module):
        variables = jax.device_get(pipe.init(KEY, X))[0]
        _, expected = layer.apply(variables, X, True, mutable=["batch_stats"])
    else:
        unpipelined = nnx.clone(layer)
        unpipelined(X)
        expected = {
            "batch_stats": nnx.to_pure_dict(nnx.state(unpipelined, nnx.BatchStat))
        }
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


def test_frozen_norm_may_be_called_twice_and_masked():
    def twice(layer, x):
        return layer.a(x) + layer.a(2 * x, mask=x > 0)

    layer = LayerNnx(twice, use_running_average=True)
    pipe = jpipe.sequential([layer, ref.dense(4)], 2)
    variables = pipe.init(KEY, X)
    state = committed(pipe, X, TARGETS)
    ref.assert_equal(state.model_state[0]["batch_stats"], variables[0]["batch_stats"])


def test_statistics_inside_a_jit_of_flax_are_taken_from_every_stage():
    x, tx = jax.random.normal(jax.random.key(1), (8, 3)), optax.sgd(0.0)

    def statistics(block, stages):
        pipe = jpipe.pipeline([block(), block()], 2, balance=stages)
        state = pipe.init_train_state(KEY, x, tx)
        state, _ = pipe.train_step(ref.mse, tx)(state, x, x)
        return jax.device_get(state.model_state)

    jitted = nn.jit(Norm, static_argnums=(2,))
    ref.assert_close(statistics(jitted, [1, 1]), statistics(Norm, [2]), ref.FLOAT32)
    # Nor does what was traced here come out where the momentum is the user's.
    variables = jitted().init(KEY, x, False)
    _, changed = jitted().apply(variables, x[:4], True, mutable=["batch_stats"])
    np.testing.assert_allclose(
        changed["batch_stats"]["norm"]["mean"], 0.1 * x[:4].mean(axis=0), rtol=1e-5
    )


class OwnRule(nn.BatchNorm):
    """A class that keeps its statistics without that of Flax."""

    @nn.compact
    def __call__(self, x, train):
        mean = self.variable("batch_stats", "mean", jnp.zeros, x.shape[1:])
        if train and not self.is_initializing():
            mean.value = 0.5 * mean.value + 0.5 * x.mean(0)
        return x - mean.value


def test_statistics_of_a_subclass_with_other_updates_are_averaged():
    state = committed(jpipe.sequential([OwnRule(), ref.dense(4)], 2), X, TARGETS)
    (mean,) = jax.tree.leaves(state.model_state[0])
    # The mean over the micro-batches of what each has made of it.
    np.testing.assert_allclose(mean, 0.5 * X.mean(0), rtol=1e-5, atol=1e-6)
