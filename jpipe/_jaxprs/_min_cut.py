"""The fewest bytes from which the rest of a computation can be had cheaply.

A program that is cut in two hands values from the first half to the second. What is
cheap to compute need not pass: a bias added, a mask, a norm of what passes anyway.
Which values pass is a minimum cut: from what must be computed once, through equations
that may be computed again, to what the second half reads.

XLA computes a cheap value inside each loop that reads it, from what passed. Along a
chain, such as ``x += scale * tanh(...)`` in each of ``n`` layers, that would be work of
``n ** 2 / 2``: each layer's ``x`` a sum of its own, over all ``tanh`` before it. So a
few values within such a chain pass too: see `_links`.

References:
  Dinitz, *Algorithm for solution of a problem of maximum flow in networks with power
  estimation*, 1970, as `scipy.sparse.csgraph.maximum_flow` has it.
"""

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend import core
from scipy.sparse import csgraph, csr_array

from . import _jaxpr
from ._primitives import CALLS, CHEAP, DRAWS, MIDDLING, PRODUCTS

# Of this much all capacities together: SciPy counts in 32 bits.
_TOTAL = 2**29
# Of so many sums in a row one is stored. Few are read by each loop then; where a layer
# stores one array and is eight wide, 8 % more is stored, and its backward takes 1.6
# times the operations of one that computes nothing again.
_CHAIN = 12


def is_cheap(eqn: core.JaxprEqn, others: bool = False) -> bool:
    """Whether computing an equation again takes less than reading what it made.

    Args:
      eqn: the equation.
      others: whether sorts and the like are too.
    """
    name = eqn.primitive.name
    if name in CALLS:
        inside = (
            inner for closed in _jaxpr.inner_jaxprs(eqn) for inner in closed.jaxpr.eqns
        )
        return all(is_cheap(inner, others) for inner in inside)
    cheap = name in CHEAP or (others and name in MIDDLING)
    return cheap and not eqn.effects


class NoCutError(Exception):
    """Something that is wanted follows from nothing that may be stored."""


def find_residuals(
    closed: core.ClosedJaxpr,
    wanted: Sequence[Any],
    constant: Sequence[bool],
    stored: Sequence[bool],
    named: Container[core.Var] | None = None,
) -> list[core.Var]:
    """The values to store so that others follow from them by cheap equations.

    Random bits are as dear as products: of a dropout a mask is stored, a byte for each
    element. So are sorts and the like, unless more would be stored for them than
    products, random bits and inputs are.

    Args:
      closed: the jaxpr that computes all.
      wanted: variables of it that are needed again.
      constant: which of its inputs are such that what follows from them alone may be
        computed again, whatever computes it.
      stored: which of its other inputs are stored anyway.
      named: the results that may be stored; default: all.

    Returns:
      The results of equations among those of the fewest bytes, which inputs may be too;
      of as few, those that leave the least to compute. And the links of long chains.

    Raises:
      NoWayError: if there is none.
    """
    jaxpr = closed.jaxpr
    costly = _jaxpr.depending_on(closed, [not yes for yes in constant])
    at_hand = {var for var, yes in zip(jaxpr.invars, stored, strict=True) if yes}
    sizes = {v: 0 if v in at_hand else nbytes(v) for v in _made(jaxpr) if v in costly}
    if named is not None:
        may = {*jaxpr.invars, *(var for var in sizes if var in named)}
        sizes = {var: size if var in may else None for var, size in sizes.items()}

    def size(variables: Iterable[core.Var]) -> int:
        return sum(sizes[var] or 0 for var in variables)

    found = _cut(jaxpr, sizes, wanted)
    if size(found) > size(products(jaxpr, wanted, PRODUCTS | DRAWS) & costly):
        found = _cut(jaxpr, sizes, wanted, others=True)
    found = _with_links(jaxpr, sizes, wanted, found)
    inputs = {*jaxpr.invars}
    return [var for var in found if var not in inputs]


def products(
    jaxpr: core.Jaxpr, wanted: Sequence[Any], names: Container[str] = PRODUCTS
) -> set[core.Var]:
    """Results of products, and inputs, from which all follows without a product.

    Args:
      jaxpr: what computes all.
      wanted: what is needed.
      names: the primitives that count as products.
    """
    needed, found = _jaxpr.variables(wanted), set()
    for eqn in reversed(jaxpr.eqns):
        made = needed.intersection(eqn.outvars)
        if made and eqn.primitive.name in names:
            found |= made
        elif made:
            needed |= _jaxpr.variables(eqn.invars)
    return found | needed.intersection(jaxpr.invars)


def _cut(
    jaxpr: core.Jaxpr,
    sizes: Mapping[core.Var, int | None],
    wanted: Sequence[Any],
    others: bool = False,
) -> list[core.Var]:
    """The minimum cut between what is dear and what is wanted.

    Args:
      jaxpr: what computes all.
      sizes: the bytes of each variable, ``None`` if it must not be stored; those that
        are not in it are at hand.
      wanted: what is needed again.
      others: see `is_cheap`.
    """
    starts = {var for var in jaxpr.invars if var in sizes}
    reads: list[tuple[core.Var, core.Var]] = []
    for eqn in jaxpr.eqns:
        results = [var for var in eqn.outvars if var in sizes]
        if not is_cheap(eqn, others):
            starts.update(results)
            continue
        for var in _jaxpr.variables(eqn.invars) & sizes.keys():
            reads += [(var, result) for result in results]
    ends = _jaxpr.variables(wanted) & sizes.keys()
    return _minimum_cut(sizes=sizes, reads=reads, starts=starts, ends=ends)


def _with_links(
    jaxpr: core.Jaxpr,
    sizes: Mapping[core.Var, int | None],
    wanted: Sequence[Any],
    stored: Sequence[core.Var],
) -> Sequence[core.Var]:
    """Stored variables, and the links of long chains that are computed from them."""
    recomputed = _computed_again(jaxpr, wanted, {*stored})
    links = _links(sizes, recomputed, {*stored})
    if not links:
        return stored
    with_links = {*stored, *links}
    read = _jaxpr.variables(wanted)
    for eqn in _computed_again(jaxpr, wanted, with_links):
        read |= _jaxpr.variables(eqn.invars)
    return [var for var in sizes if var in with_links and var in read]


def _computed_again(
    jaxpr: core.Jaxpr, wanted: Sequence[Any], stored: Container[core.Var]
) -> list[core.JaxprEqn]:
    """The equations that compute what is wanted from what is stored, in order."""
    needed = _jaxpr.variables(wanted)
    eqns: list[core.JaxprEqn] = []
    for eqn in reversed(jaxpr.eqns):
        if any(var in needed and var not in stored for var in eqn.outvars):
            eqns.append(eqn)
            needed |= _jaxpr.variables(eqn.invars)
    return eqns[::-1]


def _links(
    sizes: Mapping[core.Var, int | None],
    recomputed: Sequence[core.JaxprEqn],
    stored: Container[core.Var],
) -> list[core.Var]:
    """The values of the fewest bytes that divide long chains.

    The depth of a value is the most equations of several operands that follow each
    other between what is stored and the value. Windows of `_CHAIN` depths divide the
    values. In each window but the first and the last, the links are a minimum cut
    between where its chains begin and what the windows behind it read.

    Args:
      sizes: as in `_cut`.
      recomputed: the equations that are computed again.
      stored: what they start from.
    """
    depths: dict[core.Var, int] = {}
    starts: set[core.Var] = set()
    ends: set[core.Var] = set()
    reads: list[tuple[core.Var, core.Var]] = []
    for eqn in recomputed:
        operands = _jaxpr.variables(eqn.invars) & sizes.keys()
        results = [var for var in eqn.outvars if var in sizes and var not in stored]
        deepest = max((depths.get(var, 0) for var in operands), default=0)
        depth = deepest + 1 if len(operands) > 1 else deepest
        depths |= dict.fromkeys(results, depth)
        window = depth // _CHAIN
        if deepest // _CHAIN < window:
            starts.update(results)
        for var in operands:
            if depths.get(var, 0) // _CHAIN < window:
                ends.add(var)
            else:
                reads += [(var, result) for result in results]
    # What is in the first window is computed from what is stored, without a link.
    linked = {var: sizes[var] for var, depth in depths.items() if depth >= _CHAIN}
    try:
        return _minimum_cut(
            sizes=linked,
            reads=[(var, result) for var, result in reads if var in linked],
            starts=starts,
            ends=ends & linked.keys(),
        )
    except NoCutError:  # where not everything may be stored
        return []


def _minimum_cut(
    sizes: Mapping[core.Var, int | None],
    reads: Sequence[tuple[core.Var, core.Var]],
    starts: Iterable[core.Var],
    ends: Iterable[core.Var],
) -> list[core.Var]:
    """The variables of the fewest bytes on all ways; of as few, those nearest the ends.

    Args:
      sizes: the bytes of each variable, ``None`` if it must not be among them.
      reads: a variable, and what is computed of it.
      starts: where the ways begin.
      ends: where they end.

    Raises:
      NoWayError: if there are none.
    """
    if not ends:
        return []
    number = {var: i for i, var in enumerate(sizes)}
    count = len(number)
    source, first, sink = range(2 * count, 2 * count + 3)
    # Each variable is an edge of its size, from `i` to `count + i`.
    capacities = enumerate(_capacities(list(sizes.values())))
    edges = [(i, count + i, capacity) for i, capacity in capacities]
    edges += [(count + number[var], number[result], _TOTAL) for var, result in reads]
    # All flow goes through one edge, so that it has a place in 32 bits; it is full
    # before one of those is that may not be cut.
    edges += [(first, source, _TOTAL // 2)]
    edges += [(source, number[var], _TOTAL) for var in starts]
    edges += [(count + number[var], sink, _TOTAL) for var in ends]
    behind = _behind(edges, first, sink)
    if behind[source]:
        raise NoCutError
    return [var for var, i in number.items() if not behind[i] and behind[count + i]]


def _made(jaxpr: core.Jaxpr) -> list[core.Var]:
    return [*jaxpr.invars, *(var for eqn in jaxpr.eqns for var in eqn.outvars)]


def nbytes(var: Any) -> int:
    """The bytes of a variable, of nothing one."""
    return max(_jaxpr.nbytes(var.aval), 1)


def total_bytes(variables: Iterable[Any]) -> int:
    """The bytes of variables, each counted once."""
    return sum(map(nbytes, dict.fromkeys(variables)))


def _capacities(sizes: Sequence[int | None]) -> list[int]:
    """Sizes in a unit in which their sum has a place; beyond it what may not be."""
    known = [size for size in sizes if size]
    # A unit that all are multiples of, if it is large enough.
    unit = max(math.gcd(*known), math.ceil(3 * sum(known) / _TOTAL), 1)
    return [_TOTAL if size is None else math.ceil(size / unit) for size in sizes]


def _behind(edges: Sequence[tuple[int, int, int]], source: int, sink: int) -> Any:
    """Which nodes are behind the minimum cut that is nearest to the sink."""
    rows, columns, capacities = np.array(edges, np.int32).T
    size = max(source, sink) + 1
    graph = csr_array((capacities, (rows, columns)), (size, size), dtype=np.int32)
    flow = csgraph.maximum_flow(graph, source, sink).flow
    # From the sink against the edges on which more could flow.
    left = (graph - flow).T.tocsr()
    left.eliminate_zeros()
    reached = csgraph.breadth_first_order(left, sink, return_predecessors=False)
    behind = np.zeros(size, bool)
    behind[reached] = True
    return behind
