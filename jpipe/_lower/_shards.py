"""Values of all shards, in functions of a whole place.

Where the examples of a stage are spread over shards, the results of its shards are
stacked: a function of the whole place reads them with a leading axis of shards.
"""

from typing import Any

import jax

from .._instructions._graph import Graph, Value
from .._jaxprs import _jaxpr


def spec_of(graph: Graph, value: Value, num_shards: int) -> Any:
    """The spec of a value, with an axis of shards if it is stacked."""
    spec = _jaxpr.spec(graph.specs[value])
    if not graph.shardings[value].stacked:
        return spec
    return spec.update(shape=(num_shards, *spec.shape))


def unstack(array: jax.Array, num_shards: int, *, is_stacked: bool) -> list[jax.Array]:
    """The array of each shard; one that is not stacked is the same for all."""
    if not is_stacked:
        return [array] * num_shards
    return [array[shard] for shard in range(num_shards)]
