"""What a compiled program depends on: structures, kinds of arrays, and settings."""

from collections.abc import Iterable
from typing import Any

import jax

from .. import _compat

# Under which settings of JAX it is called: `jax.jit` distinguishes these besides
# arguments, and so must a program that was traced once.
_of_traces = _compat.settings_reader()
# To a type checker it has no attributes.
_config: Any = jax.config


def settings() -> Any:
    """Equal when the same programs are right; where NaNs are looked for, others are."""
    return _of_traces(), _config.jax_debug_nans, _config.jax_debug_infs


def kinds(leaves: Iterable[Any]) -> tuple[Any, ...]:
    """Shape, dtype and weakness of each leaf, hashable; its type, if it is no array.

    A weakly typed array takes the dtype of what it meets, so it makes another program.
    """
    return tuple([_kind(leaf) for leaf in leaves])


def _kind(leaf: Any) -> tuple[Any, ...]:
    try:
        aval = leaf.aval  # each of the three, as an attribute of the array, looks it up
        return aval.shape, aval.dtype, aval.weak_type
    except AttributeError:  # a spec, an array of NumPy, or none
        weak = getattr(leaf, "weak_type", False)
        return getattr(leaf, "shape", None), getattr(leaf, "dtype", type(leaf)), weak


def shapes(leaves: Iterable[Any]) -> tuple[Any, ...]:
    """The same without weakness."""
    return tuple([_kind(leaf)[:2] for leaf in leaves])


def of(*trees: Any) -> Any:
    """The structure of pytrees, and the kind of each leaf."""
    leaves, tree = jax.tree.flatten(trees)
    return tree, kinds(leaves)


def call(tree: Any, leaves: Iterable[Any]) -> Any:
    """What the programs of a call depend on: all that `jax.jit` tells apart.

    Args:
      tree: the structure of the arguments.
      leaves: their leaves, of which it matters where they are and whether bound to it.
    """
    return settings(), tree, tuple([_located(leaf) for leaf in leaves])


def _located(leaf: Any) -> tuple[Any, ...]:
    try:
        return leaf.aval, leaf.sharding, leaf.committed
    except AttributeError:  # on the host, or a tracer
        kind = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
        return type(leaf), *kind
