"""Initial variables of a layer."""

from collections.abc import Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp

from .._jaxprs._jaxpr import zeros
from . import _skip
from ._layer import Layer

PyTree = Any


def init_with(
    layer: Layer,
    key: chex.PRNGKey,
    spec: PyTree,
    skips: Mapping[_skip.Key, PyTree],
    borrowed: Mapping[str, PyTree],
    guess: PyTree = None,
    frames: list[_skip.Frame] | None = None,
) -> dict[str, PyTree]:
    """The own variables of a layer that may pop zeros of the given shapes.

    As the layer makes them: some may be weakly typed.
    """
    popped = {name: zeros(value) for name, value in skips.items()}
    with _skip.applying(popped, layer.namespace, guess=guess, watch=False) as frame:
        if frames is not None:
            frames.append(frame)
        if not borrowed:
            return layer.init(key, spec)
        return layer.extend(key, spec, borrowed) if layer.extend else {}


def strong(leaf: Any) -> Any:
    """An array that is not weakly typed, as after a step, so that programs fit both."""
    dtype = jnp.result_type(leaf)
    is_key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    return leaf if is_key else jnp.asarray(leaf, dtype)
