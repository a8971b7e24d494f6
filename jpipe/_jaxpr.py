"""Questions that are asked of a jaxpr: what depends on what, and who needs it.

`jax.extend.core` is JAX's public door to jaxprs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

PyTree = Any


def trace(function: Callable[..., Any], *specs: PyTree) -> tuple[core.ClosedJaxpr, Any]:
    """Traces a function on abstract arguments, with inner calls of `jax.jit` inlined.

    Args:
      function: of any pytrees.
      *specs: its arguments, with `jax.ShapeDtypeStruct` leaves.

    Returns:
      The jaxpr over flat leaves, and the specs of the function's result.
    """
    closed, result = jax.make_jaxpr(function, return_shape=True)(*specs)
    flat = [
        jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)
        for var in closed.jaxpr.invars
    ]
    return jax.make_jaxpr(lambda *args: _inline(closed, args))(*flat), result


def _inline(closed: core.ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    """Evaluates a jaxpr, entering the jaxprs of inner jit calls."""
    values: dict[core.Var, Any] = dict(
        zip(closed.jaxpr.constvars, closed.consts, strict=True)
    )
    values.update(zip(closed.jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    for eqn in closed.jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        if eqn.primitive.name in ("jit", "pjit"):
            results = _inline(eqn.params["jaxpr"], operands)
        else:
            results = _bind(closed.jaxpr, eqn, operands)
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in closed.jaxpr.outvars]


def _bind(jaxpr: core.Jaxpr, eqn: core.JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Evaluates one equation, as a jaxpr of its own: the public way to do so."""
    value = {
        atom: operand
        for atom, operand in zip(eqn.invars, operands, strict=True)
        if not isinstance(atom, core.Literal)
    }
    single = jaxpr.replace(
        constvars=[], invars=list(value), outvars=eqn.outvars, eqns=[eqn]
    )
    return core.jaxpr_as_fun(core.ClosedJaxpr(single, []))(*value.values())


def depending_on(closed: core.ClosedJaxpr, inputs: Sequence[bool]) -> set[core.Var]:
    """All variables that some of the given inputs reach."""
    jaxpr = closed.jaxpr
    reached = {var for var, chosen in zip(jaxpr.invars, inputs, strict=True) if chosen}
    for eqn in jaxpr.eqns:
        if eqn.effects or not reached.isdisjoint(_variables(eqn.invars)):
            reached.update(eqn.outvars)
    return reached


def prune(closed: core.ClosedJaxpr, outvars: Sequence[Any]) -> core.ClosedJaxpr:
    """The same computation with other results, and nothing that they do not need.

    Equations with effects, such as a debug print, stay.
    """
    live = _variables(outvars)
    eqns = []
    for eqn in reversed(closed.jaxpr.eqns):
        if eqn.effects or not live.isdisjoint(eqn.outvars):
            live |= _variables(eqn.invars)
            eqns.append(eqn)
    jaxpr = closed.jaxpr.replace(eqns=eqns[::-1], outvars=list(outvars))
    return core.ClosedJaxpr(jaxpr, closed.consts)


def live_inputs(closed: core.ClosedJaxpr) -> list[bool]:
    """Which inputs the results need."""
    jaxpr = prune(closed, closed.jaxpr.outvars).jaxpr
    live = _variables(jaxpr.outvars)
    for eqn in jaxpr.eqns:
        live |= _variables(eqn.invars)
    return [var in live for var in jaxpr.invars]


def _variables(atoms: Sequence[Any]) -> set[core.Var]:
    return {atom for atom in atoms if not isinstance(atom, core.Literal)}


def evaluate(
    closed: core.ClosedJaxpr, outvars: Sequence[Any], *, without: set[core.Var]
) -> Callable[..., list[Any]]:
    """A function of the same inputs that computes only the given variables.

    Args:
      closed: the whole computation.
      outvars: what to compute; nothing in it may depend on ``without``.
      without: variables that must not be computed.

    Returns:
      A function of the flat inputs of ``closed``.
    """
    eqns = [eqn for eqn in closed.jaxpr.eqns if not set(eqn.outvars) & without]
    part = closed.jaxpr.replace(eqns=eqns, outvars=list(outvars))
    return core.jaxpr_as_fun(core.ClosedJaxpr(part, closed.consts))
