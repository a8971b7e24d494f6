"""What kinds of Variables an nnx module holds; what is no module holds none."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ._nnx import leaves
from ._nnx_rngs import Path


def parameters(source: Any) -> dict[Path, nnx.Variable]:
    """The Variables that hold the parameters of a module, by their paths."""
    return {
        path: leaf
        for path, (collection, leaf) in leaves(source).items()
        if collection == "params"
    }


def untrained(source: Any) -> dict[Path, nnx.Variable]:
    """Floating Variables of types that are the user's own and not `nnx.Param`."""
    return {
        path: leaf
        for path, (collection, leaf) in leaves(source).items()
        if isinstance(leaf, nnx.Variable)
        and collection not in (None, "params")
        and not type(leaf).__module__.startswith("flax.")
        and isinstance(value := leaf.get_value(), jax.Array | np.ndarray)
        and jnp.issubdtype(value.dtype, jnp.inexact)
    }
