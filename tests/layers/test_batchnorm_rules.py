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

CHANGED = "its running statistics is read, copied or changed in the same step"


class OwnRule(nnx.BatchNorm):
    """A norm of Flax's class with constants of its own."""

    def __call__(self, x):
        mean, var = x.mean(0), x.var(0)
        self.mean[...] = 0.5 * self.mean[...] + 0.5 * mean
        self.var[...] = 0.5 * self.var[...] + 0.5 * var
        return (x - mean) / jnp.sqrt(var + 1e-5)


def warmed_up(norm, x):
    norm.momentum, before = 0.5, norm.momentum
    y = norm(x)
    norm.momentum = before
    return y


def clipped(norm, x):
    y = norm(x)
    norm.var[...] = jnp.clip(norm.var[...], 0.5, 2)
    return y


def updated(norm, x):
    y = norm(x)
    nnx.update(norm, {"var": jnp.clip(norm.var[...], 0.5, 2)})
    return y


class Around(nnx.Module):
    """A norm of Flax, and what is done with it."""

    def __init__(self, function, kind=nnx.BatchNorm):
        self.function = function
        self.norm = kind(5, rngs=nnx.Rngs(0))
        self.copy = nnx.BatchStat(jnp.zeros(5))

    def __call__(self, x):
        return self.function(self, x)


def copied(own, x):
    y = own.norm(x)
    own.copy[...] = own.norm.mean[...]
    return y


class AroundLinen(nn.Module):
    """A norm whose variance is clipped by the module that holds it."""

    @nn.compact
    def __call__(self, x, train):
        norm = nn.BatchNorm(not train)
        y = norm(x)
        if train and not self.is_initializing():
            var = norm.get_variable("batch_stats", "var")
            norm.put_variable("batch_stats", "var", jnp.clip(var, 0.5, 2))
        return y


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
    [
        OwnRule(5, rngs=nnx.Rngs(0)),
        Around(lambda own, x: own.norm(x), OwnRule),
        Around(lambda own, x: warmed_up(own.norm, x)),
        Around(lambda own, x: clipped(own.norm, x)),
        Around(lambda own, x: nnx.jit(clipped)(own.norm, x)),
        Around(lambda own, x: updated(own.norm, x)),
        Around(copied),
        AroundLinen(),
        ClippedLinen(),
    ],
    ids=[
        "own rule",
        "own rule inside",
        "own momentum",
        "clipped",
        "clipped in a jit",
        "updated",
        "copied",
        "clipped in linen",
        "changed in linen",
    ],
)
def test_what_flax_leaves_is_changed_by_nobody_else(layer):
    x, targets = ref.regression(8)
    with pytest.raises(ValueError, match=CHANGED):
        committed(jpipe.pipeline([layer, ref.dense(4)], 2), x, targets)


class OwnRuleLinen(nn.BatchNorm):
    """A class that keeps its statistics without that of Flax."""

    @nn.compact
    def __call__(self, x, train):
        mean = self.variable("batch_stats", "mean", jnp.zeros, x.shape[1:])
        if train and not self.is_initializing():
            mean.value = 0.5 * mean.value + 0.5 * x.mean(0)
        return x - mean.value


def test_a_class_of_linen_with_a_rule_of_its_own_keeps_it():
    x, targets = ref.regression(8)
    state = committed(jpipe.pipeline([OwnRuleLinen(), ref.dense(4)], 2), x, targets)
    (mean,) = jax.tree.leaves(state.model_state[0])
    # The mean over the micro-batches of what each has made of it.
    np.testing.assert_allclose(mean, 0.5 * x.mean(0), rtol=1e-5, atol=1e-6)


def says_it_itself(own, x):
    return own.norm(x, use_running_average=not own.training)


def test_a_norm_that_an_attribute_trains_in_evaluation_is_refused():
    layer = Around(says_it_itself)
    layer.training = True
    pipe = jpipe.pipeline([layer, ref.dense(4)], 2)
    with pytest.raises(ValueError, match=r"norm is trained in evaluation.*not train"):
        pipe.init(jax.random.key(0), jnp.ones((4, 5)))
