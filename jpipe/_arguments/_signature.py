"""Signatures of arguments: equal signatures run the same compiled program.

A signature has the structure of the arguments, the aval of each leaf, and the settings
of JAX under which they are traced.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from .. import _compat
from .._jaxprs._host_memory import is_on_host
from ._cache import RecentCache

# Reads the settings of JAX that `jax.jit` distinguishes besides arguments; a program
# that was traced once must distinguish them too.
_read_trace_settings = _compat.settings_reader()
# To a type checker it has no attributes.
_config: Any = jax.config


def settings() -> Any:
    """A key of the settings of JAX under which a program is traced and compiled."""
    return _read_trace_settings(), _config.jax_debug_nans, _config.jax_debug_infs


def aval_keys(leaves: Iterable[Any]) -> tuple[Any, ...]:
    """The shape, dtype and weak type of each leaf; its type, if it is no array.

    A weakly typed array takes the dtype of its operands, so it needs another program.
    """
    return tuple([_aval_key(leaf) for leaf in leaves])


def _aval_key(leaf: Any) -> tuple[Any, Any, bool]:
    if isinstance(leaf, np.ndarray):
        return leaf.shape, _dtype_in_jax(leaf.dtype), False
    try:
        aval = leaf.aval  # looked up once: `shape`, `dtype`, ... of an array look it up
        return aval.shape, aval.dtype, aval.weak_type
    except AttributeError:  # a spec, or no array
        shape = getattr(leaf, "shape", None)
        dtype = getattr(leaf, "dtype", type(leaf))
        return shape, dtype, getattr(leaf, "weak_type", False)


def memory_key(leaves: Iterable[Any]) -> tuple[int, ...]:
    """The indices of the leaves that are in the memory of the host."""
    return tuple([i for i, leaf in enumerate(leaves) if is_on_host(leaf)])


def _dtype_in_jax(dtype: np.dtype) -> Any:
    """The dtype that an array of NumPy has in JAX: of 32 bits for 64, by default."""
    try:
        return jax.dtypes.canonicalize_dtype(dtype)
    except TypeError:  # such as text, which is refused where the array is read
        return dtype


def shape_keys(leaves: Iterable[Any]) -> tuple[Any, ...]:
    """The shape and dtype of each leaf, without its weak type."""
    return tuple([_aval_key(leaf)[:2] for leaf in leaves])


def tree_signature(*trees: Any) -> Any:
    """The structure of pytrees, and the shape, dtype and weak type of each leaf."""
    leaves, structure = jax.tree.flatten(trees)
    return structure, aval_keys(leaves)


def call_signature(structure: Any, leaves: Iterable[Any]) -> Any:
    """The signature of a call: all that `jax.jit` distinguishes.

    Args:
      structure: the structure of the arguments.
      leaves: their leaves; it matters on which devices they are, and if committed.
    """
    return settings(), structure, tuple([_array_key(leaf) for leaf in leaves])


def _array_key(leaf: Any) -> tuple[Any, ...]:
    try:
        return leaf.aval, leaf.sharding, leaf.committed
    except AttributeError:  # on the host, or a tracer
        signature = getattr(leaf, "_signature", None)  # of a `Stacked`
        shape = getattr(leaf, "shape", None)
        return type(leaf), shape, getattr(leaf, "dtype", None), signature


class SignatureIndices:
    """``(structure, leaves) -> index`` of a signature, which is an int.

    Who keeps the index beside what has that signature, as a train state does, compares
    ints in later calls: it reads no avals, and hashes none.
    """

    def __init__(self) -> None:
        # (structure, keys of the avals, memories) -> index
        self._indices = RecentCache[Any, int]()
        self._next_index = itertools.count()

    def __call__(self, structure: Any, leaves: Sequence[Any]) -> int:
        """Returns the index of a structure, avals and memories."""
        avals = aval_keys(leaves)
        signature = structure, avals, memory_key(leaves)
        if signature not in self._indices:
            self._indices[signature] = next(self._next_index)
        return self._indices[signature]
