"""One function of leaves on several devices, evaluated where they are.

An optimizer is written for all parameters at once, and so is much of what a training
loop computes. Here the jaxpr of such a function is cut by the places of its operands:
see `_segments`. Each segment becomes one call, and only what crosses a cut is moved.
Leaf-by-leaf rules fall apart in one program per place with nothing to exchange; a
global norm moves one scalar per place.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from .._instructions._graph import Graph, Place, Value
from .._instructions._sharding import WHOLE, Sharding
from .._jaxprs import _jaxpr
from .._jaxprs._function import Function
from . import _segments
from ._by_path import ByPath, Path, Where

PyTree = Any


class Argument(NamedTuple):
    """A leaf of the arguments of a function.

    Attributes:
      of: the argument that it is a leaf of: its position, or its name.
      path: where it stands there.
      leaf: the leaf.
    """

    of: int | str
    path: Path
    leaf: Any

    @property
    def name(self) -> str:
        """What errors call it."""
        return f"argument {self.of!r}{jax.tree_util.keystr(self.path)}"


def arguments(
    args: Sequence[PyTree], kwargs: Mapping[str, PyTree] = MappingProxyType({})
) -> list[Argument]:
    """The leaves of arguments, in order."""
    flat = jax.tree_util.tree_leaves_with_path((tuple(args), dict(kwargs)))
    return [
        Argument(getattr(key, "idx", getattr(key, "key", "")), tuple(path), leaf)
        for (_, key, *path), leaf in flat
    ]


@dataclass(frozen=True)
class Placement:
    """Where the leaves of a function belong.

    Attributes:
      arguments: the place of each leaf of its arguments.
      results: of the specs of its result the place of each leaf, ``None`` being the
        first, and its sharding there.
      stay: whether a result that follows from something placed stays where that is.
    """

    arguments: Sequence[Where]
    results: Callable[[PyTree], tuple[Sequence[Where], Sequence[Sharding]]]
    stay: bool = False


# Of the leaves of the arguments, the place of each, and its sharding there.
Rule = Callable[[Sequence[Argument], Sequence[Where], Sequence[Sharding]], Placement]


def where_computed(
    leaves: Sequence[Argument], places: Sequence[Where], shardings: Sequence[Sharding]
) -> Placement:
    """Results stay where they are computed.

    What follows from nothing placed belongs where an argument of its path is.
    """
    like = ByPath([(path, leaf) for _, path, leaf in leaves], places, shardings)
    return Placement(places, like.of, stay=True)


def own_results(args: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """The results, each an array of its own: none twice, none of the arguments.

    One array in two places of a state could be overwritten only once.
    """
    taken = set(map(id, args))
    own = []
    for leaf in results:
        if isinstance(leaf, jax.Array) and id(leaf) in taken:
            leaf = jnp.array(leaf, copy=True)
        taken.add(id(leaf))
        own.append(leaf)
    return own


class PlacedFunction:
    """A function that is evaluated over several places.

    Args:
      function: of any pytrees.
      specs: its arguments as `jax.ShapeDtypeStruct` pytrees.
      placement: where their leaves belong, and those of the result.
      name: how profiles call its programs.

    Attributes:
      result: the specs of its result.
      places: where each leaf of the result belongs.
      shardings: its sharding there; what is not a result is whole.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        specs: Sequence[Any],
        placement: Placement,
        name: str,
    ) -> None:
        closed, self.result = _jaxpr.trace(function, *specs, ending=own_results)
        self.places, self.shardings = placement.results(self.result)
        self._placed = _segments.open_branches(closed, placement.arguments)
        _segments.check_order(self._placed)
        self._wanted = [place or 0 for place in self.places]
        self._stay, self._name = placement.stay, name

    @cached_property
    def _calls(self) -> list[tuple[_segments.Segment, Sequence[Any], Function]]:
        """The segments, in order, what each reads, and the function that it is."""
        ordered = _segments.segments(self._placed, self._wanted)
        parts = _segments.as_jaxprs(self._placed, ordered)
        return [
            (segment, part.jaxpr.invars, Function.of(self._name, part))
            for segment, part in zip(ordered, parts, strict=True)
        ]

    def into(self, graph: Graph, arguments: Sequence[Value]) -> list[Value]:
        """Writes the calls into a graph.

        Args:
          graph: the graph.
          arguments: the flat argument leaves.

        Returns:
          The flat result leaves.
        """
        jaxpr = self._placed.closed.jaxpr
        value = dict(zip(jaxpr.invars, arguments, strict=True))
        ends = list(zip(jaxpr.outvars, self._wanted, strict=True))
        pairs = zip(ends, self.shardings, strict=True)
        shardings = {_key(*end): each for end, each in pairs if each != WHOLE}
        for segment, invars, function in self._calls:
            keys = [_key(atom, segment.place) for atom in segment.results.values()]
            results = graph.call(
                function,
                segment.place,
                [value[var] for var in invars],
                self._name,
                how=[shardings.get(key, WHOLE) for key in keys],
            )
            value |= zip(keys, results, strict=True)
        outputs = []
        for atom, wanted in ends:
            place = self._placed[atom] if self._stay else wanted
            own = value[_key(atom, wanted)]
            outputs.append(graph.at(own, wanted if place is None else place))
        return outputs


def _key(atom: Any, place: Place) -> Any:
    # A constant result has no variable; equal ones are not one array.
    return (place, id(atom)) if isinstance(atom, core.Literal) else atom
