"""Calls of `jax.checkpoint` that are more than a stage, in the open.

``remat=`` decides what a stage stores, and so it does for what was in such a call. One
that is less than a stage stays, and decides for itself.
"""

from jax.extend import core

from .._jaxprs import _flops, _jaxpr
from . import _marks


def opened(closed: core.ClosedJaxpr, num_stages: int) -> core.ClosedJaxpr:
    """The same computation, divisible in so many stages.

    Args:
      closed: the jaxpr.
      num_stages: how many stages there are to be.
    """
    while True:
        total, eqns = _flops.flops(closed), closed.jaxpr.eqns
        chosen = {
            id(eqn)
            for eqn in eqns
            if eqn.primitive.name in _jaxpr.CHECKPOINTS
            and (_flops.of_equation(eqn) * num_stages > total or _marks.are_inside(eqn))
        }
        if num_stages == 1 or not chosen:
            return closed
        closed = _jaxpr.inline(closed, chosen)
