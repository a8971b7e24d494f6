"""Seconds and bytes of computations by their jaxprs: nothing is compiled or run.

Time is that of a roofline. An equation takes as long as its floating-point operations,
or as the bytes that it reads and writes, whichever is longer:

    seconds(eqn) = max(flops / peak_flops, bytes / memory_bandwidth)    (`Rates`)

XLA fuses cheap equations, such as sums, masks and reductions: all of those in a jaxpr
are taken as one, which touches only the arrays that other equations read or write too.

The workspace of a computation, besides its arguments and results, is at most the arrays
of its equations that are alive at once: no fusion, no view. XLA needs less, except for
the workspace of a product or a convolution, which no jaxpr shows.

References:
  Williams et al., `Roofline: An Insightful Visual Performance Model for Multicore
  Architectures <https://doi.org/10.1145/1498765.1498785>`_ (2009).
"""

from jax.extend import core

from .._jaxprs import _flops, _jaxpr, _min_cut
from .._jaxprs._computation import Computation
from ._layer_profile import ProgramCosts
from ._origin import Rates

# Primitives that read as much of their first operand as they return.
_PARTIAL_READS = frozenset(["dynamic_slice", "gather", "slice"])


def estimate_program(computation: Computation, rates: Rates) -> ProgramCosts:
    """Estimates what a computation that was made of a jaxpr costs."""
    closed = computation.closed
    assert closed is not None
    return ProgramCosts(_seconds(closed, rates), _peak_bytes(closed.jaxpr))


def _seconds(closed: core.ClosedJaxpr, rates: Rates) -> float:
    jaxpr = closed.jaxpr
    # The variables that others than cheap equations read or write.
    outer_vars = {*jaxpr.invars, *jaxpr.constvars, *_jaxpr.variables(jaxpr.outvars)}
    # variable -> the bytes of it that cheap equations read or write
    cheap_bytes: dict[core.Var, int] = {}
    cheap_flops = 0
    seconds = 0.0
    for eqn in jaxpr.eqns:
        if _min_cut.is_cheap(eqn):
            cheap_flops += _flops.count_eqn_flops(eqn)
            for var, num_bytes in _touched(eqn).items():
                cheap_bytes[var] = max(cheap_bytes.get(var, 0), num_bytes)
        else:
            seconds += _expensive_seconds(eqn, rates)
            outer_vars |= _touched(eqn).keys()
    num_bytes = sum(size for var, size in cheap_bytes.items() if var in outer_vars)
    return seconds + rates.seconds(cheap_flops, num_bytes)


def _touched(eqn: core.JaxprEqn) -> dict[core.Var, int]:
    """The bytes of each variable that an equation reads or writes."""
    variables = _jaxpr.variables([*eqn.invars, *eqn.outvars])
    sizes = {var: _min_cut.nbytes(var) for var in variables}
    if eqn.primitive.name in _PARTIAL_READS and eqn.invars[0] in sizes:
        operand = eqn.invars[0]
        sizes[operand] = min(sizes[operand], _min_cut.nbytes(eqn.outvars[0]))
    return sizes


def _expensive_seconds(eqn: core.JaxprEqn, rates: Rates) -> float:
    """The seconds of an equation that is not cheap."""
    inner_seconds = [_seconds(closed, rates) for closed in _jaxpr.inner_jaxprs(eqn)]
    if not inner_seconds:
        num_bytes = sum(_touched(eqn).values())
        return rates.seconds(_flops.count_eqn_flops(eqn), num_bytes)
    if eqn.primitive.name == "scan":
        return eqn.params["length"] * sum(inner_seconds)
    if eqn.primitive.name == "cond":
        return max(inner_seconds)
    return sum(inner_seconds)


def _peak_bytes(jaxpr: core.Jaxpr) -> int:
    """The most bytes that are alive at once, besides inputs and results."""
    outer_vars = _jaxpr.variables([*jaxpr.outvars, *jaxpr.invars, *jaxpr.constvars])
    last_use: dict[core.Var, int] = {}  # variable -> index of an equation
    for index, eqn in enumerate(jaxpr.eqns):
        for var in _jaxpr.variables([*eqn.invars, *eqn.outvars]) - outer_vars:
            last_use[var] = index
    freed: dict[int, list[core.Var]] = {}  # index of an equation -> variables
    for var, index in last_use.items():
        freed.setdefault(index, []).append(var)

    live_bytes = 0
    peak_bytes = 0
    for index, eqn in enumerate(jaxpr.eqns):
        new_vars = [var for var in eqn.outvars if var in last_use]
        live_bytes += sum(map(_min_cut.nbytes, new_vars))
        peak_bytes = max(peak_bytes, live_bytes + _inner_bytes(eqn))
        live_bytes -= sum(map(_min_cut.nbytes, freed.get(index, ())))
    return peak_bytes


def _inner_bytes(eqn: core.JaxprEqn) -> int:
    """The bytes that a call, a branch or a turn of a loop needs."""
    inner_jaxprs = [closed.jaxpr for closed in _jaxpr.inner_jaxprs(eqn)]
    peak_bytes = max(map(_peak_bytes, inner_jaxprs), default=0)
    if eqn.primitive.name in ("scan", "while"):
        # The results of a turn are written beside its arguments.
        for jaxpr in inner_jaxprs:
            peak_bytes += sum(map(_min_cut.nbytes, jaxpr.outvars))
    return peak_bytes
