"""The loss of the whole mini-batch, and its cotangents: one call, once per step.

    whole_batch:  weights, operands of marks of all micro-batches
                  -> loss, aux, gradients of weights, cotangents of these operands

It runs on the last device, behind all forwards and before all backwards. The operands
are joined inside of the function that is differentiated, so that the cotangents come
out as the operands went in: micro-batch by micro-batch, shard by shard.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._instructions._graph import Graph, Place, Value
from .._instructions._instruction import WHOLE_BATCH
from .._instructions._sharding import STACKED, WHOLE, Sharding
from .._jaxprs import _inlining, _jaxpr
from .._jaxprs._computation import Computation
from .._trace._traced_function import Tail
from ._join import join_marked
from ._shards import spec_of, unstack

Values = list[Value]


class TailOutputs(NamedTuple):
    """The results of the tail. Leaves are values of a graph, or arrays.

    Attributes:
      loss: the loss of the mini-batch.
      aux: the leaves of aux.
      grads: the gradients of its weights that are trained.
      cotangents: a list of cotangents, one for each micro-batch, for each joined array
        that has any.
    """

    loss: Any
    aux: list[Any]
    grads: list[Any]
    cotangents: list[list[Any]]


def write_tail(
    graph: Graph,
    tail: Tail,
    *,
    place: Place,
    weights: Values,
    is_trained: Sequence[bool],
    columns: Sequence[Values],
    has_cotangent: Sequence[bool],
    sizes: Sequence[int],
    num_shards: int,
) -> TailOutputs:
    """Writes the tail and its backward into a graph.

    Args:
      graph: the graph.
      tail: the tail.
      place: the place in which it runs.
      weights: the weights that it reads.
      is_trained: one bool per weight; True if it has a gradient.
      columns: for each array that is joined, its values for all micro-batches.
      has_cotangent: one bool per array; True if it has a cotangent.
      sizes: the number of examples of each micro-batch.
      num_shards: the number of shards of each micro-batch.
    """
    weights = [graph.bring(value, place) for value in weights]
    local_columns = list[Values]()
    is_stacked = list[list[bool]]()
    for column in columns:
        local_columns.append([graph.bring(value, place) for value in column])
        is_stacked.append([graph.shardings[value].stacked for value in column])
    shard_sizes = list[int]()  # shards count as micro-batches
    for size in sizes:
        shard_sizes += [size] * num_shards

    def join(columns: Sequence[Sequence[jax.Array]]) -> list[jax.Array]:
        joined = list[jax.Array]()
        for column, flags, axis in zip(columns, is_stacked, tail.axes, strict=True):
            parts = list[jax.Array]()
            for array, flag in zip(column, flags, strict=True):
                parts += unstack(array, num_shards, is_stacked=flag)
            joined.append(join_marked(parts, axis, shard_sizes))
        return joined

    def run(weights: list[Any], columns: list[list[Any]]) -> TailOutputs:
        def loss_of(
            trained_weights: list[Any], differentiated: list[list[Any]]
        ) -> tuple[Any, list[Any]]:
            all_weights = _jaxpr.replace_leaves(weights, trained_weights, is_trained)
            all_columns = _jaxpr.replace_leaves(columns, differentiated, has_cotangent)
            loss, *aux = _jaxpr.as_traced(tail.closed)(*all_weights, *join(all_columns))
            return loss, aux

        loss, pullback, aux = jax.vjp(
            loss_of,
            list(itertools.compress(weights, is_trained)),
            list(itertools.compress(columns, has_cotangent)),
            has_aux=True,
        )
        grads, cotangents = pullback(jnp.ones_like(loss))
        return TailOutputs(loss, aux, grads, cotangents)

    operands, operand_tree = jax.tree.flatten((weights, local_columns))
    operand_specs = [spec_of(graph, value, num_shards) for value in operands]
    closed, outputs = _inlining.trace(
        lambda *leaves: run(*operand_tree.unflatten(leaves)), *operand_specs
    )

    def sharding_of(value: Value) -> Sharding:
        return STACKED if graph.shardings[value].stacked else WHOLE

    shardings = TailOutputs(
        loss=WHOLE,
        aux=[WHOLE] * len(outputs.aux),
        grads=[
            graph.shardings[value].gathered()
            for value in itertools.compress(weights, is_trained)
        ],
        cotangents=[
            [sharding_of(value) for value in column]
            for column in itertools.compress(columns, has_cotangent)
        ],
    )
    values = graph.call(
        Computation.from_jaxpr(WHOLE_BATCH, closed),
        place,
        operands,
        shardings=jax.tree.leaves(
            shardings, is_leaf=lambda leaf: isinstance(leaf, Sharding)
        ),
    )
    return jax.tree.structure(outputs).unflatten(values)
