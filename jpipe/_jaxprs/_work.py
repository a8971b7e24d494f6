"""How much of a device's time equations take, estimated without a device."""

from jax.extend import core

from . import _flops, _jaxpr, _min_cut

# So many operations take as long as to move a byte.
_PER_BYTE = 10


def of_equation(eqn: core.JaxprEqn) -> int:
    """The operations of an equation, and so many as its results take to be written.

    Those of a loop, of a branch and of a call are those of what is inside: see
    `_flops`.
    """
    bodies = [of(closed) for closed in _jaxpr.bodies(eqn)]
    if not bodies:
        written = sum(map(_min_cut.nbytes, eqn.outvars))
        return _flops.of_equation(eqn) + _PER_BYTE * written
    if eqn.primitive.name == "scan":
        return eqn.params["length"] * sum(bodies)
    return max(bodies)


def of(closed: core.ClosedJaxpr) -> int:
    """The work of all equations."""
    return sum(map(of_equation, closed.jaxpr.eqns))
