"""Shapes and dtypes as text: for processes that are not given the arrays."""

import ast
import json
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any


def to_text(tree: PyTree, name: str) -> str:
    """The specs of a tree, as a literal of Python with a text for each leaf.

    Raises:
      ValueError: if something but dicts, lists and tuples holds the leaves.
    """
    try:
        text = repr(jax.tree.map(_to_json, tree))
        ast.literal_eval(text)
    except (TypeError, ValueError, SyntaxError):
        raise ValueError(
            f"processes that are given {name}=None cannot learn the shapes in "
            f"{jax.tree.structure(tree)}; give {name} as arrays in dicts, lists and "
            f"tuples, or give those processes its jax.ShapeDtypeStruct leaves"
        ) from None
    return text


def from_text(text: str) -> PyTree:
    """The inverse of `to_text`, as specs."""
    return jax.tree.map(_from_json, ast.literal_eval(text))


def _to_json(leaf: Any) -> str:
    kind: Any = jax.typeof(leaf)
    return json.dumps([kind.shape, jnp.dtype(kind.dtype).name, kind.weak_type])


def _from_json(text: str) -> jax.ShapeDtypeStruct:
    shape, dtype, weak = json.loads(text)
    return jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype), weak_type=weak)
