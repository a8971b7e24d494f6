"""What a compiled program depends on: structures, shapes and dtypes."""

from collections.abc import Iterable
from typing import Any

import jax


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
