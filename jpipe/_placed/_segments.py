"""A jaxpr cut by the places of its operands.

Every equation runs where the fewest bytes cross: those of its operands, and of its
results where these have a destination. Neighbouring equations of one place become one
segment, which is compiled as one program.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend import core

from .._instructions._bytes import nbytes
from .._instructions._graph import NOWHERE, Place
from .._jaxprs import _jaxpr


class PlacedJaxpr:
    """A jaxpr with a place for each equation and each variable.

    What follows from nothing placed is in `NOWHERE`.

    Args:
      closed: the jaxpr.
      places: those of its arguments; less than 0: none.
      result_places: those where its results are wanted, likewise; ``None``: they stay
        where they are computed.

    Attributes:
      closed: the jaxpr.
      chosen: where each equation runs.
    """

    def __init__(
        self,
        closed: core.ClosedJaxpr,
        places: Sequence[Place],
        result_places: Sequence[Place] | None = None,
    ) -> None:
        self.closed = closed
        self._destinations = _destinations(closed.jaxpr, result_places or ())
        self._places = dict.fromkeys(closed.jaxpr.constvars, NOWHERE)
        pairs = zip(closed.jaxpr.invars, places, strict=True)
        self._places |= {var: max(place, NOWHERE) for var, place in pairs}
        self.chosen = [self._choose(eqn) for eqn in closed.jaxpr.eqns]

    def __getitem__(self, atom: Any) -> Place:
        """The place of a variable or a constant."""
        return NOWHERE if isinstance(atom, core.Literal) else self._places[atom]

    def _choose(self, eqn: core.JaxprEqn) -> Place:
        """Where an equation runs; its results are there.

        Of places that are as good it is the destination of the results, or else the
        last, so that a sum of scalars which all places read passes from place to place
        instead of gathering all its terms in one.
        """
        weight: dict[Place, int] = {}
        for atom in eqn.invars:
            if (place := self[atom]) >= 0:
                weight[place] = weight.get(place, 0) + nbytes(atom.aval)
        ends = set[Place]()
        if weight:
            for var in eqn.outvars:
                if (place := self._destinations.get(var, NOWHERE)) >= 0:
                    weight[place] = weight.get(place, 0) + nbytes(var.aval)
                    ends.add(place)
        chosen = max(weight, key=lambda p: (weight[p], p in ends, p), default=NOWHERE)
        if chosen < 0 and eqn.effects:
            chosen = 0  # what nobody needs would be left out
        self._places |= dict.fromkeys(eqn.outvars, chosen)
        carry = eqn.invars[_jaxpr.carry(eqn)]
        for var, start in zip(eqn.outvars, carry, strict=False):
            # What a loop carries belongs where it was before, for all who read it.
            if self[start] >= 0:
                self._places[var] = self[start]
        return chosen


def _destinations(jaxpr: core.Jaxpr, places: Sequence[Place]) -> dict[Any, Place]:
    """Variables all of whose results are wanted in one place -> that place."""
    found: dict[Any, Place] = {}

    def add(atom: Any, place: Place) -> None:
        if not isinstance(atom, core.Literal):
            found[atom] = place if found.get(atom, place) == place else NOWHERE

    for atom, place in zip(jaxpr.outvars, places, strict=False):
        add(atom, place)
    for eqn in reversed(jaxpr.eqns):
        ends = {found[var] for var in eqn.outvars if var in found}
        place = ends.pop() if len(ends) == 1 else NOWHERE
        for atom in eqn.invars:
            add(atom, place)
    return found


def open_branches(
    closed: core.ClosedJaxpr,
    places: Sequence[Place],
    result_places: Sequence[Place] | None = None,
) -> PlacedJaxpr:
    """The same computation without a `jax.lax.cond` over operands of several places.

    Where each result needs operands of one place alone, each place gets a cond of its
    own. Otherwise all branches are computed, leaf by leaf, and their results selected:
    each leaf may then stay where it is. One with a `jax.lax.while_loop` in a branch,
    which may end only where it is needed, or with a callback, is left: it runs in
    one place.
    """
    while True:
        closed = _jaxpr.prune(closed, closed.jaxpr.outvars)
        placed = PlacedJaxpr(closed, places, result_places)
        found: dict[int, _jaxpr.Groups] = {}
        for eqn in closed.jaxpr.eqns:
            if _spans_places(eqn, placed):
                groups = _by_place(eqn, placed)
                if groups or not _contains(eqn, "while"):
                    found[id(eqn)] = groups
        if not found:
            return placed
        closed = _jaxpr.open_branches(closed, found)


def _spans_places(eqn: core.JaxprEqn, placed: PlacedJaxpr) -> bool:
    if eqn.primitive.name != "cond" or eqn.effects:
        return False
    # A number may come from elsewhere.
    over = {placed[atom] for atom in eqn.invars[1:] if _size(atom) > 1} - {NOWHERE}
    return len(over) > 1 and not _contains(eqn, "pure_callback")


def _size(atom: Any) -> int:
    return atom.aval.size


def _contains(eqn: core.JaxprEqn, name: str) -> bool:
    return any(_jaxpr.contains(branch, name) for branch in eqn.params["branches"])


def _by_place(eqn: core.JaxprEqn, placed: PlacedJaxpr) -> _jaxpr.Groups:
    """The results of a `jax.lax.cond` by place; nothing if they need other places."""
    _, *operands = eqn.invars
    places = [placed[atom] for atom in operands]
    wanted = [NOWHERE] * len(eqn.outvars)
    for branch in eqn.params["branches"]:
        inner = PlacedJaxpr(branch, places)
        for i, atom in enumerate(branch.jaxpr.outvars):
            if len({wanted[i], inner[atom]} - {NOWHERE}) > 1:
                return ()
            wanted[i] = max(wanted[i], inner[atom])
    groups: dict[Place, list[int]] = {}
    for i, place in enumerate(wanted):
        groups.setdefault(place, []).append(i)
    for place, group in groups.items():
        _, needed = _jaxpr.branches_of(eqn, group)
        for i in needed:
            if places[i] not in (place, NOWHERE) and _size(operands[i]) > 1:
                return ()
    return tuple(groups.values()) if len(groups) > 1 else ()


def check_order(placed: PlacedJaxpr) -> None:
    """Checks that effects whose order counts are in one place: places run side by side.

    Raises:
      ValueError: if they are in several.
    """
    ordered = {
        (eqn.primitive.name, place)
        for eqn, place in zip(placed.closed.jaxpr.eqns, placed.chosen, strict=True)
        if any(type(effect).__name__.startswith("Ordered") for effect in eqn.effects)
    }
    if len({place for _, place in ordered}) > 1:
        names = ", ".join(sorted({name for name, _ in ordered}))
        raise ValueError(
            f"effects with ordered=True ({names}) on values of several devices, which "
            f"run side by side; write ordered=False, or call them on the results"
        )


def parts(
    placed: PlacedJaxpr, wanted: Sequence[Place]
) -> Iterator[tuple[Place, core.ClosedJaxpr]]:
    """Cuts a jaxpr in segments: equations of one place that wait for no other between.

    Args:
      placed: the jaxpr.
      wanted: where those of its results are wanted that follow from nothing placed.

    Yields:
      The segments, in an order in which they can run: the place of each, and a jaxpr of
      what others read of it, with all equations that are in no place.
    """
    closed, jaxpr = placed.closed, placed.closed.jaxpr
    numbers: dict[tuple[int, Place], list[int]] = {}
    wave_of: dict[Any, int] = dict.fromkeys(jaxpr.invars, 0)
    maker: dict[Any, tuple[int, Place]] = {}
    for number, (eqn, place) in enumerate(zip(jaxpr.eqns, placed.chosen, strict=True)):
        if place < 0:
            continue
        reads = [atom for atom in eqn.invars if placed[atom] >= 0]
        waves = (wave_of[var] + (placed[var] != place) for var in reads)
        wave = max(waves, default=0)
        # A result that belongs elsewhere is a wave further on: its readers wait.
        wave_of |= {var: wave + (placed[var] != place) for var in eqn.outvars}
        numbers.setdefault((wave, place), []).append(number)
        maker |= dict.fromkeys(eqn.outvars, (wave, place))

    segments = {key: [jaxpr.eqns[i] for i in numbers[key]] for key in sorted(numbers)}
    leaving = _jaxpr.variables(jaxpr.outvars)
    for key, eqns in segments.items():
        read = _jaxpr.variables(atom for eqn in eqns for atom in eqn.invars)
        leaving |= {var for var in read if maker.get(var, key) != key}
    results: dict[tuple[int, Place], list[Any]] = {
        key: [var for eqn in eqns for var in eqn.outvars if var in leaving]
        for key, eqns in segments.items()
    }
    for atom, place in zip(jaxpr.outvars, wanted, strict=True):
        is_constant = isinstance(atom, core.Literal)
        if placed[atom] < 0 and (is_constant or atom not in wave_of):
            # Computed where it is wanted, with whatever runs there.
            last = len(jaxpr.eqns), place
            first = next((key for key in results if key[1] == place), last)
            results.setdefault(first, []).append(atom)

    shared = [number for number, place in enumerate(placed.chosen) if place < 0]
    made = [var for eqn in jaxpr.eqns for var in eqn.outvars]
    for key, outvars in results.items():
        every = sorted([*shared, *numbers.get(key, ())])
        eqns = [jaxpr.eqns[number] for number in every]
        read = _jaxpr.variables([*outvars, *(x for eqn in eqns for x in eqn.invars)])
        read -= {var for eqn in eqns for var in eqn.outvars}
        invars = [var for var in [*jaxpr.invars, *made] if var in read]
        part = jaxpr.replace(invars=invars, outvars=outvars, eqns=eqns)
        yield key[1], core.ClosedJaxpr(part, closed.consts)
