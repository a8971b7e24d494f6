"""One function of leaves that live on several devices, evaluated where they live.

An optimizer is written for all parameters at once, and so is much of what a training
loop computes. Here the jaxpr of such a function is cut along the placement of its
operands: see `_segments`. Each segment becomes one compiled program, and only what
crosses a cut is moved. Leaf-by-leaf rules fall apart in one program per place with
nothing to exchange; a global norm moves one scalar per place.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import SingleDeviceSharding

from .._jaxprs import _jaxpr
from .._run import _transfer
from .._run._transfer import Device
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
    """Where the leaves of a function are, and where its results are wanted.

    Attributes:
      in_homes: the place of each flat argument leaf.
      stored: the device where it is; ``None`` for what is on the host or goes
        wherever it is read, as JAX takes it for uncommitted arrays.
      out_homes: the place of each flat result leaf, of the specs of the result;
        ``None`` is the first place.
      stay: whether a result that follows from something placed stays where that is.
    """

    in_homes: Sequence[Home]
    stored: Sequence[Device | None]
    out_homes: Callable[[Any], Sequence[Home]]
    stay: bool = False


_Arrival = tuple[tuple[int, ...], Callable[[Sequence[Any]], Sequence[Any]]]


@dataclass(frozen=True)
class _Call:
    """A compiled segment: which slots it reads, fills and reads last.

    Attributes:
      arrivals: the positions among ``reads`` of what comes from another device, and
        what brings it.
    """

    program: Callable[..., Any]
    reads: tuple[int, ...]
    arrivals: Sequence[_Arrival]
    fills: tuple[int, ...]
    frees: tuple[int, ...]


class Placed:
    """A function evaluated over several places.

    Args:
      function: of any pytrees.
      specs: its arguments as `jax.ShapeDtypeStruct` pytrees.
      placement: where its leaves are.
      devices: the device of each place.
      donate: whether each flat argument leaf may be overwritten.
      name: how profiles call the programs.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        specs: Sequence[Any],
        placement: Placement,
        *,
        devices: Sequence[Device],
        donate: Sequence[bool],
        name: str,
    ) -> None:
        closed, self.result = _jaxpr.trace(function, *specs, ending=own_results)
        self.tree = jax.tree.structure(self.result)
        closed = _segments.open_branches(closed, placement.in_homes)
        closed = _jaxpr.prune(closed, closed.jaxpr.outvars)
        wanted = [home or 0 for home in placement.out_homes(self.result)]
        self._devices = devices
        invars, outvars = closed.jaxpr.invars, closed.jaxpr.outvars
        self._home: dict[Any, Home] = dict(zip(invars, placement.in_homes, strict=True))
        _segments.check_order(closed, dict(self._home))
        segments = _segments.segments(closed, self._home, wanted)
        self._slot: dict[Any, int] = {var: i for i, var in enumerate(invars)}
        self._device: list[Device | None] = list(placement.stored)
        calls = self._compile(closed, segments, donate, name)
        self._outputs = [
            self._slot[_key(atom, home)]
            for atom, home in zip(outvars, wanted, strict=True)
        ]
        self._calls = _freeing(calls, len(invars), self._outputs)
        self._blank = [None] * (len(self._slot) - len(invars))
        self._leavings: list[_Arrival] = []
        for i, (atom, home) in enumerate(zip(outvars, wanted, strict=True)):
            placed = None if isinstance(atom, core.Literal) else self._home[atom]
            target = devices[home if placed is None or not placement.stay else placed]
            source = self._device[self._outputs[i]]
            if source != target:
                self._leavings.append(((i,), _transfer.bringer(source, target, [atom])))

    def __call__(self, leaves: Sequence[Any]) -> list[jax.Array]:
        """Evaluates the function on flat leaves, each in its place. Never waits."""
        values: list[Any] = [*leaves, *self._blank]
        for call in self._calls:
            given = [values[slot] for slot in call.reads]
            if call.arrivals:
                _bring(given, call.arrivals)
            results = call.program(*given)
            for slot, leaf in zip(call.fills, results, strict=True):
                values[slot] = leaf
            for slot in call.frees:
                values[slot] = None
        results = [values[slot] for slot in self._outputs]
        _bring(results, self._leavings)
        return results

    def _compile(
        self,
        closed: core.ClosedJaxpr,
        segments: Sequence[_segments.Segment],
        donate: Sequence[bool],
        name: str,
    ) -> list[_Call]:
        parts = [_segments.as_jaxpr(closed, each, self._home) for each in segments]
        outputs = _jaxpr.variables(closed.jaxpr.outvars)
        may_donate = {
            var
            for var, yes in zip(closed.jaxpr.invars, donate, strict=True)
            if yes and var not in outputs
        }
        read: set[Any] = set()
        donated = []
        for segment, part in zip(reversed(segments), reversed(parts), strict=True):
            free = [
                var in may_donate
                and var not in read
                and self._home[var] == segment.home
                for var in part.jaxpr.invars
            ]
            donated.append(_matching(part, free))
            read.update(part.jaxpr.invars)
        calls = []
        for segment, part, argnums in zip(segments, parts, donated[::-1], strict=True):
            device = self._devices[segment.home]
            reads = tuple(self._slot[var] for var in part.jaxpr.invars)
            at = [self._device[slot] for slot in reads]
            program = jax.jit(
                _named(core.jaxpr_as_fun(part), f"{name}_{segment.home}"),
                donate_argnums=argnums,
                # What has no arguments in a place would land on the default device.
                out_shardings=None if any(at) else SingleDeviceSharding(device),
            )
            fills = []
            for atom in segment.results:
                fills.append(len(self._device))
                self._slot[_key(atom, segment.home)] = fills[-1]
                self._device.append(device)
            arrivals = _arrivals(part.jaxpr.invars, at, device)
            calls.append(_Call(program, reads, arrivals, tuple(fills), ()))
        return calls


def _arrivals(
    variables: Sequence[Any], at: Sequence[Device | None], target: Device
) -> list[_Arrival]:
    """What comes from each other device; uncommitted arrays JAX takes as they are."""
    found = []
    for source in dict.fromkeys(at):
        if source not in (None, target):
            positions = tuple(i for i, device in enumerate(at) if device == source)
            leaves = [variables[i] for i in positions]
            found.append((positions, _transfer.bringer(source, target, leaves)))
    return found


def _bring(leaves: list[Any], arrivals: Sequence[_Arrival]) -> None:
    """Replaces leaves by copies where they are wanted. Never waits."""
    for positions, bring in arrivals:
        moved = bring([leaves[i] for i in positions])
        for i, leaf in zip(positions, moved, strict=True):
            leaves[i] = leaf


def _key(atom: Any, home: Home) -> Any:
    # A constant result has no variable; equal ones are not one array.
    return (home, id(atom)) if isinstance(atom, core.Literal) else atom


def _named(run: Callable[..., Any], name: str) -> Callable[..., Any]:
    def program(*leaves: Any) -> Any:
        return run(*leaves)

    program.__name__ = name
    return program


def _freeing(
    calls: Sequence[_Call], num_leaves: int, outputs: Sequence[int]
) -> list[_Call]:
    """The calls, each with what nobody reads after it; arguments are the caller's."""
    kept = {*range(num_leaves), *outputs}
    freed = []
    for call in reversed(calls):
        last = tuple({*call.reads, *call.fills} - kept)
        kept.update(last)
        freed.append(replace(call, frees=last))
    return freed[::-1]


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
