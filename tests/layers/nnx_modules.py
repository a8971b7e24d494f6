"""Modules of nnx that several tests use."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

KEY = jax.random.key(0)


class Noisy(nnx.Module):
    """Draws twice from streams that it holds."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Dropout(0.5, rngs=rngs)
        self.second = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return jnp.stack([self.first(x), self.second(x)], axis=1)


def batch_norm(width: int, dtype: Any = jnp.float32) -> nnx.BatchNorm:
    """One whose statistics have its dtype: nnx makes them in single precision."""
    module = nnx.BatchNorm(width, rngs=nnx.Rngs(0), param_dtype=dtype)
    module.mean = nnx.BatchStat(jnp.zeros(width, dtype))
    module.var = nnx.BatchStat(jnp.ones(width, dtype))
    return module
