"""Sums over micro-batches, of flat leaves."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._functions._batch import Batch
from .._instructions._graph import Graph, Value

Leaves = list[jax.Array]


def zeros(specs: Sequence[Any]) -> Callable[[], Leaves]:
    """Sums of nothing."""
    return lambda: [jnp.zeros(spec.shape, spec.dtype) for spec in specs]


def apart(
    graph: Graph, batch: Batch, rows: Sequence[Sequence[Value]]
) -> Callable[[Sequence[jax.Array]], list[list[jax.Array]]]:
    """``leaves of rows -> those of each shard of each``.

    A row that holds what a stage was given, such as one of its weights, may have
    leaves that are not stacked: they are the same for all shards.
    """
    stacked = [[graph.shardings[value].stacked for value in row] for row in rows]

    def taken(leaves: Sequence[jax.Array]) -> list[list[jax.Array]]:
        rest = iter(leaves)
        each = [[(next(rest), yes) for yes in row] for row in stacked]
        return [
            [leaf[d] if yes else leaf for leaf, yes in row]
            for row in each
            for d in range(batch.num_shards)
        ]

    return taken
