"""Stages, and what is made of them."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

import jpipe
from jpipe._functions._objective import Objective

from .. import reference as ref

WIDTH = 6


X, TARGETS = ref.regression(8)


def gradient_of(layers, balance=None, x=X, rngs=None, **options):
    options.setdefault("devices", jax.devices()[:1] * len(balance or layers))
    pipe = jpipe.pipeline(layers, 2, balance=balance, **options)
    variables = pipe.init(jax.random.key(0), x)
    find = pipe._cache.gradients(Objective(ref.mse))
    return find(variables, x, TARGETS, rngs, True)


def around(*middle):
    """Stages that are given and give the same width, between two that do not."""
    return [ref.dense(WIDTH), *middle, ref.dense(4)]


class Block(nnx.Module):
    """A residual block, with what may differ between two of them."""

    def __init__(self, seed, scale=1.0, rate=None, about=None, kept=None, config=None):
        rngs = nnx.Rngs(seed)
        options = {} if about is None else {"kernel_metadata": {"about": about}}
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs, **options)
        self.scale = scale
        self.config = config
        self.drop = None if rate is None else nnx.Dropout(rate, rngs=rngs)
        self.cache = None if kept is None else nnx.Intermediate(jnp.array(kept))

    def __call__(self, x):
        y = self.scale * self.linear(x)
        return x + (y if self.drop is None else self.drop(y))


class Dropped(nn.Module):
    """A block that draws other numbers in each layer."""

    @nn.compact
    def __call__(self, x, train: bool):
        return nn.Dropout(0.5, deterministic=not train)(nn.Dense(WIDTH)(x))
