"""Equations as late as they are read: what is computed early for a late stage."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax.extend import core

from .._jaxprs import _jaxpr
from .._jaxprs._cheapest import total_bytes
from ._program import Traced


def late(programs: Mapping[int, Traced], moves: bool = True) -> dict[int, Traced]:
    """The same programs, where equations stand right before what first reads them.

    As of a decoder's embedding that is computed before the encoder: less crosses the
    boundaries in between. An equation stays where it is if its operands would be held
    instead that are larger, if it has effects, or if what it makes is returned.

    Those of the same equations as the first have its order, and its kinds: what is few
    bytes of one example is many of two. What follows from parameters alone and has
    another shape in each of them is not made once in a step: a stage makes it.

    Args:
      programs: by the sizes of their micro-batches, the first first.
      moves: whether equations move; those of a list stay in their layers.
    """
    first, *_ = programs.values()
    find = _order if moves else _as_they_are
    order, form = find(first), _form(first)
    alike = {n: one for n, one in programs.items() if _form(one) == form}
    kinds = _kinds(list(alike.values()))
    return {
        n: _ordered(one, order, kinds)
        if n in alike
        else _ordered(one, find(one), one.kinds)
        for n, one in programs.items()
    }


def _kinds(alike: Sequence[Traced]) -> list[str]:
    """What each equation is, of programs that have the same."""
    found = list[str]()
    # What has another shape or follows from it; and what a stage makes because of that.
    varying, staged = set[core.Var](), set[core.Var]()
    columns = zip(*(one.closed.jaxpr.eqns for one in alike), strict=True)
    for kind, column in zip(alike[0].kinds, columns, strict=True):
        eqn, *others = column
        read = _jaxpr.variables(eqn.invars)
        shapes = [v.aval for v in eqn.outvars]
        differs = any([v.aval for v in other.outvars] != shapes for other in others)
        if differs or not varying.isdisjoint(read):
            varying.update(eqn.outvars)
            if kind == "once" or not staged.isdisjoint(read):
                kind = "stage"
                staged.update(eqn.outvars)
        found.append(kind)
    return found


def _form(program: Traced) -> list[Any]:
    """Of each equation its primitive, and by which ones its operands are made."""
    made = program.producer
    return [
        (
            eqn.primitive.name,
            [made.get(v) for v in eqn.invars if not isinstance(v, core.Literal)],
        )
        for eqn in program.closed.jaxpr.eqns
    ]


def _ordered(program: Traced, order: list[int], kinds: Sequence[str]) -> Traced:
    kinds = [kinds[i] for i in order]
    jaxpr, consts = program.closed.jaxpr, program.closed.consts
    jaxpr = jaxpr.replace(eqns=[jaxpr.eqns[i] for i in order])
    return replace(program, closed=core.ClosedJaxpr(jaxpr, consts), known_kinds=kinds)


def _as_they_are(program: Traced) -> list[int]:
    return [*range(len(program.closed.jaxpr.eqns))]


def _order(program: Traced) -> list[int]:
    """The numbers of the equations, as late as they are read."""
    jaxpr, kinds = program.closed.jaxpr, program.kinds
    returned = _jaxpr.variables(jaxpr.outvars)
    of_stages = {
        var
        for eqn, kind in zip(jaxpr.eqns, kinds, strict=True)
        for var in eqn.outvars
        if kind == "stage"
    }
    # Of each equation the place that it takes, and of each variable those of readers.
    place = list(range(len(jaxpr.eqns)))
    readers: dict[core.Var, list[int]] = {}
    for i in reversed(place):
        eqn, read = jaxpr.eqns[i], _jaxpr.variables(jaxpr.eqns[i].invars)
        after = [at for var in eqn.outvars for at in readers.get(var, ())]
        if after and not eqn.effects and returned.isdisjoint(eqn.outvars):
            first = min(after)
            instead = {v for v in read & of_stages if max(readers.get(v, [0])) < first}
            if total_bytes(instead) <= total_bytes(eqn.outvars):
                place[i] = first
        for var in read:
            readers.setdefault(var, []).append(place[i])
    return sorted(range(len(place)), key=lambda i: (place[i], i))
