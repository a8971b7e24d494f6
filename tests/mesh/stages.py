"""Pipelines whose stages have several devices, and what they are compared with."""

import math

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.sharding import AxisType

import jpipe

from .. import reference as ref

TX = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9))


def dense(width):
    return ref.dense(width, float)


class Normed(nn.Module):
    """What depends on which examples are together, and on the number of the draw."""

    @nn.compact
    def __call__(self, x, train):
        # A norm takes a bias away: what its gradient has left is noise.
        x = nn.Dense(8, use_bias=False, dtype=float, param_dtype=float)(x)
        x = nn.BatchNorm(not train, dtype=float, param_dtype=float)(x)
        return nn.Dropout(0.5, deterministic=not train)(jnp.tanh(x))


def normed():
    return [Normed(), Normed(), dense(8), dense(4)]


def mesh(*shape, names=("stage", "data", "model"), explicit=()):
    names = names[: len(shape)]
    kinds = [AxisType.Explicit if name in explicit else AxisType.Auto for name in names]
    devices = jax.devices()[: math.prod(shape)]
    return jax.make_mesh(shape, names, tuple(kinds), devices=devices)


def batch(size=24):
    return ref.regression(size, float)


def all_of(pipe, x, targets, loss_fn=ref.mse, tx=TX, **options):
    """What a pipeline gives: two steps, whose momenta tell the gradients."""
    chosen = {k: v for k, v in options.items() if k == "trainable"}
    state = pipe.init_train_state(jax.random.key(0), x, tx, **chosen)
    step = pipe.train_step(loss_fn, tx, **options)
    for _ in range(2):
        state, metrics = step(state, x, targets)
    return {"state": state, "metrics": metrics}


def compare(make, pipe, num_parts, x, targets, relative=1e-11, given=None, **options):
    """Asserts that a pipeline is the same layers on one device, in as many parts."""
    one = jpipe.sequential(make(), num_parts, **(given or {}))
    expected = all_of(one, x, targets, **options)
    actual = all_of(pipe, x, targets, **options)
    close(actual, expected, relative)
    return actual


def close(actual, expected, relative=1e-11):
    """Every leaf is close; running statistics, which Flax has in single, less so."""

    def kept(single):
        return [
            [x for x in jax.tree.leaves(tree) if (x.dtype == jnp.float32) == single]
            for tree in (actual, expected)
        ]

    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    ref.assert_close(*kept(False), relative)
    ref.assert_close(*kept(True), ref.FLOAT32)
