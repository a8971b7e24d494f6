"""The fewest bytes from which the rest of a computation can be had cheaply.

A program that is cut in two hands values from the first half to the second. What is
cheap to compute need not pass: a bias added, a mask, a norm of what passes anyway.
Which values pass is a minimum cut of a graph whose nodes are variables, with an edge
from each operand of a cheap equation to each result:

    starts    inputs, and results of expensive equations: computed once
    ends      the variables that the second half needs
    size      the bytes of a variable; none if it is stored anyway
    the cut   the *stored* variables, one on each path from a start to an end

XLA computes a cheap value inside each loop that reads it, from what passed. Along a
chain, such as ``x += scale * tanh(...)`` in each of ``n`` layers, that would be work of
``n ** 2 / 2``: each layer would add up all ``tanh`` before it. So a few values within
such a chain pass too, its *links*: see `_links`.

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
from ._primitives import CALLS, CHEAP, DRAWS, PRODUCTS, SORTS

# The sum of all capacities: SciPy counts in 32 bits.
_TOTAL = 2**29
# One of so many sums in a row is stored: more often would cost bytes, more rarely
# operations, and time to compile. Of `x += tanh(tanh(x) @ w)`, eight wide, in two
# stages of 96 layers and two micro-batches of 4096 rows, a gradient took 110 to 140 ms
# where one of 4, 8, 12 or 24 was stored, and 256 ms where none was; the first call 6,
# 7, 9, 20 and 49 s (``python -m benchmarks.overhead.constants _CHAIN``, two shared
# cores, 2026-11-29).
_CHAIN = 12


def is_cheap(eqn: core.JaxprEqn, *, sorts_are_cheap: bool = False) -> bool:
    """True if computing an equation again takes less time than reading its results.

    Four things depend on it: what a backward computes again (here), what is copied into
    each stage that reads it (`_trace/_traced_function`), whether a scan of weight
    gradients is worth a second half (`_stage/_split_backward`), and whether an estimate
    counts bytes or operations (`planning/_estimate`).

    Args:
      eqn: the equation.
      sorts_are_cheap: True if sorts and cumulative sums count as cheap.
    """
    name = eqn.primitive.name
    if name in CALLS:
        return all(
            is_cheap(inner_eqn, sorts_are_cheap=sorts_are_cheap)
            for inner_eqn in _jaxpr.inner_eqns(eqn)
        )
    cheap = name in CHEAP or (sorts_are_cheap and name in SORTS)
    return cheap and not eqn.effects


class NoCutError(Exception):
    """A needed variable follows from nothing that may be stored."""


def find_residuals(
    closed: core.ClosedJaxpr,
    needed: Sequence[Any],
    *,
    is_constant: Sequence[bool],
    is_stored: Sequence[bool],
    storable: Container[core.Var] | None = None,
) -> list[core.Var]:
    """The values to store so that others follow from them by cheap equations.

    Random bits are as expensive as products: of a dropout a mask is stored, a byte for
    each element. So are sorts and the like, unless more would be stored for them than
    products, random bits and inputs are.

    Args:
      closed: the jaxpr that computes all.
      needed: the variables of it that are needed again.
      is_constant: one bool per input; True if all that follows from such inputs alone
        may be computed again, at any cost.
      is_stored: one bool per input; True if it is stored anyway.
      storable: the results of equations that may be stored; ``None``: all.

    Returns:
      The results of equations in the set of the fewest bytes, which may have inputs
      too; of several sets the one that leaves the least to compute. And the links of
      long chains.

    Raises:
      NoCutError: if there is no such set.
    """
    jaxpr = closed.jaxpr
    varying = _jaxpr.depending_on(closed, [not constant for constant in is_constant])
    invars = zip(jaxpr.invars, is_stored, strict=True)
    stored_inputs = {var for var, stored in invars if stored}

    # variable that follows from more than constants -> the bytes that storing it costs;
    # ``None``: may not be stored
    sizes: dict[core.Var, int | None] = {}
    for var in [*jaxpr.invars, *_jaxpr.outvars_of(jaxpr.eqns)]:
        if var in varying:
            sizes[var] = 0 if var in stored_inputs else nbytes(var)
    if storable is not None:
        results = sizes.keys() - {*jaxpr.invars}
        sizes |= {var: None for var in results if var not in storable}

    def size(variables: Iterable[core.Var]) -> int:
        return sum(sizes[var] or 0 for var in variables)

    stored_vars = _cut(jaxpr, sizes, needed)
    # These suffice where sorts are computed again; a larger cut is so for the sorts.
    without_sorts = find_products(jaxpr, needed, PRODUCTS | DRAWS) & varying
    if size(stored_vars) > size(without_sorts):
        stored_vars = _cut(jaxpr, sizes, needed, sorts_are_cheap=True)
    stored_vars = _with_links(jaxpr, sizes, needed, stored_vars)
    inputs = {*jaxpr.invars}
    return [var for var in stored_vars if var not in inputs]


def find_products(
    jaxpr: core.Jaxpr, needed: Sequence[Any], names: Container[str] = PRODUCTS
) -> set[core.Var]:
    """Finds results of products, and inputs, from which all follows without a product.

    Args:
      jaxpr: the jaxpr that computes all.
      needed: the variables that are needed.
      names: the primitives that count as products.
    """
    read = _jaxpr.variables(needed)
    product_results = set[core.Var]()
    for eqn in reversed(jaxpr.eqns):
        read_results = read.intersection(eqn.outvars)
        if read_results and eqn.primitive.name in names:
            product_results |= read_results
        elif read_results:
            read |= _jaxpr.variables(eqn.invars)
    return product_results | read.intersection(jaxpr.invars)


def _cut(
    jaxpr: core.Jaxpr,
    sizes: Mapping[core.Var, int | None],
    needed: Sequence[Any],
    *,
    sorts_are_cheap: bool = False,
) -> list[core.Var]:
    """The minimum cut between what is computed once and what is needed: see the head.

    Args:
      jaxpr: the jaxpr that computes all.
      sizes: the bytes of each variable, ``None`` if it must not be stored; variables
        that are not in it need not be.
      needed: the variables that are needed again.
      sorts_are_cheap: see `is_cheap`.
    """
    starts = {var for var in jaxpr.invars if var in sizes}
    reads: list[tuple[core.Var, core.Var]] = []
    for eqn in jaxpr.eqns:
        results = [var for var in eqn.outvars if var in sizes]
        if not is_cheap(eqn, sorts_are_cheap=sorts_are_cheap):
            starts.update(results)
            continue
        for var in _jaxpr.variables(eqn.invars) & sizes.keys():
            reads += [(var, result) for result in results]
    ends = _jaxpr.variables(needed) & sizes.keys()
    return _minimum_cut(sizes=sizes, reads=reads, starts=starts, ends=ends)


def _with_links(
    jaxpr: core.Jaxpr,
    sizes: Mapping[core.Var, int | None],
    needed: Sequence[Any],
    stored: Sequence[core.Var],
) -> Sequence[core.Var]:
    """Stored variables, and the links of long chains that are computed from them."""
    recomputed = _jaxpr.needed_eqns(jaxpr, needed, stored)
    links = _links(sizes, recomputed, {*stored})
    if not links:
        return stored
    with_links = {*stored, *links}
    read = _jaxpr.variables(needed)
    for eqn in _jaxpr.needed_eqns(jaxpr, needed, [*with_links]):
        read |= _jaxpr.variables(eqn.invars)
    return [var for var in sizes if var in with_links and var in read]


def _links(
    sizes: Mapping[core.Var, int | None],
    recomputed: Sequence[core.JaxprEqn],
    stored: Container[core.Var],
) -> list[core.Var]:
    """The values of the fewest bytes that divide long chains.

    The depth of a value is the length of the longest chain of equations with several
    operands between stored variables and the value. Windows of `_CHAIN` depths divide
    the values. In each window but the first and the last, the links are a minimum cut
    between the starts of its chains and the values that later windows read.

    Args:
      sizes: as in `_cut`.
      recomputed: the equations that are computed again.
      stored: the variables that they start from.
    """
    # variable -> its depth; stored variables have depth 0 and are not in it
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
    # Values in the first window are computed from stored ones, without a link.
    linked = {var: sizes[var] for var, depth in depths.items() if depth >= _CHAIN}
    try:
        return _minimum_cut(
            sizes=linked,
            reads=[(var, result) for var, result in reads if var in linked],
            starts=starts,
            ends=ends & linked.keys(),
        )
    except NoCutError:  # since not all variables may be stored
        return []


def _minimum_cut(
    sizes: Mapping[core.Var, int | None],
    reads: Sequence[tuple[core.Var, core.Var]],
    starts: Iterable[core.Var],
    ends: Iterable[core.Var],
) -> list[core.Var]:
    """The fewest bytes of variables that lie on each path from a start to an end.

    Of several such sets the one nearest the ends.

    Args:
      sizes: the bytes of each variable, ``None`` if it must not be in the cut.
      reads: pairs of a variable and a result that is computed from it.
      starts: the variables where paths begin.
      ends: the variables where they end.

    Raises:
      NoCutError: if there is no such set.
    """
    if not ends:
        return []
    # Each variable is an edge of its size, from node `i` to node `num_vars + i`.
    node = {var: i for i, var in enumerate(sizes)}
    num_vars = len(node)
    source, before_source, sink = range(2 * num_vars, 2 * num_vars + 3)
    capacities = enumerate(_capacities(list(sizes.values())))
    edges = [(i, num_vars + i, capacity) for i, capacity in capacities]
    edges += [(num_vars + node[var], node[result], _TOTAL) for var, result in reads]
    # All flow goes through one edge, so that it fits into 32 bits. That edge is full
    # before one of `_TOTAL` is: if it is the cut, each other cut has one of `_TOTAL`.
    edges += [(before_source, source, _TOTAL // 2)]
    edges += [(source, node[var], _TOTAL) for var in starts]
    edges += [(num_vars + node[var], sink, _TOTAL) for var in ends]

    is_behind = _nodes_behind_cut(edges, before_source, sink)
    if is_behind[source]:
        raise NoCutError
    return [
        var for var, i in node.items() if not is_behind[i] and is_behind[num_vars + i]
    ]


def nbytes(var: Any) -> int:
    """The bytes of a variable; one if it has no elements."""
    return max(_jaxpr.nbytes(var.aval), 1)


def total_bytes(variables: Iterable[Any]) -> int:
    """The bytes of variables, each counted once."""
    return sum(map(nbytes, dict.fromkeys(variables)))


def _capacities(sizes: Sequence[int | None]) -> list[int]:
    """Sizes in a unit in which their sum is below `_TOTAL`; `_TOTAL` for ``None``."""
    positive_sizes = [size for size in sizes if size]
    # The unit divides all sizes, if such a unit is large enough.
    unit = max(
        math.gcd(*positive_sizes), math.ceil(3 * sum(positive_sizes) / _TOTAL), 1
    )
    return [_TOTAL if size is None else math.ceil(size / unit) for size in sizes]


def _nodes_behind_cut(
    edges: Sequence[tuple[int, int, int]], source: int, sink: int
) -> Any:
    """One bool per node; True behind the minimum cut that is nearest to the sink.

    Args:
      edges: ``(from node, to node, capacity)``.
      source: the node where all flow begins.
      sink: the node where it ends.
    """
    tails, heads, capacities = np.array(edges, np.int32).T
    num_nodes = max(source, sink) + 1
    shape = (num_nodes, num_nodes)
    graph = csr_array((capacities, (tails, heads)), shape, dtype=np.int32)
    flow = csgraph.maximum_flow(graph, source, sink).flow

    # From the sink against the edges on which more could flow.
    residual_graph = (graph - flow).T.tocsr()
    residual_graph.eliminate_zeros()
    reached = csgraph.breadth_first_order(
        residual_graph, sink, return_predecessors=False
    )
    is_behind = np.zeros(num_nodes, bool)
    is_behind[reached] = True
    return is_behind
