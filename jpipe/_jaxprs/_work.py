"""The work of equations: an estimate of the time that they take, without a device."""

from jax.extend import core

from . import _flops, _jaxpr, _min_cut

# So many operations take as long as to move a byte: the machine balance of the roofline
# model (Williams, Waterman and Patterson, 2009). By the data sheets of V100, A100 and
# H200 it is 10 to 17 in float32, and ten times that for products in tensor cores.
_OPERATIONS_PER_BYTE = 10


def estimate_eqn_work(eqn: core.JaxprEqn) -> int:
    """The operations of an equation, and so many as its results take to be written.

    Those of a loop, of a branch and of a call are those of what is inside: see
    `_flops`.
    """
    body_work = [estimate_work(closed) for closed in _jaxpr.bodies(eqn)]
    if not body_work:
        written_bytes = sum(map(_min_cut.nbytes, eqn.outvars))
        return _flops.count_eqn_flops(eqn) + _OPERATIONS_PER_BYTE * written_bytes
    if eqn.primitive.name == "scan":
        return eqn.params["length"] * sum(body_work)
    return max(body_work)


def estimate_work(closed: core.ClosedJaxpr) -> int:
    """The work of all equations."""
    return sum(map(estimate_eqn_work, closed.jaxpr.eqns))
