"""One function of leaves on several devices, evaluated where they are.

An optimizer is written for all parameters at once, and so are many functions of a
training loop. The jaxpr of such a function is cut by the places of its operands: see
`_segments`. Each segment becomes one call, and only values that cross a cut are moved.
A result that is an argument is no call at all, or, with ``copy``, a new array. Updates
of leaves by themselves become one program per place, which exchange nothing; a global
norm moves one scalar per place.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from .._arguments import _stacked
from .._instructions._graph import Graph, Place, Value
from .._instructions._sharding import WHOLE, Sharding
from .._jaxprs import _inlining
from .._jaxprs._computation import Computation
from .._jaxprs._pieces import Pieces
from .._jaxprs._piecewise import run_in_pieces
from . import _segments
from ._mirrored_places import ArgumentLeaf, MirroredPlaces, mirrored_pieces

PyTree = Any


@dataclass(frozen=True)
class LeafPlacement:
    """The places of the leaves of a function's arguments and result.

    Constants, counters and values that follow from them alone are in no place: they are
    computed wherever they are needed.

    Attributes:
      arguments: the place of each leaf of its arguments; less than 0: none.
      results: ``specs of the result -> (places, shardings)`` of its leaves; a place
        less than 0 is the first.
      result_pieces: ``specs of the result -> {index of a leaf: its pieces}``, for the
        function of whole leaves; ``None`` for one that is whole. Others come in the
        pieces in which they are computed.
      stay: True if results stay where they are computed; ``results`` is then for those
        that are in no place.
    """

    arguments: Sequence[Place]
    results: Callable[[PyTree], tuple[Sequence[Place], Sequence[Sharding]]]
    stay: bool = False
    result_pieces: Callable[[PyTree], dict[int, Pieces | None]] = lambda specs: {}


def place_results(
    leaves: Sequence[ArgumentLeaf], *, stay: bool = True
) -> LeafPlacement:
    """Results stay where they are computed, or go where arguments of their paths are.

    A result in no place goes there in any case.

    Args:
      leaves: the leaves of the arguments.
      stay: True if results in a place stay there.
    """
    return LeafPlacement(
        arguments=[leaf.place for leaf in leaves],
        results=MirroredPlaces(leaves).of,
        stay=stay,
        result_pieces=mirrored_pieces(leaves),
    )


def copy_shared(args: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """Copies results that are arguments, or earlier results.

    One array in two leaves of a state could be overwritten only once.
    """
    taken = set(map(id, args))
    arrays = []
    for array in results:
        if isinstance(array, jax.Array) and id(array) in taken:
            array = jnp.array(array, copy=True)
        taken.add(id(array))
        arrays.append(array)
    return arrays


class PlacedFunction:
    """A function that is evaluated over several places.

    Args:
      function: a function of any pytrees, of whole leaves.
      specs: its arguments as `jax.ShapeDtypeStruct` pytrees, some of whose leaves may
        be nodes of pieces.
      placement: the places of their leaves and of those of the result.
      name: the name of its programs in profiles.
      copy: True to copy a result that is an argument, or another result.

    Attributes:
      result: the specs of its result, with nodes for leaves in pieces.
      places: the place of each leaf of the result; less than 0: the first.
      shardings: the sharding of each leaf of the result there.
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
        ending = copy_shared if copy else None
        whole_specs = [_stacked.join_specs(tree) for tree in specs]
        closed, result = _inlining.trace(function, *whole_specs, ending=ending)
        if pieces := _stacked.pieces_of_leaves(specs):
            piecewise = run_in_pieces(
                closed, pieces, placement.result_pieces(result), keeps_pieces=True
            )
            closed = piecewise.closed
            result = _stacked.split_pieces(result, piecewise.output_pieces)
        self.result = result
        self.places, self.shardings = placement.results(self.result)
        self._placed = _segments.open_branches(
            closed,
            placement.arguments,
            None if placement.stay else self.places,
        )
        _segments.check_order(self._placed)
        self._result_places = [max(place, 0) for place in self.places]
        self._stay = placement.stay
        # The place, the jaxpr and the computation of each segment, in order.
        self._segments = [
            (place, part.jaxpr, Computation.from_jaxpr(name, part))
            for place, part in _segments.parts(self._placed, self._result_places)
        ]

    def into(self, graph: Graph, arguments: Sequence[Value]) -> list[Value]:
        """Writes the calls into a graph.

        Args:
          graph: the graph.
          arguments: the values of the leaves of the arguments.

        Returns:
          The values of the leaves of the result.
        """
        jaxpr = self._placed.closed.jaxpr
        results = list(zip(jaxpr.outvars, self._result_places, strict=True))
        # key of a result -> its sharding; others are whole
        shardings: dict[Any, Sharding] = {}
        for (atom, place), sharding in zip(results, self.shardings, strict=True):
            if sharding != WHOLE:
                shardings[_atom_key(atom, place)] = sharding

        # key of an atom -> its value
        values: dict[Any, Value] = dict(zip(jaxpr.invars, arguments, strict=True))
        for place, part, computation in self._segments:
            keys = [_atom_key(atom, place) for atom in part.outvars]
            writes = graph.call(
                computation,
                place,
                [values[var] for var in part.invars],
                shardings=[shardings.get(key, WHOLE) for key in keys],
            )
            values |= zip(keys, writes, strict=True)

        outputs = []
        for atom, result_place in results:
            place = result_place
            if self._stay and self._placed[atom] >= 0:
                place = self._placed[atom]
            outputs.append(graph.bring(values[_atom_key(atom, result_place)], place))
        return outputs


def _atom_key(atom: Any, place: Place) -> Any:
    """The key of a variable, or of a constant that is made in a place.

    A constant result has no variable, and equal constants are not one array.
    """
    return (place, id(atom)) if isinstance(atom, core.Literal) else atom
