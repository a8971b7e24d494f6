"""One function of leaves on several devices, evaluated where they are.

An optimizer is written for all parameters at once, and so is much of what a training
loop computes. Here the jaxpr of such a function is cut by the places of its operands:
see `_segments`. Each segment becomes one call, and only what crosses a cut is moved.
A result that is an argument is no call at all, or, with ``copy``, an array of its own.
Leaf-by-leaf rules fall apart in one program per place with nothing to exchange; a
global norm moves one scalar per place.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from .._instructions._graph import Graph, Place, Value
from .._instructions._sharding import WHOLE, Sharding
from .._jaxprs import _jaxpr
from .._jaxprs._computation import Computation
from . import _segments
from ._mirrored_places import ArgumentLeaf, MirroredPlaces

PyTree = Any


@dataclass(frozen=True)
class LeafPlacement:
    """Where the leaves of a function belong.

    A constant, a counter, and what follows from such values alone is in no place: it is
    computed wherever it is needed.

    Attributes:
      arguments: the place of each leaf of its arguments; less than 0: none.
      results: of the specs of its result the place of each leaf, where less than 0
        is the first, and its sharding there.
      stay: whether a result that follows from something placed stays where that is.
    """

    arguments: Sequence[Place]
    results: Callable[[PyTree], tuple[Sequence[Place], Sequence[Sharding]]]
    stay: bool = False


def where_computed(leaves: Sequence[ArgumentLeaf], stay: bool = True) -> LeafPlacement:
    """Results stay where they are computed, or go where arguments of their paths are.

    What follows from nothing placed goes there in any case.
    """
    return LeafPlacement(
        [leaf.place for leaf in leaves], MirroredPlaces(leaves).of, stay
    )


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
      copy: whether a result that is an argument, or another result, is an array of its
        own.

    Attributes:
      result: the specs of its result.
      places: where each leaf of the result belongs.
      shardings: its sharding there; what is not a result is whole.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        specs: Sequence[Any],
        placement: LeafPlacement,
        name: str,
        *,
        copy: bool = True,
    ) -> None:
        ending = own_results if copy else None
        closed, self.result = _jaxpr.trace(function, *specs, ending=ending)
        self.places, self.shardings = placement.results(self.result)
        self._placed = placed = _segments.open_branches(
            closed,
            placement.arguments,
            None if placement.stay else self.places,
        )
        _segments.check_order(placed)
        self._wanted = [max(place, 0) for place in self.places]
        self._stay = placement.stay
        # The segments, in order, and the functions that they are.
        self._calls = [
            (place, part.jaxpr, Computation.of(name, part))
            for place, part in _segments.parts(placed, self._wanted)
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
        for place, part, function in self._calls:
            keys = [_key(atom, place) for atom in part.outvars]
            results = graph.call(
                function,
                place,
                [value[var] for var in part.invars],
                shardings=[shardings.get(key, WHOLE) for key in keys],
            )
            value |= zip(keys, results, strict=True)
        outputs = []
        for atom, wanted in ends:
            place = self._placed[atom] if self._stay else wanted
            own = value[_key(atom, wanted)]
            outputs.append(graph.at(own, place if place >= 0 else wanted))
        return outputs


def _key(atom: Any, place: Place) -> Any:
    # A constant result has no variable; equal ones are not one array.
    return (place, id(atom)) if isinstance(atom, core.Literal) else atom
