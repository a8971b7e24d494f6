"""One function of leaves that live on several devices, evaluated where they live.

An optimizer is written for all parameters at once. Here its jaxpr is cut along the
placement of its operands: every equation runs where most of its operands' bytes are,
neighbouring equations of one place become one compiled program, and only what crosses
a cut is moved. Leaf-by-leaf rules fall apart in one program per place with nothing
to exchange; a global norm moves one scalar per place.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import SingleDeviceSharding

from .._jaxprs import _jaxpr
from .._run import _transfer
from .._run._transfer import Device

# The number of a place, or None for what every place may have: constants, counters,
# and what follows from them alone. Such equations are computed wherever needed.
Home = int | None


@dataclass
class _Segment:
    """Equations that run in one place without waiting for another in between."""

    home: int
    eqns: list[tuple[int, core.JaxprEqn]] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class _Call:
    """A compiled segment: which slots it reads and which it fills."""

    home: int
    program: Callable[..., Any]
    reads: tuple[int, ...]
    fills: tuple[int, ...]


class Placed:
    """A function evaluated over several places.

    Args:
      function: of any pytrees.
      specs: its arguments as `jax.ShapeDtypeStruct` pytrees.
      in_homes: the place of each flat argument leaf.
      out_homes: the place of each flat result leaf; ``None`` is the first place.
      devices: the device of each place.
      donate: whether each flat argument leaf may be overwritten.
      name: how profiles call the programs.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        specs: Sequence[Any],
        *,
        in_homes: Sequence[Home],
        out_homes: Callable[[Any], Sequence[Home]],
        devices: Sequence[Device],
        donate: Sequence[bool],
        name: str,
    ) -> None:
        closed, self.result = _jaxpr.trace(
            _distinct(function), *specs, open_branches=True
        )
        closed = _jaxpr.prune(closed, closed.jaxpr.outvars)
        homes = [home or 0 for home in out_homes(self.result)]
        self._devices = devices
        self._slot: dict[Any, int] = {}
        self._home: dict[Any, Home] = dict(
            zip(closed.jaxpr.invars, in_homes, strict=True)
        )
        self._stored = [home or 0 for home in in_homes]
        segments = _segments(closed, self._home, homes)
        for var in closed.jaxpr.invars:
            self._new_slot(var)
        self._calls = self._compile(closed, segments, donate, name)
        self._outputs = [
            (self._slot[key], home)
            for key, home in zip(
                map(_key, closed.jaxpr.outvars, homes), homes, strict=True
            )
        ]
        self._slot_home = {
            **dict(enumerate(self._stored)),
            **{slot: call.home for call in self._calls for slot in call.fills},
        }
        self._away = [
            (i, (slot, home))
            for i, (slot, home) in enumerate(self._outputs)
            if devices[self._slot_home[slot]] != devices[home]
        ]

    def __call__(self, leaves: Sequence[jax.Array]) -> list[jax.Array]:
        """Evaluates the function on flat leaves, each in its place. Never waits."""
        values: dict[int, jax.Array] = dict(enumerate(leaves))
        for call in self._calls:
            results = call.program(*self._at(call.home, call.reads, values))
            values.update(zip(call.fills, results, strict=True))
        results = [values[slot] for slot, _ in self._outputs]
        for i, (slot, home) in self._away:
            results[i] = _transfer.put([values[slot]], self._devices[home])[0]
        return results

    def _at(
        self, home: int, slots: Sequence[int], values: dict[int, jax.Array]
    ) -> list[jax.Array]:
        device = self._devices[home]
        away = [s for s in slots if self._devices[self._slot_home[s]] != device]
        if not away:
            return [values[s] for s in slots]
        moved = dict(
            zip(away, _transfer.put([values[s] for s in away], device), strict=True)
        )
        return [moved.get(s, values[s]) for s in slots]

    def _new_slot(self, key: Any) -> int:
        return self._slot.setdefault(key, len(self._slot))

    def _compile(
        self,
        closed: core.ClosedJaxpr,
        segments: Sequence[_Segment],
        donate: Sequence[bool],
        name: str,
    ) -> list[_Call]:
        parts = [_as_jaxpr(closed, segment, self._home) for segment in segments]
        outputs = {v for v in closed.jaxpr.outvars if not isinstance(v, core.Literal)}
        may_donate = {
            var
            for var, yes in zip(closed.jaxpr.invars, donate, strict=True)
            if yes and var not in outputs
        }
        calls = []
        for i, (segment, part) in enumerate(zip(segments, parts, strict=True)):
            later = {var for other in parts[i + 1 :] for var in other.jaxpr.invars}
            free = [
                var in may_donate
                and var not in later
                and self._home[var] == segment.home
                for var in part.jaxpr.invars
            ]
            run = core.jaxpr_as_fun(part)
            program = _named(run, f"{name}_{segment.home}")
            calls.append(
                _Call(
                    segment.home,
                    jax.jit(
                        program,
                        donate_argnums=_matching(part, free),
                        # What has no arguments would land on the default device.
                        out_shardings=None
                        if part.jaxpr.invars
                        else SingleDeviceSharding(self._devices[segment.home]),
                    ),
                    tuple(self._slot[var] for var in part.jaxpr.invars),
                    tuple(
                        self._new_slot(_key(atom, segment.home))
                        for atom in segment.results
                    ),
                )
            )
        return calls


def _distinct(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with an array of its own for every result.

    A result that is also an argument or another result would be one array in two
    places of a state, which the next update could overwrite only once.
    """

    def run(*args: Any) -> Any:
        taken = {id(leaf) for leaf in jax.tree.leaves(args)}

        def own(leaf: Any) -> Any:
            if id(leaf) in taken:
                return jnp.array(leaf, copy=True)
            taken.add(id(leaf))
            return leaf

        return jax.tree.map(own, function(*args))

    return run


def _key(atom: Any, home: Home) -> Any:
    # A constant result has no variable; equal ones are not one array.
    return (home, id(atom)) if isinstance(atom, core.Literal) else atom


def _named(run: Callable[..., Any], name: str) -> Callable[..., Any]:
    def program(*leaves: Any) -> Any:
        return run(*leaves)

    program.__name__ = name
    return program


def _segments(
    closed: core.ClosedJaxpr, home: dict[Any, Home], out_homes: Sequence[int]
) -> list[_Segment]:
    """Gives every equation a place; extends ``home`` to all variables."""
    segments: dict[tuple[int, int], _Segment] = {}
    depth: dict[Any, int] = dict.fromkeys(closed.jaxpr.invars, 0)
    producer: dict[Any, _Segment] = {}
    home.update(dict.fromkeys(closed.jaxpr.constvars))
    for number, eqn in enumerate(closed.jaxpr.eqns):
        operands = [v for v in eqn.invars if not isinstance(v, core.Literal)]
        placed = [v for v in operands if home[v] is not None]
        place = _heaviest(placed, home)
        home.update(dict.fromkeys(eqn.outvars, place))
        if place is None:
            continue
        wave = max(depth[v] + (home[v] != place) for v in placed)
        depth.update(dict.fromkeys(eqn.outvars, wave))
        segment = segments.setdefault((wave, place), _Segment(place))
        segment.eqns.append((number, eqn))
        producer.update(dict.fromkeys(eqn.outvars, segment))

    ordered = [segments[key] for key in sorted(segments)]
    for atom, place in zip(closed.jaxpr.outvars, out_homes, strict=True):
        if isinstance(atom, core.Literal) or home[atom] is None:
            if not isinstance(atom, core.Literal) and atom in depth:
                continue  # an argument that is returned as it came
            # A shared result: computed where it is wanted, with whatever runs there.
            first = next((s for s in ordered if s.home == place), None)
            if first is None:
                first = _Segment(place)
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


def _heaviest(placed: Sequence[Any], home: dict[Any, Home]) -> Home:
    """The place that holds most bytes.

    Of equals the last, so that a sum of scalars passes from place to place instead of
    gathering all its terms in one.
    """
    weight: dict[int, int] = {}
    for var in placed:
        place = home[var]
        assert place is not None
        weight[place] = weight.get(place, 0) + var.aval.size * var.aval.dtype.itemsize
    return max(weight, key=lambda place: (weight[place], place), default=None)


def _as_jaxpr(
    closed: core.ClosedJaxpr, segment: _Segment, home: dict[Any, Home]
) -> core.ClosedJaxpr:
    """The segment with the shared equations that it needs, as a jaxpr of its own."""
    own = {number for number, _ in segment.eqns}
    needed = {v for v in segment.results if not isinstance(v, core.Literal)}
    eqns = []
    for number, eqn in reversed(list(enumerate(closed.jaxpr.eqns))):
        shared = all(home[v] is None for v in eqn.outvars)
        if number in own or (shared and not needed.isdisjoint(eqn.outvars)):
            eqns.append(eqn)
            needed.update(v for v in eqn.invars if not isinstance(v, core.Literal))
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


def _matching(part: core.ClosedJaxpr, free: Sequence[bool]) -> tuple[int, ...]:
    """Those arguments that may be overwritten and for which a result fits."""
    results = [(atom.aval.shape, atom.aval.dtype) for atom in part.jaxpr.outvars]
    donated = []
    for i, (var, yes) in enumerate(zip(part.jaxpr.invars, free, strict=True)):
        kind = (var.aval.shape, var.aval.dtype)
        if yes and kind in results:
            results.remove(kind)
            donated.append(i)
    return tuple(donated)
