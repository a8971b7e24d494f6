"""Modules of nnx inside those of linen, and of linen inside those of nnx."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jpipe

from .. import reference as ref
from .normed import committed

KEY, X = jax.random.key(0), jnp.ones((8, 5))
RNGS = {"dropout": jax.random.key(1)}
MEAN, VAR = 0.3, 2.0


class Open(nnx.Module):
    """A batch norm that nobody tells; its statistics are those of other data."""

    def __init__(self, rngs, frozen=False):
        self.norm = nnx.BatchNorm(
            5, momentum=0.9, rngs=rngs, use_running_average=frozen
        )
        self.norm.mean[...] = jnp.full(5, MEAN)
        self.norm.var[...] = jnp.full(5, VAR)

    def __call__(self, x):
        return self.norm(x)


class Told(Open):
    def __call__(self, x, train=False):
        return self.norm(x, use_running_average=not train)


class Masked(Open):
    def __call__(self, x):
        return self.norm(x, mask=jnp.ones((len(x), 1), bool))


class Linen(nn.Module):
    """Calls a module of nnx, perhaps in a transformation, perhaps twice."""

    kind: Any
    wrap: Any = staticmethod(lambda kind: kind)
    count: int = 1

    @nn.compact
    def __call__(self, x):
        own = self.wrap(nnx.bridge.ToLinen)(self.kind, name="own")
        return sum(own(k * x) for k in range(1, 1 + self.count))


class Tells(nn.Module):
    kind: Any

    @nn.compact
    def __call__(self, x, train):
        return nnx.bridge.to_linen(self.kind, name="own")(x, train)


def stats_after_a_step(layer):
    x, targets = ref.regression(8)
    state = committed(jpipe.pipeline([layer, ref.dense(4)], 2), x, targets)
    found = jax.tree_util.tree_leaves_with_path(state.model_state[0])
    return {path[-1].key: np.asarray(leaf) for path, leaf in found}, x


@pytest.mark.parametrize(
    "layer",
    [
        Linen(Open),
        Linen(Open, wrap=nn.remat),
        Linen(Open, wrap=nn.jit),
        Tells(Told),
    ],
)
def test_statistics_of_nnx_in_linen_are_those_of_the_mini_batch(layer):
    stats, x = stats_after_a_step(layer)
    expected = {
        "mean": 0.9 * MEAN + 0.1 * x.mean(0),
        "var": 0.9 * VAR + 0.1 * x.var(0),
    }
    ref.assert_close(stats, jax.device_get(expected), ref.FLOAT32)


def test_one_of_nnx_in_linen_that_is_frozen_stays_frozen():
    class Frozen(Open):
        def __init__(self, rngs):
            super().__init__(rngs, frozen=True)

    stats, _ = stats_after_a_step(Linen(Frozen))
    assert (stats["mean"] == np.float32(MEAN)).all()
    assert (stats["var"] == np.float32(VAR)).all()


@pytest.mark.parametrize(
    ("layer", "refusal"),
    [
        (Linen(Masked), "batch norm .* is given a mask"),
    ],
)
def test_what_is_refused_of_nnx_in_linen(layer, refusal):
    with pytest.raises(ValueError, match=refusal):
        stats_after_a_step(layer)


class LinenNorm(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        norm = nn.BatchNorm(not train, momentum=0.9, name="norm")
        return nn.Dropout(0.0)(norm(x), deterministic=not train)


class Nnx(nnx.Module):
    """Calls a linen module, whose statistics may change in training."""

    def __init__(self, function):
        own = nnx.bridge.ToNNX(LinenNorm(), rngs=nnx.Rngs(0, dropout=1))
        self.own = nnx.bridge.lazy_init(own, X)
        self.function = function

    def __call__(self, x, train):
        def call(own, x):
            return own(x, train, mutable=["batch_stats"] if train else False)

        return self.function(call, self.own, x)


@pytest.mark.parametrize(
    "function",
    [
        lambda call, own, x: call(own, x),
        lambda call, own, x: nnx.remat(call)(own, x),
    ],
)
def test_statistics_of_linen_in_nnx_are_those_of_the_mini_batch(function):
    stats, x = stats_after_a_step(Nnx(function))
    expected = {"mean": 0.1 * x.mean(0), "var": 0.9 + 0.1 * x.var(0)}
    ref.assert_close(stats, jax.device_get(expected), ref.FLOAT32)


def test_one_of_linen_in_nnx_that_is_called_twice_is_refused():
    with pytest.raises(ValueError, match="batch norm norm is called twice in one"):
        stats_after_a_step(Nnx(lambda call, own, x: call(own, x) + call(own, 2 * x)))


def test_one_of_linen_in_nnx_that_nobody_told_warns():
    with pytest.warns(UserWarning, match="batch norm norm: LinenNorm.__call__ left"):
        stats_after_a_step(Nnx(lambda call, own, x: own(x)))
