"""Sums and means over micro-batches."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._jaxprs._jaxpr import is_inexact

Leaves = Sequence[Any]


def sum_spec(leaf: Any) -> jax.ShapeDtypeStruct:
    """The spec of a sum over micro-batches of such leaves.

    Half precision is summed in single: with eight bits, the hundredth term of a sum
    of equal terms is lost.
    """
    dtype = leaf.dtype
    if is_inexact(leaf) and dtype.itemsize < 4:
        dtype = jnp.dtype(jnp.float32)
    return jax.ShapeDtypeStruct(leaf.shape, dtype)


def extend_mean(mean: jax.Array, value: jax.Array, weight: jax.Array) -> jax.Array:
    """A mean with one more value; that of equal values is that value to the bit.

    Args:
      mean: the mean so far.
      value: the next value.
      weight: the part of all that the value is, in the dtype in which they are added.
    """
    # Not by their difference, which may overflow, or be none of two infinities.
    both = (mean * (1 - weight) + value * weight).astype(mean.dtype)
    return jnp.where(value == mean, mean, both)


def accumulate(sums: Leaves, terms: Leaves) -> list[Any]:
    """Adds leaves to sums, in the precision of the sums."""
    pairs = zip(sums, terms, strict=True)
    return [total + term.astype(total.dtype) for total, term in pairs]
