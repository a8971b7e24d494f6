"""A backward cut in two: the gradient of the input first, that of the weights later.

The stage before waits for the first and nobody for the second, so a schedule can put
the second where a rank would idle. Both are slices of one jaxpr. The first computes
what the gradient of the input needs; the second the rest, from the inputs that it
reads again and from residuals of the first: all that both need, or the fewest bytes
from which it follows cheaply. What follows from the weights alone is computed in both,
and is none of them.

A call that the slice would have to enter, such as a `jax.lax.scan`, stays whole: in
the first half if the gradient of the input needs any of its results.
"""

from collections.abc import Sequence
from typing import NamedTuple

from jax.extend import core

from .._jaxprs import _jaxpr, _min_cut


class BackwardHalves(NamedTuple):
    """The two halves of a program, as jaxprs over flat leaves.

    Attributes:
      first: ``(weights, data) -> (first, residuals)``.
      second: ``(weights, data, residuals) -> second``.
    """

    first: core.ClosedJaxpr
    second: core.ClosedJaxpr


def split_backward(
    closed: core.ClosedJaxpr,
    *,
    is_weight: Sequence[bool],
    is_first: Sequence[bool],
    fewest: bool,
) -> BackwardHalves:
    """Cuts a program in two.

    Args:
      closed: its jaxpr.
      is_weight: one bool per input; True for weights.
      is_first: one bool per result; True for those of the first half.
      fewest: whether residuals are the fewest bytes.

    Returns:
      The halves.
    """
    opened = _jaxpr.open_checkpoints(closed)
    jaxpr = opened.jaxpr
    pairs = list(zip(jaxpr.outvars, is_first, strict=True))
    wanted_first = [var for var, first in pairs if first]
    wanted_second = [var for var, first in pairs if not first]

    first = _jaxpr.dce_jaxpr(opened, wanted_first)
    from_data = _jaxpr.depending_on(opened, [not weight for weight in is_weight])
    made = [v for eqn in first.jaxpr.eqns for v in eqn.outvars if v in from_data]
    residuals = _read(_jaxpr.recomputation(opened, wanted_second, made), made)
    if fewest:
        whole = _jaxpr.recomputation(opened, wanted_second, residuals)
        wanted = _read(whole, [*jaxpr.invars, *residuals])
        stored = [False] * len(is_weight)
        residuals = _min_cut.find_residuals(first, wanted, is_weight, stored)
    outvars = [*wanted_first, *residuals]
    first = core.ClosedJaxpr(first.jaxpr.replace(outvars=outvars), opened.consts)
    return BackwardHalves(first, _jaxpr.recomputation(opened, wanted_second, residuals))


def _read(closed: core.ClosedJaxpr, variables: list[core.Var]) -> list[core.Var]:
    """Those of the last inputs of a jaxpr that it reads, by their names outside."""
    live = _jaxpr.used_inputs(closed)[-len(variables) :] if variables else []
    return [var for var, yes in zip(variables, live, strict=True) if yes]
