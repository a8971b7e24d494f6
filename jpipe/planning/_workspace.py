"""What a program needs while it runs beside arguments and results: on paper, at most.

Counted is what is alive at once of what equations make, each as an array of its own: no
fusion, no view. XLA needs less, but for what a product or a convolution takes for
itself, which no jaxpr shows.
"""

from jax.extend import core

from .._jaxprs import _cheapest, _jaxpr
from .._jaxprs._function import Function


def workspace_bytes(function: Function) -> int:
    """The most that is alive at once in a function that was made of a jaxpr."""
    assert function.closed is not None
    return _most(function.closed.jaxpr)


def _most(jaxpr: core.Jaxpr) -> int:
    """The most beside inputs and results, at the equation that needs most."""
    outside = _jaxpr.variables([*jaxpr.outvars, *jaxpr.invars, *jaxpr.constvars])
    last: dict[core.Var, int] = {}
    for number, eqn in enumerate(jaxpr.eqns):
        for var in _jaxpr.variables([*eqn.invars, *eqn.outvars]) - outside:
            last[var] = number
    ending: dict[int, list[core.Var]] = {}
    for var, number in last.items():
        ending.setdefault(number, []).append(var)
    alive = most = 0
    for number, eqn in enumerate(jaxpr.eqns):
        alive += sum(_cheapest.nbytes(var) for var in eqn.outvars if var in last)
        most = max(most, alive + _inside(eqn))
        alive -= sum(map(_cheapest.nbytes, ending.get(number, ())))
    return most


def _inside(eqn: core.JaxprEqn) -> int:
    """What a call, a branch or a turn of a loop needs."""
    inner = [closed.jaxpr for closed in _jaxpr.inside(eqn)]
    most = max(map(_most, inner), default=0)
    if eqn.primitive.name in ("scan", "while"):
        # What a turn gives is written beside what it was given.
        most += sum(_cheapest.nbytes(var) for jaxpr in inner for var in jaxpr.outvars)
    return most
