"""The memory and the recomputation of a stage under the remat modes."""

from collections.abc import Sequence
from typing import NamedTuple

from jax.extend import core

from .._jaxprs import _flops, _jaxpr, _min_cut
from .._jaxprs._min_cut import total_bytes
from .._partition._remat_mode import DOTS, FULL, NONE, RematMode


class Residuals(NamedTuple):
    """The memory and the recomputation of one stage on one micro-batch.

    Attributes:
      nbytes: remat mode -> the bytes stored between forward and backward: residuals,
        and inputs that the backward reads.
      recomputed_flops: the floating-point operations that the backward takes for
        recomputation; ``None`` under modes with a policy.
    """

    nbytes: dict[str, int]
    recomputed_flops: int | None


def measure_residuals(
    pullback_leaves: core.ClosedJaxpr,
    residual_vars: list[core.Var],
    *,
    activations: Sequence[core.Var],
    side_inputs: Sequence[core.Var],
    mode: RematMode,
) -> Residuals:
    """The bytes that a mode stores; if it has no policy, those of other modes too.

    A trace without a policy also tells what `FULL`, `DOTS` and `NONE` store.

    Args:
      pullback_leaves: ``inputs -> all that the backward reads``.
      residual_vars: the variables of it that the forward returns for the backward.
      activations: the inputs that other stages send, and inputs of the model: a stage
        keeps them for its backward.
      side_inputs: the other inputs that a micro-batch brings; the backward has them
        anyway.
      mode: the mode that chose the residuals.
    """
    jaxpr = pullback_leaves.jaxpr
    recomputed = _jaxpr.recomputation(pullback_leaves, jaxpr.outvars, residual_vars)
    invars = zip(recomputed.jaxpr.invars, _jaxpr.used_inputs(recomputed), strict=True)
    used_inputs = {var for var, is_used in invars if is_used}
    stored_bytes = total_bytes(used_inputs.intersection(activations) | {*residual_vars})
    if mode.policy is not None:  # other modes have another pullback
        return Residuals({mode.name: stored_bytes}, recomputed_flops=None)

    of_microbatch = {*activations, *side_inputs}
    is_of_microbatch = [var in of_microbatch for var in jaxpr.invars]
    microbatch_vars = _jaxpr.depending_on(pullback_leaves, is_of_microbatch)
    products = _min_cut.find_products(jaxpr, jaxpr.outvars) & microbatch_vars
    pullback_vars = _jaxpr.variables(jaxpr.outvars) & microbatch_vars
    # Under `FULL` the backward runs the forward again, which reads all activations.
    nbytes = {FULL.name: total_bytes(activations)}
    if mode != NONE:
        nbytes[mode.name] = stored_bytes
    nbytes[DOTS.name] = total_bytes(products.difference(side_inputs))
    nbytes[NONE.name] = total_bytes(pullback_vars.difference(side_inputs))
    return Residuals(nbytes, recomputed_flops=_flops.count_flops(recomputed))
