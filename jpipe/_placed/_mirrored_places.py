"""The places of leaves that mirror others, such as momenta, by their paths."""

from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .._arguments._stacked import PieceKey
from .._instructions._graph import NOWHERE, Graph, Place, Value
from .._instructions._sharding import WHOLE, Sharding
from .._jaxprs._axis_maps import with_size
from .._jaxprs._host_memory import is_on_host
from .._jaxprs._pieces import Pieces

Path = tuple[Any, ...]
# The path and the shape of a leaf.
LeafKey = tuple[Path, tuple[int, ...]]


class ArgumentLeaf(NamedTuple):
    """A leaf of the arguments of a function.

    Attributes:
      argument_key: the position of its argument, or its name.
      path: the path of the leaf in its argument.
      value: the leaf, or its spec.
      place: the place of the leaf; less than 0: in none.
      sharding: the sharding of the leaf there.
    """

    argument_key: int | str
    path: Path
    value: Any
    place: Place = NOWHERE
    sharding: Sharding = WHOLE

    @property
    def name(self) -> str:
        """The leaf in messages."""
        return f"argument {self.argument_key!r}{jax.tree_util.keystr(self.path)}"

    def add_to(self, graph: Graph, *, donated: bool = False) -> Value:
        """Adds the leaf, whose value is its spec, to the arguments of a graph."""
        return graph.argument(
            self.value,
            self.place,
            name=self.name,
            donated=donated,
            sharding=self.sharding,
        )


def leaves_at(
    argument_key: int, tree: Any, locations: Sequence[tuple[Place, Sharding]]
) -> list[ArgumentLeaf]:
    """The leaves of an argument, each with its place and sharding.

    Args:
      argument_key: the position of the argument.
      tree: the argument.
      locations: the place of each leaf, and its sharding there.
    """
    leaves: list[ArgumentLeaf] = []
    pairs = zip(jax.tree_util.tree_leaves_with_path(tree), locations, strict=True)
    for (path, value), (place, sharding) in pairs:
        leaves.append(
            ArgumentLeaf(argument_key, path, value, place=place, sharding=sharding)
        )
    return leaves


class MirroredPlaces:
    """The places and shardings of leaves that mirror some others.

    A leaf that mirrors a parameter, as a momentum does, has the parameter's path at the
    end of its own; if there is more than one for a parameter, as SM3 has one per axis,
    the parameter's path is further in.

        params           ['layer', 'kernel']
        momentum  [0].mu ['layer', 'kernel']
        SM3       [0].mu ['layer', 'kernel'] [1]

    Further in, only a path of two keys or more matches: one key may stand there by
    accident, as where `optax.multi_transform` has a label that is the name of a
    parameter, ``.inner_states ['bias'] .inner_state [0].count``.

    Args:
      leaves: the leaves that are mirrored; those that are in no place are ignored.
    """

    def __init__(self, leaves: Sequence[ArgumentLeaf]) -> None:
        placed = [leaf for leaf in leaves if leaf.place >= 0]
        # path, or its end -> place
        self._places: dict[Path, Place] = {}
        # The end of a path will do, if leaves of one place alone have it. An end of one
        # key, such as the name of a bias, is ambiguous.
        for leaf in placed:
            for start in range(1, len(leaf.path) - 1):
                end = leaf.path[start:]
                if self._places.setdefault(end, leaf.place) != leaf.place:
                    self._places[end] = NOWHERE
        self._places |= {leaf.path: leaf.place for leaf in placed}
        # (path, shape) -> sharding
        self._shardings: dict[LeafKey, Sharding] = {}
        for leaf in placed:
            if leaf.sharding != WHOLE:
                self._shardings[leaf.path, np.shape(leaf.value)] = leaf.sharding

    def place_of(self, path: Path) -> Place:
        """The place of a leaf with such a path; `NOWHERE` if it mirrors no other."""
        for part in _parts(path):
            place = self._places.get(part, NOWHERE)
            if place >= 0:
                return place
        return NOWHERE

    def sharding_of(self, path: Path, leaf: Any) -> Sharding:
        """The sharding of the mirrored leaf of this shape whose path ends this one.

        It is in the memory where the leaf is.
        """
        key = _find_mirrored(self._shardings, path, leaf)
        mirrored_sharding = WHOLE if key is None else self._shardings[key]
        return mirrored_sharding._replace(on_host=is_on_host(leaf))

    def leaves_of(self, argument_key: int, tree: Any) -> list[ArgumentLeaf]:
        """The leaves of an argument with the places and shardings that they mirror.

        A leaf that mirrors no other is in the first place.
        """
        leaves: list[ArgumentLeaf] = []
        for path, value in jax.tree_util.tree_leaves_with_path(tree):
            place = max(self.place_of(path), 0)
            sharding = self.sharding_of(path, value)
            leaves.append(
                ArgumentLeaf(argument_key, path, value, place=place, sharding=sharding)
            )
        return leaves

    def of(self, *trees: Any) -> tuple[list[Place], list[Sharding]]:
        """The places and the shardings of the leaves of some trees."""
        places: list[Place] = []
        shardings: list[Sharding] = []
        for tree in trees:
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
                places.append(self.place_of(path))
                shardings.append(self.sharding_of(path, leaf))
        return places, shardings


def mirrored_pieces(
    leaves: Sequence[ArgumentLeaf],
) -> Callable[[Any], dict[int, Pieces | None]]:
    """Makes ``specs of whole leaves -> {index of a leaf: its pieces, or None}``.

    A leaf that has the path of an argument leaf in pieces at the end of its own, and
    its shape, is in the same pieces; so a momentum is, also before it is computed from
    gradients. One that mirrors a whole leaf is whole.

    Args:
      leaves: the leaves of the arguments, with one for each piece.
    """
    # path of a leaf in pieces -> its pieces, in order
    specs_of_pieces: dict[tuple[int | str, Path], list[Any]] = {}
    # (path, shape) -> pieces; ``None`` for a whole leaf
    pieces_of: dict[LeafKey, Pieces | None] = {}
    axes: dict[tuple[int | str, Path], int] = {}
    for leaf in leaves:
        key = leaf.path[-1] if leaf.path else None
        if isinstance(key, PieceKey):
            node = leaf.argument_key, leaf.path[:-1]
            specs_of_pieces.setdefault(node, []).append(leaf.value)
            axes[node] = key.axis
    for (argument_key, path), specs in specs_of_pieces.items():
        axis = axes[argument_key, path]
        pieces = Pieces(axis, tuple(spec.shape[axis] for spec in specs))
        shape = with_size(specs[0].shape, axis, pieces.length)
        pieces_of.setdefault((path, shape), pieces)
    has_pieces = bool(pieces_of)
    for leaf in leaves:
        if not (leaf.path and isinstance(leaf.path[-1], PieceKey)):
            pieces_of.setdefault((leaf.path, np.shape(leaf.value)), None)

    def of(tree: Any) -> dict[int, Pieces | None]:
        result_pieces: dict[int, Pieces | None] = {}
        if not has_pieces:
            return result_pieces
        for i, (path, spec) in enumerate(jax.tree_util.tree_leaves_with_path(tree)):
            key = _find_mirrored(pieces_of, path, spec)
            if key is not None:
                result_pieces[i] = pieces_of[key]
        return result_pieces

    return of


def _find_mirrored(keys: Container[LeafKey], path: Path, leaf: Any) -> LeafKey | None:
    """Finds the leaf of this shape whose path ends this one; the longest if several."""
    for start in range(len(path)):
        key = path[start:], np.shape(leaf)
        if key in keys:
            return key
    return None


def _parts(path: Path) -> Iterator[Path]:
    """The parts of a path: its ends, the longest first, then parts further in."""
    for start in range(len(path)):
        yield path[start:]
    for end in range(len(path) - 1, 1, -1):
        for start in range(end - 1):
            yield path[start:end]
