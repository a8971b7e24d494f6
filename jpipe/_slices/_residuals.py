"""The residuals of a stage under the remat modes, and what it computes again."""

from typing import NamedTuple

from jax.extend import core

from .._jaxprs import _cheapest, _flops, _jaxpr
from .._jaxprs._cheapest import total_bytes


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
    sizes: tuple[int, int, int],
    mode: str,
) -> Residuals:
    """What is stored under the mode; and under others, if nothing is computed again.

    Args:
      reads: ``(weights, x, extra) ->`` all that the backward reads.
      stored: those of its variables that the forward hands on.
      sizes: how many of its inputs are weights, x, and extra.
      mode: the mode that it was made with.
    """
    jaxpr = reads.jaxpr
    x = jaxpr.invars[sizes[0] : sizes[0] + sizes[1]]

    def with_inputs(some: list[core.Var]) -> int:
        live = _jaxpr.live_inputs(_jaxpr.rest(reads, jaxpr.outvars, some))
        pairs = zip(jaxpr.invars, live, strict=False)
        return total_bytes({*some, *(var for var, yes in pairs if yes and var in x)})

    own = with_inputs(stored)
    if mode not in ("none", "min_cut"):
        return Residuals({mode: own}, None)
    constant = [i < sizes[0] for i in range(len(jaxpr.invars))]
    data = _jaxpr.depending_on(reads, [not yes for yes in constant])
    products = _cheapest.products(jaxpr, jaxpr.outvars) & data
    outvars = _jaxpr.variables(jaxpr.outvars)
    extra = jaxpr.invars[sizes[0] + sizes[1] :]
    nbytes = {
        "full": total_bytes(x),
        **({mode: own} if mode == "min_cut" else {}),
        "dots": total_bytes(products.difference(extra)),
        "none": total_bytes((outvars & data).difference(extra)),
    }
    again = _jaxpr.rest(reads, jaxpr.outvars, stored)
    return Residuals(nbytes, _flops.flops(again))
