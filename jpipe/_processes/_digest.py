"""Arrays, texts and specs in a few letters, which processes compare or send."""

import ast
import hashlib
import json
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._arrays import as_numbers, is_non_addressable, local_copy

PyTree = Any
# The most values that are compared one by one; more are compared by a digest.
_MOST_VALUES = 8
_LETTERS = 12  # of a digest


def digest(lines: Iterable[str]) -> str:
    """The SHA-256 of lines of text, shortened."""
    sha = hashlib.sha256()
    for line in lines:
        sha.update(line.encode())
    return sha.hexdigest()[:_LETTERS]


def array_digest(array: Any) -> str:
    """The dtype, shape and values of an array; no values if it is non-addressable."""
    if is_non_addressable(array):
        return f"{array.dtype}{list(array.shape)}"
    values = np.asarray(as_numbers(local_copy(array)))
    like = f"{values.dtype}{list(values.shape)}"
    if values.size <= _MOST_VALUES:
        return f"{like} {values.tolist()}"
    return f"{like} {hashlib.sha256(values.tobytes()).hexdigest()[:_LETTERS]}"


def specs_to_text(tree: PyTree, name: str) -> str:
    """The specs of a tree: a Python literal with the same containers.

    Args:
      tree: arrays or specs.
      name: the name of the tree in errors.

    Raises:
      ValueError: if something but dicts, lists and tuples holds the leaves.

    Example:
      >>> print(specs_to_text({"x": jnp.ones((4, 2))}, "x"))
      {'x': '[[4, 2], "float32", false]'}
    """
    try:
        text = repr(jax.tree.map(_leaf_to_text, tree))
        ast.literal_eval(text)
    except (TypeError, ValueError, SyntaxError):
        raise ValueError(
            f"processes that are given {name}=None cannot learn the shapes in "
            f"{jax.tree.structure(tree)}; give {name} as arrays in dicts, lists and "
            f"tuples, or give those processes its jax.ShapeDtypeStruct leaves"
        ) from None
    return text


def specs_from_text(text: str) -> PyTree:
    """The tree of `jax.ShapeDtypeStruct` leaves that `specs_to_text` wrote."""
    return jax.tree.map(_leaf_from_text, ast.literal_eval(text))


def _leaf_to_text(leaf: Any) -> str:
    aval: Any = jax.typeof(leaf)
    return json.dumps([aval.shape, jnp.dtype(aval.dtype).name, aval.weak_type])


def _leaf_from_text(text: str) -> jax.ShapeDtypeStruct:
    shape, dtype, weak_type = json.loads(text)
    return jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype), weak_type=weak_type)
