"""Inlines calls of `jax.checkpoint` that are more than a stage.

``remat=`` decides what a stage stores, and so it does for the contents of such a call.
A call that is less than a stage stays, and decides for itself.
"""

from jax.extend import core

from .._jaxprs import _flops, _inlining, _jaxpr
from . import _boundaries


def inline_checkpoints(closed: core.ClosedJaxpr, num_stages: int) -> core.ClosedJaxpr:
    """Inlines such calls until the program can be cut into so many stages.

    Args:
      closed: the jaxpr.
      num_stages: the number of stages that it will be cut into.
    """
    if num_stages == 1:
        return closed
    while True:
        total_flops = _flops.count_flops(closed)
        chosen = set[int]()  # ids of equations
        for eqn in closed.jaxpr.eqns:
            if eqn.primitive.name not in _jaxpr.CHECKPOINTS:
                continue
            is_more_than_stage = _flops.count_eqn_flops(eqn) * num_stages > total_flops
            if is_more_than_stage or _boundaries.has_inner_marks(eqn):
                chosen.add(id(eqn))
        if not chosen:
            return closed
        closed = _inlining.inline_eqns(closed, chosen)
