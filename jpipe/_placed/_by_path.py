"""Where leaves belong that are like others: their paths tell."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax

from .._instructions._graph import Place
from .._instructions._sharding import WHOLE, Sharding

# The place of a leaf; None for what every place may have: constants, counters, and what
# follows from them alone. Such values are computed wherever they are needed.
Where = Place | None
Path = tuple[Any, ...]


def paths(tree: Any) -> list[Path]:
    """The path of each leaf."""
    return [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


class ByPath:
    """The places and shardings of leaves that are like some others.

    A leaf that mirrors a parameter, as a momentum does, has the parameter's path at the
    end of its own; one of several that belong to a parameter, as SM3 has one per axis,
    has it further in. There a path of one key would be found by accident.

    Args:
      leaves: the paths of the others, and these.
      places: the place of each.
      shardings: its sharding there.
    """

    def __init__(
        self,
        leaves: Sequence[tuple[Path, Any]],
        places: Sequence[Where],
        shardings: Sequence[Sharding],
    ) -> None:
        known = [
            (path, tuple(leaf.shape), place, sharding)
            for (path, leaf), place, sharding in zip(
                leaves, places, shardings, strict=True
            )
            if place is not None
        ]
        self._places: dict[Path, Where] = {}
        # The end of a path will do, if leaves of one place alone have it. An end of one
        # key, such as the name of a bias, says nothing.
        for path, _, place, _ in known:
            for start in range(1, len(path) - 1):
                is_one = self._places.get(path[start:], place) == place
                self._places[path[start:]] = place if is_one else None
        self._places |= {path: place for path, _, place, _ in known}
        self._shardings = {
            (path, shape): sharding
            for path, shape, _, sharding in known
            if sharding != WHOLE
        }

    def place(self, path: Path) -> Where:
        """The place of a leaf, found by its path."""
        found = (self._places.get(part) for part in _parts(path))
        return next((place for place in found if place is not None), None)

    def sharding(self, path: Path, leaf: Any) -> Sharding:
        """The sharding of a leaf: of one whose path its own ends with, of its shape."""
        ends = ((path[i:], tuple(leaf.shape)) for i in range(len(path)))
        found = (self._shardings[end] for end in ends if end in self._shardings)
        return next(found, WHOLE)

    def of(self, *trees: Any) -> tuple[list[Where], list[Sharding]]:
        """The places and the shardings of the leaves of some trees."""
        leaves = [
            leaf for tree in trees for leaf in jax.tree_util.tree_leaves_with_path(tree)
        ]
        places = [self.place(path) for path, _ in leaves]
        return places, [self.sharding(*leaf) for leaf in leaves]


def _parts(path: Path) -> Iterator[Path]:
    """The parts of a path: its ends, the longest first, then what is further in."""
    yield from (path[start:] for start in range(len(path)))
    for end in range(len(path) - 1, 1, -1):
        yield from (path[start:end] for start in range(end - 1))
