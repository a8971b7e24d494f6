"""Sums over micro-batches, from zero to what they stand for, of flat leaves."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

Leaves = list[jax.Array]


def zeros(specs: Sequence[Any]) -> Callable[[], Leaves]:
    """Sums of nothing."""
    return lambda: [jnp.zeros(spec.shape, spec.dtype) for spec in specs]


def adding(counts: Sequence[int]) -> Callable[..., Leaves]:
    """Adds leaves, one after the other, each to those of its own."""

    def add(*leaves: jax.Array) -> list[jax.Array]:
        rest = iter(leaves)
        return [sum((next(rest) for _ in range(n - 1)), next(rest)) for n in counts]

    return add


def finishing(count: int, dtypes: Sequence[Any]) -> Callable[..., Leaves]:
    """``(*sums, *divisor) -> sums``, divided if there is a divisor, and cast."""

    def finish(*leaves: jax.Array) -> list[jax.Array]:
        sums, divisor = list(leaves[:count]), leaves[count:]
        if divisor:
            sums = [x / divisor[0].astype(x.dtype) for x in sums]
        return [x.astype(dtype) for x, dtype in zip(sums, dtypes, strict=True)]

    return finish
