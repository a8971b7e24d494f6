"""Leaves of variables, and the sums of their gradients."""

from typing import Any

import jax
import jax.numpy as jnp

from ._vjp import Leaves


def is_params(path: Any) -> bool:
    """Whether the path of a leaf, from the layer's number on, is one of params."""
    return getattr(path[1], "key", None) == "params"


def is_inexact(leaf: Any) -> bool:
    """Whether a leaf has a gradient: floating or complex dtype."""
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def sum_spec(leaf: Any) -> jax.ShapeDtypeStruct:
    """The spec of a sum over micro-batches of such leaves.

    Half precision is summed in single: with eight bits, the hundredth term of a sum
    of equal terms is lost.
    """
    dtype = leaf.dtype
    if is_inexact(leaf) and dtype.itemsize < 4:
        dtype = jnp.dtype(jnp.float32)
    return jax.ShapeDtypeStruct(leaf.shape, dtype)


def accumulate(sums: Leaves, new: Leaves) -> list[Any]:
    """Adds leaves to sums, in the precision of the sums."""
    return [old + x.astype(old.dtype) for old, x in zip(sums, new, strict=True)]
