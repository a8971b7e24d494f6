"""Where the leaves of trees belong: the names of places, found by path."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax

from .._instructions._sharding import WHOLE, Sharding

# The number of a place, or None for what every place may have: constants, counters,
# and what follows from them alone. Such values are computed wherever needed.
Home = int | None
Path = tuple[Any, ...]


def paths(tree: Any) -> list[Path]:
    """The path of each leaf."""
    return [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def places(found: Iterable[tuple[Path, Home]]) -> dict[Path, int]:
    """The place of each path, and of every tail of it that only one place has.

    A tail of one key, such as the name of a bias, says nothing.
    """
    whole = {path: home for path, home in found if home is not None}
    tails: dict[Path, Home] = {}
    for path, home in whole.items():
        for start in range(1, len(path) - 1):
            tail = path[start:]
            tails[tail] = home if tails.get(tail, home) == home else None
    return {**{tail: home for tail, home in tails.items() if home is not None}, **whole}


def homes(tree: Any, place: dict[Path, int]) -> list[Home]:
    """Where each leaf of a tree belongs that is like another, or holds such trees.

    A leaf that mirrors a parameter, as a momentum does, has the parameter's path at
    the end of its own; one of several that belong to a parameter, as SM3 has one per
    axis, has it further in. There a path of one number would be found by accident.
    """

    def home(path: Path) -> Home:
        parts = [path[i:] for i in range(len(path))]
        for end in range(len(path) - 1, 1, -1):
            parts += [path[i:end] for i in range(end - 1)]
        return next((place[part] for part in parts if part in place), None)

    return [home(path) for path in paths(tree)]


def shardings(
    tree: Any, others: Iterable[tuple[Path, Any]], how: Iterable[Sharding]
) -> list[Sharding]:
    """How each leaf of a tree lies on its place: as one of others that it is like.

    That is one whose path its own ends with, of the same shape; else it is whole.

    Args:
      tree: the tree.
      others: the paths of other leaves, and these.
      how: how these lie.
    """
    known = {
        (path, tuple(leaf.shape)): each
        for (path, leaf), each in zip(others, how, strict=True)
        if each != WHOLE
    }
    if not known:
        return [WHOLE] * len(jax.tree.leaves(tree))

    def like(path: Path, leaf: Any) -> Sharding:
        tails = ((path[i:], tuple(leaf.shape)) for i in range(len(path)))
        return next((known[tail] for tail in tails if tail in known), WHOLE)

    return [like(*pair) for pair in jax.tree_util.tree_leaves_with_path(tree)]


def heaviest(sizes: Sequence[tuple[int, int]]) -> Home:
    """The place that holds most bytes, of pairs of a place and bytes.

    Of equals the last, so that a sum of scalars passes from place to place instead of
    gathering all its terms in one.
    """
    weight: dict[int, int] = {}
    for place, size in sizes:
        weight[place] = weight.get(place, 0) + size
    return max(weight, key=lambda place: (weight[place], place), default=None)
