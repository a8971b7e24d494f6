"""What arrays are like, as JSON: for processes that are not given them."""

from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any


def written(tree: PyTree, name: str) -> Any:
    """Shapes and dtypes for JSON, in which mappings and sequences are told apart.

    Raises:
      ValueError: if something else holds leaves.
    """
    if tree is None:
        return None
    if type(tree) is dict:
        return {"dict": [[key, written(own, name)] for key, own in tree.items()]}
    if type(tree) in (list, tuple):
        return {type(tree).__name__: [written(own, name) for own in tree]}
    try:
        kind: Any = jax.typeof(tree)
        return {"leaf": [kind.shape, jnp.dtype(kind.dtype).name, kind.weak_type]}
    except TypeError:
        raise ValueError(
            f"{name} holds a {type(tree).__name__}, of which processes that are given "
            f"None cannot be told; give {name} in dicts, lists and tuples, or give "
            f"those its jax.ShapeDtypeStruct leaves"
        ) from None


def read(written: Any) -> PyTree:
    """The inverse of `written`, as specs."""
    if written is None:
        return None
    ((kind, own),) = written.items()
    if kind == "leaf":
        shape, dtype, weak = own
        return jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype), weak_type=weak)
    if kind == "dict":
        return {key: read(inner) for key, inner in own}
    return {"list": list, "tuple": tuple}[kind](map(read, own))
