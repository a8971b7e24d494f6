"""Work for the benchmarks: a stack of small layers."""

from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from benchmarks.experiment import Work
from benchmarks.published import BY_NAME

ROOT = Path(__file__).parents[2]
WITH_MODELS = [name for name, benchmark in BY_NAME.items() if benchmark.work]
DEFERRED = {"transformer-pipeline-32", "transformer-pipeline-128"}


def work(layers=6, **options):
    """A stack of small dense layers."""
    dense = [nn.Dense(8) for _ in range(layers)]
    spec = jax.ShapeDtypeStruct((8,), jnp.float32)
    square = lambda y, t: jnp.mean((y - t) ** 2)  # noqa: E731
    return Work(dense, spec, spec, square, optax.sgd(0.1), **options)
