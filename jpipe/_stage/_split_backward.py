"""A backward cut in two: the gradient of the input first, that of the weights later.

    backward:  (weights, data) -> (input_grads, weight_grads)
    first:     (weights, data) -> (input_grads, residuals)
    second:    (weights, data, residuals) -> weight_grads

The stage before waits for the first half and nobody for the second, so a schedule can
put the second where a rank would idle. Both are slices of one jaxpr: each has the
equations that its results need. The residuals are all values that both halves need, or
the fewest bytes from which they follow cheaply. Values that follow from weights alone
are computed in both halves and are no residuals.

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
      closed: the jaxpr of the program.
      is_weight: one bool per input; True for weights.
      is_first: one bool per result; True for results of the first half.
      fewest: True if residuals are the fewest bytes.

    Returns:
      The halves.
    """
    opened = _jaxpr.open_checkpoints(closed)
    jaxpr = opened.jaxpr
    outvars = list(zip(jaxpr.outvars, is_first, strict=True))
    first_outvars = [var for var, first in outvars if first]
    second_outvars = [var for var, first in outvars if not first]

    first = _jaxpr.dce_jaxpr(opened, first_outvars)
    data = _jaxpr.depending_on(opened, [not weight for weight in is_weight])
    computed = [v for v in _jaxpr.outvars_of(first.jaxpr.eqns) if v in data]
    second = _jaxpr.recomputation(opened, second_outvars, computed)
    residuals = _used_last_inputs(second, computed)
    if fewest:
        second = _jaxpr.recomputation(opened, second_outvars, residuals)
        residuals = _min_cut.find_residuals(
            first,
            _used_last_inputs(second, [*jaxpr.invars, *residuals]),
            is_constant=is_weight,
            is_stored=[False] * len(is_weight),
        )

    first = core.ClosedJaxpr(
        first.jaxpr.replace(outvars=[*first_outvars, *residuals]), opened.consts
    )
    second = _jaxpr.recomputation(opened, second_outvars, residuals)
    return BackwardHalves(first, second)


def _used_last_inputs(
    closed: core.ClosedJaxpr, variables: list[core.Var]
) -> list[core.Var]:
    """The variables among the last inputs of a jaxpr that it reads.

    Args:
      closed: the jaxpr.
      variables: its last inputs, as the variables that they are outside.
    """
    is_used = _jaxpr.used_inputs(closed)[-len(variables) :] if variables else []
    return [var for var, used in zip(variables, is_used, strict=True) if used]
