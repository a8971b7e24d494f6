"""Where leaves belong that are like others: their paths tell."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .._instructions._graph import NOWHERE, Graph, Place, Value
from .._instructions._sharding import WHOLE, Sharding

Path = tuple[Any, ...]


class Leaf(NamedTuple):
    """A leaf of the arguments of a function.

    Attributes:
      of: the argument that it is a leaf of: its position, or its name.
      path: where it stands there.
      value: the leaf, or its spec.
      place: where it is; less than 0 where it is in no place.
      sharding: its sharding there.
    """

    of: int | str
    path: Path
    value: Any
    place: Place = NOWHERE
    sharding: Sharding = WHOLE

    @property
    def name(self) -> str:
        """What errors call it."""
        return f"argument {self.of!r}{jax.tree_util.keystr(self.path)}"

    def argument(self, graph: Graph, donated: bool = False) -> Value:
        """The leaf as an argument of a graph; its value is its spec."""
        return graph.argument(self.value, self.place, donated, self.sharding)


def located(
    of: int, tree: Any, locations: Sequence[tuple[Place, Sharding]]
) -> list[Leaf]:
    """The leaves of an argument, where they are."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(tree), locations, strict=True)
    return [Leaf(of, *leaf, *location) for leaf, location in pairs]


class ByPath:
    """The places and shardings of leaves that are like some others.

    A leaf that mirrors a parameter, as a momentum does, has the parameter's path at the
    end of its own; one of several that belong to a parameter, as SM3 has one per axis,
    has it further in. There a path of one key would be found by accident.

    Args:
      leaves: the others; those that are in no place tell nothing.
    """

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        known = [leaf for leaf in leaves if leaf.place >= 0]
        self._places: dict[Path, Place] = {}
        # The end of a path will do, if leaves of one place alone have it. An end of one
        # key, such as the name of a bias, is ambiguous.
        for leaf in known:
            for start in range(1, len(leaf.path) - 1):
                end = leaf.path[start:]
                is_one = self._places.get(end, leaf.place) == leaf.place
                self._places[end] = leaf.place if is_one else NOWHERE
        self._places |= {leaf.path: leaf.place for leaf in known}
        self._shardings = {
            (leaf.path, np.shape(leaf.value)): leaf.sharding
            for leaf in known
            if leaf.sharding != WHOLE
        }

    def place(self, path: Path) -> Place:
        """The place of a leaf with such a path; `NOWHERE` if it is like no other."""
        found = (self._places.get(part, NOWHERE) for part in _parts(path))
        return next((place for place in found if place >= 0), NOWHERE)

    def sharding(self, path: Path, leaf: Any) -> Sharding:
        """The sharding of a leaf: of one whose path its own ends with, of its shape."""
        ends = ((path[start:], np.shape(leaf)) for start in range(len(path)))
        found = (self._shardings[end] for end in ends if end in self._shardings)
        return next(found, WHOLE)

    def located(self, of: int, tree: Any) -> list[Leaf]:
        """The leaves of an argument, where they belong; at first what is like none."""
        return [
            Leaf(of, path, leaf, max(self.place(path), 0), self.sharding(path, leaf))
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        ]

    def of(self, *trees: Any) -> tuple[list[Place], list[Sharding]]:
        """The places and the shardings of the leaves of some trees."""
        flat = [x for tree in trees for x in jax.tree_util.tree_leaves_with_path(tree)]
        return [self.place(x[0]) for x in flat], [self.sharding(*x) for x in flat]


def _parts(path: Path) -> Iterator[Path]:
    """The parts of a path: its ends, the longest first, then what is further in."""
    yield from (path[start:] for start in range(len(path)))
    for end in range(len(path) - 1, 1, -1):
        yield from (path[start:end] for start in range(end - 1))
