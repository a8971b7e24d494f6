"""What programs would take by their jaxprs: nothing is compiled or run.

Time is that of a roofline: what an equation takes is the time of its floating-point
operations or that of the bytes that it reads and writes, whichever is longer. XLA fuses
what is cheap, such as sums, masks and reductions: all of that in a program is taken as
one, which touches only what others read of it or write for it.

Memory besides arguments and results: at most what is alive at once of what equations
make, each as an array of its own: no fusion, no view. XLA needs less, but for what a
product or a convolution takes for itself, which no jaxpr shows.

References:
  Williams et al., `Roofline: An Insightful Visual Performance Model for Multicore
  Architectures <https://doi.org/10.1145/1498765.1498785>`_ (2009).
"""

from typing import NamedTuple

from jax.extend import core

from .._jaxprs import _flops, _jaxpr, _min_cut
from .._jaxprs._computation import Computation

# What reads of its first operand only as much as it gives.
_PARTS = frozenset(["dynamic_slice", "gather", "slice"])


class Rates(NamedTuple):
    """What a device does in a second.

    Attributes:
      flops: floating-point operations.
      bandwidth: bytes that it reads and writes in its memory.
      action: the seconds of a program that computes nothing; not in a second.
    """

    flops: float = 1e12
    bandwidth: float = 1e11
    action: float = 2e-5

    def seconds(self, flops: float, num_bytes: float) -> float:
        """Of so many operations that touch so many bytes."""
        return max(flops / self.flops, num_bytes / self.bandwidth)


def seconds(function: Computation, rates: Rates) -> float:
    """How long a function takes that was made of a jaxpr."""
    assert function.closed is not None
    return _seconds(function.closed, rates)


def _seconds(closed: core.ClosedJaxpr, rates: Rates) -> float:
    jaxpr = closed.jaxpr
    outside = {*jaxpr.invars, *jaxpr.constvars, *_jaxpr.variables(jaxpr.outvars)}
    touched: dict[core.Var, int] = {}
    flops, total = 0, 0.0
    for eqn in jaxpr.eqns:
        if _min_cut.is_cheap(eqn):
            flops += _flops.of_equation(eqn)
            for var, size in _touched(eqn).items():
                touched[var] = max(touched.get(var, 0), size)
        else:
            total += _of_dear(eqn, rates)
            outside |= _touched(eqn).keys()
    crossing = sum(size for var, size in touched.items() if var in outside)
    return total + rates.seconds(flops, crossing)


def _touched(eqn: core.JaxprEqn) -> dict[core.Var, int]:
    """The bytes of each variable that an equation reads or writes."""
    variables = _jaxpr.variables([*eqn.invars, *eqn.outvars])
    sizes = {var: _min_cut.nbytes(var) for var in variables}
    if eqn.primitive.name in _PARTS and eqn.invars[0] in sizes:
        source = eqn.invars[0]
        sizes[source] = min(sizes[source], _min_cut.nbytes(eqn.outvars[0]))
    return sizes


def _of_dear(eqn: core.JaxprEqn, rates: Rates) -> float:
    inside = [_seconds(closed, rates) for closed in _jaxpr.inner_jaxprs(eqn)]
    if not inside:
        size = sum(_touched(eqn).values())
        return rates.seconds(_flops.of_equation(eqn), size)
    if eqn.primitive.name == "scan":
        return eqn.params["length"] * sum(inside)
    return max(inside) if eqn.primitive.name == "cond" else sum(inside)


def workspace_bytes(function: Computation) -> int:
    """The most that is alive at once in a function that was made of a jaxpr."""
    assert function.closed is not None
    return _most(function.closed.jaxpr)


def _most(jaxpr: core.Jaxpr) -> int:
    """The most besides inputs and results, at the equation that needs most."""
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
        alive += sum(_min_cut.nbytes(var) for var in eqn.outvars if var in last)
        most = max(most, alive + _inside(eqn))
        alive -= sum(map(_min_cut.nbytes, ending.get(number, ())))
    return most


def _inside(eqn: core.JaxprEqn) -> int:
    """What a call, a branch or a turn of a loop needs."""
    inner = [closed.jaxpr for closed in _jaxpr.inner_jaxprs(eqn)]
    most = max(map(_most, inner), default=0)
    if eqn.primitive.name in ("scan", "while"):
        # What a turn gives is written beside what it was given.
        most += sum(_min_cut.nbytes(var) for jaxpr in inner for var in jaxpr.outvars)
    return most
