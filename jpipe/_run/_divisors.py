"""By what the backwards of a weighted loss divide.

On one device total / weight is differentiated, and cotangents are as small as that
makes them. So each backward divides by the sum of all weights, where targets alone tell
it. Else the gradients are divided at the end.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from .._functions._batch import Batch
from .._instructions._graph import Graph, Place, Value
from .._jaxprs._function import Function
from ._sums import apart

Values = list[Value]
# The weights of so many micro-batches are added by one call.
_AT_ONCE = 16


def known(
    graph: Graph,
    place: Place,
    batch: Batch,
    found: Sequence[Function | None],
    given: Sequence[Values],
) -> Values:
    """The sum of all weights, where what is given alone tells it; else nothing.

    Args:
      graph: where it is computed.
      place: that of the last stage.
      batch: the mini-batch.
      found: what gives the weight of each micro-batch; ``None`` where it reads more.
      given: what that reads, of each micro-batch.
    """
    weights = [weight for weight in found if weight]
    if len(weights) < len(found) or not weights:
        return []
    functions, specs, sizes = dict[Any, Function](), weights[0].results, batch.sizes
    total = [graph.constant(np.zeros((), specs[0].dtype), place)]
    for begin in range(0, len(sizes), _AT_ONCE):
        part = slice(begin, begin + _AT_ONCE)
        pairs = list(zip(given[part], weights[part], strict=True))
        rows = [[leaves[i] for i in weight.reads or ()] for leaves, weight in pairs]
        if sizes[part] not in functions:
            add = _adding(weights[part], apart(graph, batch, rows), batch.num_shards)
            functions[sizes[part]] = Function("weights", add, specs)
        reads = [*total, *(value for row in rows for value in row)]
        total = graph.call(functions[sizes[part]], place, reads)
    return total


def _adding(
    weights: Sequence[Function],
    each: Callable[[Sequence[jax.Array]], list[list[jax.Array]]],
    num_shards: int,
) -> Callable[..., list[Any]]:
    """``(total, *leaves of micro-batches) -> total``, with the weight of each."""

    def add(total: jax.Array, *leaves: jax.Array) -> list[Any]:
        runs = [weight.run for weight in weights for _ in range(num_shards)]
        parts = zip(runs, each(leaves), strict=True)
        return [sum((run(*part)[0] for run, part in parts), total)]

    return add
