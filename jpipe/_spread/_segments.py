"""A jaxpr cut along the placement of its operands.

Every equation runs where most of its operands' bytes are; neighbouring equations of
one place become one segment, which is compiled as one program.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend import core

from .._jaxprs import _jaxpr
from ._homes import Home, heaviest


@dataclass
class Segment:
    """Equations that run in one place without waiting for another in between."""

    home: int
    eqns: list[tuple[int, core.JaxprEqn]] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)


def open_branches(
    closed: core.ClosedJaxpr, in_homes: Sequence[Home]
) -> core.ClosedJaxpr:
    """The same computation without a `jax.lax.cond` over operands of several places.

    Where each result needs operands of one place alone, each place gets a cond of its
    own. Otherwise all branches are computed, leaf by leaf, and their results selected:
    each leaf may then stay where it is. One with a `jax.lax.while_loop` in a branch,
    which may end only where it is asked for, or with a callback, is left: it runs in
    one place.
    """
    while True:
        home = dict(zip(closed.jaxpr.invars, in_homes, strict=True))
        spread(closed, home)
        found: dict[int, _jaxpr.Groups] = {}
        for eqn in closed.jaxpr.eqns:
            if _spans_places(eqn, home):
                groups = _by_place(eqn, home)
                if groups or not _contains(eqn, "while"):
                    found[id(eqn)] = groups
        if not found:
            return closed
        closed = _jaxpr.open_branches(closed, found)


def _spans_places(eqn: core.JaxprEqn, home: dict[Any, Home]) -> bool:
    if eqn.primitive.name != "cond" or eqn.effects:
        return False
    # A number may come from elsewhere.
    over = {_home(atom, home) for atom in eqn.invars[1:] if _size(atom) > 1} - {None}
    return len(over) > 1 and not _contains(eqn, "pure_callback")


def _size(atom: Any) -> int:
    return atom.aval.size


def _contains(eqn: core.JaxprEqn, name: str) -> bool:
    return any(_jaxpr.contains(branch, name) for branch in eqn.params["branches"])


def _by_place(eqn: core.JaxprEqn, home: dict[Any, Home]) -> _jaxpr.Groups:
    """The results of a `jax.lax.cond` by place; nothing if they need other places."""
    _, *operands = eqn.invars
    homes = [_home(atom, home) for atom in operands]
    wanted: list[Home] = [None] * len(eqn.outvars)
    for branch in eqn.params["branches"]:
        inner = dict(zip(branch.jaxpr.invars, homes, strict=True))
        spread(branch, inner)
        for i, atom in enumerate(branch.jaxpr.outvars):
            own = _home(atom, inner)
            if own is not None and wanted[i] not in (None, own):
                return ()
            wanted[i] = own if wanted[i] is None else wanted[i]
    groups: dict[Home, list[int]] = {}
    for i, place in enumerate(wanted):
        groups.setdefault(place, []).append(i)
    for place, group in groups.items():
        _, needed = _jaxpr.branches_of(eqn, group)
        for i in needed:
            if homes[i] not in (place, None) and _size(operands[i]) > 1:
                return ()
    return tuple(groups.values()) if len(groups) > 1 else ()


def check_order(closed: core.ClosedJaxpr, home: dict[Any, Home]) -> None:
    """Checks that effects whose order counts are in one place: places run side by side.

    Raises:
      ValueError: if they are in several.
    """
    ordered = {
        (eqn.primitive.name, place)
        for eqn, place in zip(closed.jaxpr.eqns, spread(closed, home), strict=True)
        if any(type(effect).__name__.startswith("Ordered") for effect in eqn.effects)
    }
    if len({place for _, place in ordered}) > 1:
        names = ", ".join(sorted({name for name, _ in ordered}))
        raise ValueError(
            f"effects with ordered=True ({names}) on values of several devices, which "
            f"run side by side; write ordered=False, or call them on the results"
        )


def spread(closed: core.ClosedJaxpr, home: dict[Any, Home]) -> list[Home]:
    """Gives every equation a place; extends ``home`` to all variables."""
    home.update(dict.fromkeys(closed.jaxpr.constvars))
    chosen = []
    for eqn in closed.jaxpr.eqns:
        placed = [v for v in eqn.invars if _home(v, home) is not None]
        place = heaviest(
            [(home[v] or 0, v.aval.size * v.aval.dtype.itemsize) for v in placed]
        )
        if place is None and eqn.effects:
            place = 0  # what nobody needs would be left out
        chosen.append(place)
        home.update(dict.fromkeys(eqn.outvars, place))
        carry = eqn.invars[_jaxpr.carry(eqn)]
        for var, start in zip(eqn.outvars, carry, strict=False):
            # What a loop carries belongs where it was before, for all who read it.
            if _home(start, home) is not None:
                home[var] = _home(start, home)
    return chosen


def _home(atom: Any, home: dict[Any, Home]) -> Home:
    return None if isinstance(atom, core.Literal) else home[atom]


def segments(
    closed: core.ClosedJaxpr, home: dict[Any, Home], out_homes: Sequence[int]
) -> list[Segment]:
    """Cuts a jaxpr; extends ``home`` to all variables.

    Args:
      closed: the jaxpr.
      home: the place of each of its inputs.
      out_homes: for results that follow from nothing placed, where they are wanted.

    Returns:
      The segments, in an order in which they can run.
    """
    found: dict[tuple[int, int], Segment] = {}
    depth: dict[Any, int] = dict.fromkeys(closed.jaxpr.invars, 0)
    producer: dict[Any, Segment] = {}
    chosen = spread(closed, home)
    for number, (eqn, place) in enumerate(zip(closed.jaxpr.eqns, chosen, strict=True)):
        if place is None:
            continue
        wave = max(
            (
                depth[v] + (home[v] != place)
                for v in eqn.invars
                if _home(v, home) is not None
            ),
            default=0,
        )
        # A result that belongs elsewhere is a wave further on: its readers wait.
        depth.update({v: wave + (home[v] != place) for v in eqn.outvars})
        segment = found.setdefault((wave, place), Segment(place))
        segment.eqns.append((number, eqn))
        producer.update(dict.fromkeys(eqn.outvars, segment))

    ordered = [found[key] for key in sorted(found)]
    for atom, place in zip(closed.jaxpr.outvars, out_homes, strict=True):
        if _home(atom, home) is None:
            if not isinstance(atom, core.Literal) and atom in depth:
                continue  # an argument that is returned as it came
            # A shared result: computed where it is wanted, with whatever runs there.
            first = next((s for s in ordered if s.home == place), None)
            if first is None:
                first = Segment(place)
                ordered.append(first)
            _append(first.results, atom)
        elif atom in producer:
            _append(producer[atom].results, atom)
    for segment in ordered:
        for _, eqn in segment.eqns:
            for atom in eqn.invars:
                made = None if isinstance(atom, core.Literal) else producer.get(atom)
                if made is not None and made is not segment:
                    _append(made.results, atom)
    return ordered


def _append(results: list[Any], atom: Any) -> None:
    if all(atom is not other for other in results):
        results.append(atom)


def as_jaxpr(
    closed: core.ClosedJaxpr, segment: Segment, home: dict[Any, Home]
) -> core.ClosedJaxpr:
    """The segment with the shared equations that it needs, as a jaxpr of its own."""
    own = {number for number, _ in segment.eqns}
    needed = {v for v in segment.results if not isinstance(v, core.Literal)}
    eqns = []
    for number, eqn in reversed(list(enumerate(closed.jaxpr.eqns))):
        shared = all(home[v] is None for v in eqn.outvars)
        if number in own or (shared and not needed.isdisjoint(eqn.outvars)):
            eqns.append(eqn)
            needed.update(_jaxpr.variables(eqn.invars))
    defined = {v for eqn in eqns for v in eqn.outvars}
    constants = set(closed.jaxpr.constvars)
    arguments = [
        v for v in _in_order(closed) if v in needed and v not in defined | constants
    ]
    part = closed.jaxpr.replace(
        invars=arguments, outvars=list(segment.results), eqns=eqns[::-1]
    )
    return core.ClosedJaxpr(part, closed.consts)


def _in_order(closed: core.ClosedJaxpr) -> list[Any]:
    results = [var for eqn in closed.jaxpr.eqns for var in eqn.outvars]
    return [*closed.jaxpr.invars, *results]
