"""Equations as late as they are read: what is computed early for a late stage."""

from dataclasses import replace

from jax.extend import core

from .._jaxprs import _cheapest, _jaxpr
from ._program import Traced


def late(program: Traced) -> Traced:
    """The same program, where equations stand right before what first reads them.

    As of a decoder's embedding that is computed before the encoder: less crosses the
    boundaries in between. An equation stays where it is if its operands would be held
    instead that are larger, if it has effects, or if what it makes is returned.
    """
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
            held = {v for v in read & of_stages if max(readers.get(v, [0])) < first}
            if _bytes(held) <= _bytes(set(eqn.outvars)):
                place[i] = first
        for var in read:
            readers.setdefault(var, []).append(place[i])
    order = sorted(range(len(place)), key=lambda i: (place[i], i))
    closed = core.ClosedJaxpr(
        jaxpr.replace(eqns=[jaxpr.eqns[i] for i in order]), program.closed.consts
    )
    return replace(program, closed=closed)


def _bytes(variables: set[core.Var]) -> int:
    return sum(map(_cheapest.nbytes, variables))
