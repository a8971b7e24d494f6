"""Running statistics by a rule of the user's own, around and instead of Flax's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jpipe

from .. import reference as ref
from .normed import committed

CHANGED = "is copied or changed in the same step"


def clipped(norm, x):
    y = norm(x)
    norm.var[...] = jnp.clip(norm.var[...], 0.5, 2)
    return y


class Around(nnx.Module):
    """A norm of Flax, and what is done with it."""

    def __init__(self, function, kind=nnx.BatchNorm):
        self.function = function
        self.norm = kind(5, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.function(self, x)


class ClippedLinen(nn.BatchNorm):
    """A class of the user's own, which changes what that of Flax has left."""

    def __call__(self, x, train):
        y = super().__call__(x, use_running_average=not train)
        if train and not self.is_initializing():
            mean = self.get_variable("batch_stats", "mean")
            self.put_variable("batch_stats", "mean", 0.9 * mean)
        return y


@pytest.mark.parametrize(
    "layer",
    [Around(lambda own, x: nnx.jit(clipped)(own.norm, x)), ClippedLinen()],
    ids=["nnx", "linen"],
)
def test_statistics_that_the_layer_changes_again_are_refused(layer):
    x, targets = ref.regression(8)
    with pytest.raises(ValueError, match=CHANGED):
        committed(jpipe.sequential([layer, ref.dense(4)], 2), x, targets)


class OwnRuleLinen(nn.BatchNorm):
    """A class that keeps its statistics without that of Flax."""

    @nn.compact
    def __call__(self, x, train):
        mean = self.variable("batch_stats", "mean", jnp.zeros, x.shape[1:])
        if train and not self.is_initializing():
            mean.value = 0.5 * mean.value + 0.5 * x.mean(0)
        return x - mean.value


def test_class_with_a_rule_of_its_own_keeps_it():
    x, targets = ref.regression(8)
    state = committed(jpipe.sequential([OwnRuleLinen(), ref.dense(4)], 2), x, targets)
    (mean,) = jax.tree.leaves(state.model_state[0])
    # The mean over the micro-batches of what each has made of it.
    np.testing.assert_allclose(mean, 0.5 * x.mean(0), rtol=1e-5, atol=1e-6)


class Observed(nn.BatchNorm):
    """Normalizes by its running mean, and moves it by a rule of its own."""

    def __call__(self, x, train):
        y = super().__call__(x, use_running_average=True)
        if train and not self.is_initializing():
            mean = self.get_variable("batch_stats", "mean")
            self.put_variable("batch_stats", "mean", 0.9 * mean + 0.1 * x.mean(0))
        return y


def observed(norm, x):
    y = norm(x)
    nnx.update(norm, {"mean": 0.9 * norm.mean[...] + 0.1 * x.mean(0)})
    return y


def test_frozen_norms_change_as_the_user_changes_them():
    def frozen():
        return nnx.BatchNorm(5, use_running_average=True, rngs=nnx.Rngs(0))

    x, targets = ref.regression(8)
    layers = [
        Observed(),
        nn.remat(Observed, static_argnums=(2,))(),
        Around(lambda own, x: observed(own.norm, x), lambda *_, **__: frozen()),
    ]
    for layer in layers:
        state = committed(jpipe.sequential([layer, ref.dense(4)], 2), x, targets)
        mean = next(
            leaf for leaf in jax.tree.leaves(state.model_state[0]) if leaf.any()
        )
        np.testing.assert_allclose(mean, 0.1 * x.mean(0), rtol=1e-5, atol=1e-6)


class Cumulative(nn.Module):
    """A norm whose momentum follows from how often it was called."""

    @nn.compact
    def __call__(self, x, train):
        count = self.variable("batch_stats", "count", lambda: jnp.zeros((), jnp.int32))
        if train and not self.is_initializing():
            count.value += 1
        return nn.BatchNorm(not train, momentum=1 - 1 / (count.value + 1.0))(x)


@pytest.mark.parametrize(
    "layer",
    [Cumulative(), nnx.BatchNorm(5, momentum=jnp.asarray(0.5), rngs=nnx.Rngs(0))],
    ids=["linen", "nnx"],
)
def test_momentum_that_is_an_array_is_refused(layer):
    x, targets = ref.regression(8)
    with pytest.raises(ValueError, match=r"momentum of batch norm .* is an array"):
        committed(jpipe.sequential([layer, ref.dense(4)], 2), x, targets)
