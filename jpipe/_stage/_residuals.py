"""The memory and the recomputation of a stage under the remat modes."""

from collections.abc import Sequence
from typing import NamedTuple

from jax.extend import core

from .._jaxprs import _flops, _jaxpr, _min_cut
from .._jaxprs._min_cut import total_bytes


class Residuals(NamedTuple):
    """The memory and the recomputation of one stage on one micro-batch.

    Attributes:
      nbytes: remat mode -> the bytes stored between forward and backward: residuals,
        and inputs that the backward reads.
      recomputed_flops: the floating-point operations that the backward takes for
        recomputation; ``None`` under modes other than ``"none"`` and ``"min_cut"``.
    """

    nbytes: dict[str, int]
    recomputed_flops: int | None


def measure_residuals(
    reads: core.ClosedJaxpr,
    residuals: list[core.Var],
    *,
    activations: Sequence[core.Var],
    side_inputs: Sequence[core.Var],
    mode: str,
) -> Residuals:
    """The residuals under a remat mode, and for `"none"` and `"min_cut"` under others.

    Args:
      reads: ``inputs -> all that the backward reads``.
      residuals: the variables of it that the forward returns for the backward.
      activations: the inputs that other stages send, and inputs of the model: a stage
        keeps them for its backward.
      side_inputs: the other inputs that a micro-batch brings; the backward has them
        anyway.
      mode: the mode that chose the residuals.
    """
    jaxpr = reads.jaxpr
    stored_bytes = total_bytes(
        {*residuals, *_read_activations(reads, residuals, activations)}
    )
    if mode not in ("none", "min_cut"):
        return Residuals({mode: stored_bytes}, recomputed_flops=None)

    of_microbatch = {*activations, *side_inputs}
    data = _jaxpr.depending_on(reads, [var in of_microbatch for var in jaxpr.invars])
    products = _min_cut.products(jaxpr, jaxpr.outvars) & data
    backward_reads = _jaxpr.variables(jaxpr.outvars) & data
    nbytes = {"full": total_bytes(activations)}
    if mode == "min_cut":
        nbytes[mode] = stored_bytes
    nbytes["dots"] = total_bytes(products.difference(side_inputs))
    nbytes["none"] = total_bytes(backward_reads.difference(side_inputs))

    recomputed = _jaxpr.recomputation(reads, jaxpr.outvars, residuals)
    return Residuals(nbytes, recomputed_flops=_flops.count_flops(recomputed))


def _read_activations(
    reads: core.ClosedJaxpr,
    residuals: list[core.Var],
    activations: Sequence[core.Var],
) -> list[core.Var]:
    """The activations that a backward reads though it has the residuals."""
    recomputed = _jaxpr.recomputation(reads, reads.jaxpr.outvars, residuals)
    is_used = _jaxpr.used_inputs(recomputed)
    inputs = zip(reads.jaxpr.invars, is_used, strict=False)  # before the residuals
    return [var for var, used in inputs if used and var in activations]
