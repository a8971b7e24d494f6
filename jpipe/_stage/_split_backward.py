"""A backward split in two: the gradient of the input first, that of the weights later.

    backward:  (weights, microbatch) -> (input_grads, weight_grads)
    first:     (weights, microbatch) -> (input_grads, residuals)
    second:    (weights, microbatch, residuals) -> weight_grads

where *microbatch* is all that differs between micro-batches: activations, cotangents,
the residuals of the forward.

The stage before waits for the first half and nobody for the second, so a schedule can
put the second where a rank would idle. Both are slices of one jaxpr: each has the
equations that its results need. The residuals are all values that both halves need, or
the fewest bytes from which they follow cheaply. Values that follow from weights alone
are computed in both halves and are no residuals.

A call that the slice would have to enter, such as a `jax.lax.scan`, stays whole: in
the first half if the gradient of the input needs any of its results.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend import core

from .._jaxprs import _jaxpr, _min_cut
from .._partition._remat_mode import RematMode


class BackwardHalves(NamedTuple):
    """The two halves of a program, as jaxprs over flat leaves.

    Attributes:
      first: ``(weights, microbatch) -> (first, residuals)``.
      second: ``(weights, microbatch, residuals) -> second``.
    """

    first: core.ClosedJaxpr
    second: core.ClosedJaxpr


def split_backward(
    closed: core.ClosedJaxpr,
    *,
    is_weight: Sequence[bool],
    is_first: Sequence[bool],
    mode: RematMode,
) -> BackwardHalves:
    """Splits a program in two.

    Args:
      closed: the jaxpr of the program.
      is_weight: one bool per input; True for weights.
      is_first: one bool per result; True for results of the first half.
      mode: tells if the residuals are all values or the fewest bytes.

    Returns:
      The halves.
    """
    opened = _jaxpr.open_checkpoints(closed)
    jaxpr = opened.jaxpr
    outvars = list(zip(jaxpr.outvars, is_first, strict=True))
    first_outvars = [var for var, first in outvars if first]
    second_outvars = [var for var, first in outvars if not first]

    # The first half has the equations that its results need.
    first = _jaxpr.dce_jaxpr(opened, first_outvars)
    is_of_microbatch = [not weight for weight in is_weight]
    microbatch_vars = _jaxpr.depending_on(opened, is_of_microbatch)
    first_vars = _jaxpr.outvars_of(first.jaxpr.eqns)
    computed = [var for var in first_vars if var in microbatch_vars]

    # The residuals are all that the second half reads of these, or give it cheaply.
    second_reads = _read_vars(opened, second_outvars, computed)
    inputs = {*jaxpr.invars}
    residuals = [var for var in second_reads if var not in inputs]
    if mode.stores_fewest_bytes:
        residuals = _min_cut.find_residuals(
            first,
            second_reads,
            is_constant=is_weight,
            is_stored=[False] * len(is_weight),
        )

    # The first half returns them; the second computes the rest from them.
    first_jaxpr = first.jaxpr.replace(outvars=[*first_outvars, *residuals])
    return BackwardHalves(
        first=core.ClosedJaxpr(first_jaxpr, opened.consts),
        second=_jaxpr.recomputation(opened, second_outvars, residuals),
    )


def _read_vars(
    closed: core.ClosedJaxpr, outvars: Sequence[Any], stored: Sequence[core.Var]
) -> list[core.Var]:
    """The inputs and the stored variables from which some variables are computed."""
    jaxpr = _jaxpr.recomputation(closed, outvars, stored)
    invars = zip(jaxpr.jaxpr.invars, _jaxpr.used_inputs(jaxpr), strict=True)
    return [var for var, is_used in invars if is_used]
