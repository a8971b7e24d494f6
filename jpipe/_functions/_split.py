"""A backward cut in two: the gradient of the input first, that of the weights later.

The stage before waits for the first and nobody for the second, so a schedule can put
the second where a rank would idle. Both are slices of one jaxpr. The first computes
what the gradient of the input needs; the second the rest, from the inputs that it
reads again and from residuals of the first. What follows from the weights alone is
computed in both, and is none of them.

A call that the slice would have to enter, such as a `jax.lax.scan`, stays whole: in
the first half if the gradient of the input needs any of its results.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend import core

from .._jaxprs import _jaxpr


class Halves(NamedTuple):
    """The two halves of a program, as jaxprs over flat leaves.

    Attributes:
      first: ``(weights, data) -> (first, residuals)``.
      second: ``(weights, data, residuals) -> second``.
    """

    first: core.ClosedJaxpr
    second: core.ClosedJaxpr


def split(closed: core.ClosedJaxpr, num_weights: int, is_first: list[bool]) -> Halves:
    """Cuts a program in two.

    Args:
      closed: its jaxpr; the weights come first among its inputs.
      num_weights: how many of its inputs are weights.
      is_first: which of its results the first half gives.

    Returns:
      The halves.
    """
    opened = _jaxpr.open_checkpoints(closed)
    jaxpr = opened.jaxpr
    pairs = list(zip(jaxpr.outvars, is_first, strict=True))
    wanted_first = [var for var, first in pairs if first]
    wanted_second = [var for var, first in pairs if not first]

    first = _jaxpr.prune(opened, wanted_first)
    is_data = [i >= num_weights for i in range(len(jaxpr.invars))]
    from_data = _jaxpr.depending_on(opened, is_data)
    computed = {v for eqn in first.jaxpr.eqns for v in eqn.outvars if v in from_data}
    second_eqns, needed = _remainder(jaxpr.eqns, wanted_second, computed)
    residuals = [
        v for eqn in first.jaxpr.eqns for v in eqn.outvars if v in needed & computed
    ]
    first = core.ClosedJaxpr(
        first.jaxpr.replace(outvars=[*wanted_first, *residuals]), opened.consts
    )
    second = core.ClosedJaxpr(
        jaxpr.replace(
            invars=[*jaxpr.invars, *residuals],
            eqns=second_eqns,
            outvars=wanted_second,
        ),
        opened.consts,
    )
    return Halves(first, second)


def _remainder(
    equations: Sequence[core.JaxprEqn],
    outvars: Sequence[Any],
    computed: set[core.Var],
) -> tuple[list[core.JaxprEqn], set[core.Var]]:
    """The equations that some results need beside what is computed already.

    Returns:
      The equations in order, and all variables that they and the results read.
    """
    needed = _jaxpr.variables(outvars)
    eqns = []
    for eqn in reversed(equations):
        if (needed - computed).intersection(eqn.outvars):
            needed |= _jaxpr.variables(eqn.invars)
            eqns.append(eqn)
    return eqns[::-1], needed
