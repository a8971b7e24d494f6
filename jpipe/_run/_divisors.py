"""By what the backwards of a weighted loss divide.

On one device total / weight is differentiated, and cotangents are as small as that
makes them. So each backward divides by the sum of all weights, where targets alone tell
it. Else it divides by a guess of that sum, its own weight times the number of
micro-batches; what it adds to the gradients is multiplied by the guess, and the
gradients are divided by the sum at the end.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._functions._batch import Batch
from .._instructions._graph import Graph, Value
from .._jaxprs._function import Function
from ._pipe import Pipe
from ._totals import apart
from ._work import Works

Values = list[Value]


def known(
    graph: Graph, pipe: Pipe, batch: Batch, works: Works, targets: Sequence[Values]
) -> Values:
    """The sum of all weights, where targets alone tell it; else nothing.

    Args:
      graph: where it is computed.
      pipe: the stages.
      batch: the mini-batch.
      works: what each stage does on each micro-batch.
      targets: the leaves of each micro-batch, on the last stage.
    """
    last = len(pipe.stages) - 1
    divisors = works.task(last).divisors
    if not divisors or batch.num_parts == 1:
        return []
    found = [works.derivatives(last, m).weight for m in range(len(batch.sizes))]
    weights = [weight for weight in found if weight]
    if len(weights) < len(found):
        return []
    rows = [
        [leaves[i] for i in weight.reads or ()]
        for leaves, weight in zip(targets, weights, strict=True)
    ]
    each, shards = apart(graph, batch, rows), range(batch.num_shards)

    def add(*leaves: jax.Array) -> list[Any]:
        runs = [weight.run for weight in weights for _ in shards]
        parts = zip(runs, each(leaves), strict=True)
        return [sum(run(*part)[0] for run, part in parts)]

    reads = [value for row in rows for value in row]
    return graph.call(Function("weights", add, divisors), pipe.place(last), reads)


def guess(works: Works, batch: Batch) -> Function | None:
    """``weight -> guess`` of the sum of weights; never zero, as one divides by it.

    ``None`` where the weight is the sum.
    """
    count = batch.num_parts
    if count == 1:
        return None

    def run(weight: jax.Array) -> list[jax.Array]:
        return [count * jnp.where(weight == 0, 1, weight)]

    return Function("guess", run, works.task(works.num_stages - 1).divisors)
