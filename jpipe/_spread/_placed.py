"""One function of leaves that live in several places, evaluated where they live.

An optimizer is written for all parameters at once, and so is much of what a training
loop computes. Here the jaxpr of such a function is cut along the placement of its
operands: see `_segments`. Each segment becomes one call, and only what crosses a cut is
moved. Leaf-by-leaf rules fall apart in one program per place with nothing to exchange;
a global norm moves one scalar per place.
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
from .._jaxprs._function import Function
from . import _segments
from ._homes import Home


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


@dataclass(frozen=True)
class Placement:
    """Where the leaves of a function belong, and where its results are wanted.

    Attributes:
      in_homes: the home of each flat argument leaf.
      out_homes: the home of each flat result leaf, of the specs of the result;
        ``None`` is the first.
      places: the place of each home; ``None``: its own number.
      stay: whether a result that follows from something placed stays where that is.
    """

    in_homes: Sequence[Home]
    out_homes: Callable[[Any], Sequence[Home]]
    places: Sequence[Place] | None = None
    stay: bool = False

    def place_of(self, home: int) -> Place:
        """The place of a home."""
        return home if self.places is None else self.places[home]


class Placed:
    """A function that is evaluated over several places.

    Args:
      function: of any pytrees.
      specs: its arguments as `jax.ShapeDtypeStruct` pytrees.
      placement: where its leaves belong.
      name: how profiles call its programs.

    Attributes:
      result: the specs of its result.
      tree: their structure.
      scalars: the positions of scalars among its leaves that belong nowhere, as what
        is logged.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        specs: Sequence[Any],
        placement: Placement,
        name: str,
    ) -> None:
        closed, self.result = _jaxpr.trace(function, *specs, ending=own_results)
        self.tree = jax.tree.structure(self.result)
        closed = _segments.open_branches(closed, placement.in_homes)
        closed = _jaxpr.prune(closed, closed.jaxpr.outvars)
        self._placement = placement
        homes_of = placement.out_homes(self.result)
        self._wanted = [home or 0 for home in homes_of]
        pairs = zip(jax.tree.leaves(self.result), homes_of, strict=True)
        self.scalars = [
            i for i, (leaf, home) in enumerate(pairs) if home is None and not leaf.shape
        ]
        self._invars, self._outvars = closed.jaxpr.invars, closed.jaxpr.outvars
        homes = zip(self._invars, placement.in_homes, strict=True)
        self._home: dict[Any, Home] = dict(homes)
        _segments.check_order(closed, dict(self._home))
        self._name = name
        self._calls = []
        for segment in _segments.segments(closed, self._home, self._wanted):
            part = _segments.as_jaxpr(closed, segment, self._home)
            function_ = Function.of(name, part)
            self._calls.append((segment, part.jaxpr.invars, function_))

    def into(
        self, graph: Graph, arguments: Sequence[Value], how: Sequence[Sharding]
    ) -> list[Value]:
        """Writes the calls into a graph.

        Args:
          graph: the graph.
          arguments: the flat argument leaves.
          how: how the flat result leaves lie on their places; what is not a result is
            whole.

        Returns:
          The flat result leaves.
        """
        place_of = self._placement.place_of
        value = dict(zip(self._invars, arguments, strict=True))
        ends = zip(self._outvars, self._wanted, how, strict=True)
        lies = {_key(atom, home): each for atom, home, each in ends if each != WHOLE}
        for segment, invars, function in self._calls:
            reads = [value[var] for var in invars]
            results = graph.call(
                function,
                place_of(segment.home),
                reads,
                self._name,
                how=[lies.get(_key(x, segment.home), WHOLE) for x in segment.results],
            )
            for atom, result in zip(segment.results, results, strict=True):
                value[_key(atom, segment.home)] = result
        outputs = []
        for atom, home in zip(self._outvars, self._wanted, strict=True):
            at = None if isinstance(atom, core.Literal) else self._home[atom]
            target = home if at is None or not self._placement.stay else at
            outputs.append(graph.at(value[_key(atom, home)], place_of(target)))
        return outputs


def _key(atom: Any, home: Home) -> Any:
    # A constant result has no variable; equal ones are not one array.
    return (home, id(atom)) if isinstance(atom, core.Literal) else atom
