"""Operations with a derivative of their own: what they compute, and their pullback."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

from . import _inlining, _jaxpr

_LINEAR_SOLVE = "custom_linear_solve"
CUSTOM_RULES = frozenset([*_jaxpr.RULES, _LINEAR_SOLVE])


def trace_values(eqn: core.JaxprEqn) -> core.ClosedJaxpr:
    """The values of such an equation, without its rule: ``(*operands) -> results``."""
    specs = _jaxpr.specs(eqn.invars)
    closed = jax.make_jaxpr(lambda *operands: _evaluate(eqn, operands))(*specs)
    return _inline_rules(closed)


def trace_pullback(
    eqn: core.JaxprEqn,
    bind: Callable[[Sequence[Any]], Sequence[Any]],
    differentiated: Sequence[int],
) -> core.ClosedJaxpr:
    """The pullback of such an equation, by its rule.

    Args:
      eqn: the equation.
      bind: ``operands -> results`` of it, with its rule.
      differentiated: the indices of the operands that get gradients.

    Returns:
      ``(*operands, *cotangents of inexact results) -> gradients``.
    """
    num_operands = len(eqn.invars)

    def run(*args: Any) -> list[Any]:
        operands = list(args[:num_operands])

        def run_inexact(values: list[Any]) -> list[Any]:
            for i, value in zip(differentiated, values, strict=True):
                operands[i] = value
            return [x for x in bind(operands) if _jaxpr.is_inexact(x)]

        _, pull_back = jax.vjp(run_inexact, [operands[i] for i in differentiated])
        (grads,) = pull_back(list(args[num_operands:]))
        return grads

    outvars = [var for var in eqn.outvars if _jaxpr.is_inexact(var.aval)]
    specs = _jaxpr.specs([*eqn.invars, *outvars])
    return _inline_rules(jax.make_jaxpr(run)(*specs))


def _inline_rules(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """The same values; linear solves have a rule, too, beside the calls of JAX."""

    def rule(eqn: core.JaxprEqn) -> _jaxpr.Rule | None:
        if eqn.primitive.name != _LINEAR_SOLVE:
            return None
        return lambda operands: _evaluate(eqn, operands)

    closed = _inlining.inline_calls(closed)
    has_solve = any(eqn.primitive.name == _LINEAR_SOLVE for eqn in closed.jaxpr.eqns)
    return _inlining.inline_calls(_jaxpr.rewrite(closed, rule)) if has_solve else closed


def _evaluate(eqn: core.JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Evaluates such an equation by the jaxpr of its values."""
    if eqn.primitive.name != _LINEAR_SOLVE:
        (body,) = _jaxpr.bodies(eqn)
        return core.jaxpr_as_fun(body)(*operands)
    # The constants of four functions, and the right sides.
    counts: Any = eqn.params["const_lengths"]
    first = counts.matvec + counts.vecmat
    solve_consts = operands[first : first + counts.solve]
    right_sides = operands[sum(counts) :]
    solve: Any = eqn.params["jaxprs"].solve
    return core.jaxpr_as_fun(solve)(*solve_consts, *right_sides)
