"""The variables of one stage as flat leaves, and the sums that are kept of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from .._jaxprs import _jaxpr
from ._vjp import Leaves

PyTree = Any


@dataclass(frozen=True)
class Weights:
    """The variables of one stage as flat leaves.

    Attributes:
      tree: the structure, with one entry per layer.
      specs: shapes and dtypes.
      paths: where each leaf stands, from the layer's number within the stage.
      trainable: which leaves have a gradient: see `_trainable`.
    """

    tree: Any
    specs: tuple[jax.ShapeDtypeStruct, ...]
    paths: tuple[Any, ...]
    trainable: tuple[bool, ...]

    @classmethod
    def of(cls, variables: Sequence[PyTree], marks: Sequence[PyTree]) -> "Weights":
        """Reads the structure of the variables of a stage's layers.

        Args:
          variables: one entry per layer.
          marks: whether each of their leaves is trained.
        """
        flat, tree = jax.tree_util.tree_flatten_with_path(tuple(variables))
        paths = tuple(path for path, _ in flat)
        leaves = [leaf for _, leaf in flat]
        trainable = tuple(jax.tree.leaves(tuple(marks)))
        # One object for what is one array: a tied leaf may stand in a stage twice.
        made = {id(x): _jaxpr.spec(x) for x in leaves}
        return cls(tree, tuple(made[id(x)] for x in leaves), paths, trainable)


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
