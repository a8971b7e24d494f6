"""What a compiled program depends on: structures, shapes and dtypes, and settings."""

from collections.abc import Iterable
from typing import Any

import jax

from . import _compat

# Under which settings of JAX it is called: what `jax.jit` tells apart beside arguments,
# a program that was traced once must be told apart by.
settings = _compat.settings_reader()


def kinds(leaves: Iterable[Any]) -> tuple[Any, ...]:
    """The shape and dtype of each leaf, hashable; of what is no array, its type."""
    return tuple(
        [
            (getattr(leaf, "shape", None), getattr(leaf, "dtype", type(leaf)))
            for leaf in leaves
        ]
    )


def of(*trees: Any) -> Any:
    """The structure of pytrees, and the kind of each leaf."""
    leaves, tree = jax.tree.flatten(trees)
    return tree, kinds(leaves)
