"""The residuals of a stage under the remat modes, and what it computes again."""

from collections.abc import Sequence
from typing import NamedTuple

from jax.extend import core

from .._jaxprs import _flops, _jaxpr, _min_cut
from .._jaxprs._min_cut import total_bytes


class Residuals(NamedTuple):
    """Known of one stage on one micro-batch.

    Attributes:
      nbytes: what is stored between forward and backward, by the names of remat modes:
        residuals, and the input where a backward reads it.
      recomputed_flops: the floating-point operations that the backward takes for
        computing the rest again; ``None`` if it is not known.
    """

    nbytes: dict[str, int]
    recomputed_flops: int | None


def residuals(
    reads: core.ClosedJaxpr,
    stored: list[core.Var],
    x: Sequence[core.Var],
    batch: Sequence[core.Var],
    mode: str,
) -> Residuals:
    """What is stored under the mode; and under others, if nothing is computed again.

    Args:
      reads: ``inputs -> all that the backward reads``.
      stored: those of its variables that the forward hands on.
      x: those of its inputs that belong to one micro-batch.
      batch: those that do, and that the backward has anyway.
      mode: the mode that it was made with.
    """
    jaxpr = reads.jaxpr

    def with_inputs(some: list[core.Var]) -> int:
        live = _jaxpr.used_inputs(_jaxpr.recomputation(reads, jaxpr.outvars, some))
        pairs = zip(jaxpr.invars, live, strict=False)
        return total_bytes({*some, *(var for var, yes in pairs if yes and var in x)})

    own = with_inputs(stored)
    if mode not in ("none", "min_cut"):
        return Residuals({mode: own}, None)
    of_microbatch = {*x, *batch}
    data = _jaxpr.depending_on(reads, [v in of_microbatch for v in jaxpr.invars])
    products = _min_cut.products(jaxpr, jaxpr.outvars) & data
    outvars = _jaxpr.variables(jaxpr.outvars)
    nbytes = {
        "full": total_bytes(x),
        **({mode: own} if mode == "min_cut" else {}),
        "dots": total_bytes(products.difference(batch)),
        "none": total_bytes((outvars & data).difference(batch)),
    }
    again = _jaxpr.recomputation(reads, jaxpr.outvars, stored)
    return Residuals(nbytes, _flops.flops(again))
