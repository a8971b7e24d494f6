"""What comes into a mini-batch: weights at hand, micro-batches, numbers for draws."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from .._functions import _microbatch
from .._functions._batch import Batch
from .._functions._task import Task
from .._instructions._graph import Graph, Place, Value
from .._instructions._sharding import cuts
from .._jaxprs._function import Function
from ._pipe import Pipe

Values = list[Value]


class Incoming:
    """What the actions of a mini-batch are given, each where it is read.

    Args:
      graph: where it is written.
      pipe: the stages.
      batch: the mini-batch.
      rngs: the keys of the step.
    """

    def __init__(
        self, graph: Graph, pipe: Pipe, batch: Batch, rngs: Sequence[Value]
    ) -> None:
        self._graph = graph
        self._pipe = pipe
        self._batch = batch
        self._rngs = rngs
        self._is_mapped = batch.num_shards > 1

    def weights(self, variables: Sequence[Value]) -> list[Value]:
        """All variables as actions read them.

        What shards have a part of is gathered here, once in a step; or by each program
        that reads it.
        """
        graph, found = self._graph, list(variables)
        if self._pipe.gather == "microbatch":
            return found
        shardings = graph.shardings
        apart = [i for i, v in enumerate(variables) if not shardings[v].is_gathered]
        for place in dict.fromkeys(graph.places[variables[i]] for i in apart):
            own = [i for i in apart if graph.places[variables[i]] == place]
            reads = [variables[i] for i in own]
            specs = [graph.specs[v] for v in reads]
            whole = [shardings[v].gathered() for v in reads]
            gather = Function("gather", lambda *leaves: leaves, specs)
            for i, value in zip(
                own, graph.call(gather, place, reads, how=whole), strict=True
            ):
                found[i] = value
        return found

    def split(
        self, leaves: Sequence[Value], axes: Sequence[int | None], stage: int
    ) -> list[Values]:
        """The leaves of each micro-batch where a stage reads them.

        A leaf without a batch axis is the same in every micro-batch, not a copy.
        """
        graph, place = self._graph, self._pipe.place(stage)
        pairs = list(zip(leaves, axes, strict=True))
        whole = [v if a is not None else graph.at(v, place) for v, a in pairs]
        cut = [(v, a) for v, a in pairs if a is not None]
        sizes = self._batch.sizes
        if not cut:
            return [whole for _ in sizes]
        if self._is_mapped:
            parts = self._split_by_shards(cut, place)
        elif len(sizes) == 1:
            return [[graph.at(value, place) for value in leaves]]
        else:
            split = _microbatch.splitter([a for _, a in cut], sizes)
            local = [graph.at(v, place) for v, _ in cut]
            function = Function.like("split", split, *[graph.specs[v] for v in local])
            parts = graph.call(function, place, local)
        rest = iter(parts)
        return [
            [v if a is None else next(rest) for v, a in zip(whole, axes, strict=True)]
            for _ in sizes
        ]

    def _split_by_shards(
        self, leaves: Sequence[tuple[Value, int]], place: Place
    ) -> Values:
        """The leaves of each micro-batch, one after the other, spread over shards."""
        graph, sizes = self._graph, self._batch.sizes
        several = [cuts(axis, sizes, self._batch.num_shards) for _, axis in leaves]
        parts = [
            [graph.cut(value, place, cut) for cut in own]
            for (value, _), own in zip(leaves, several, strict=True)
        ]
        local = [value for own in parts for value in own]
        rows = _microbatch.rows(len(leaves), len(parts[0]))
        function = Function.like("split", rows, *[graph.specs[v] for v in local])
        return graph.call(function, place, local, mapped=True)

    def extra(self, task: Task, m: int, targets: Values) -> Values:
        """What a micro-batch brings to a stage beside its input: see `_task.EXTRA`."""
        place, sizes = self._pipe.place(task.index, m), self._batch.sizes
        found: Values = []
        for name in task.extra:
            if name == "targets":
                found += targets
            elif name == "rngs":
                found += self._rngs
            elif name == "numbers":
                found.append(self._numbers(m, task.stage.first, place))
            else:
                part = sizes[m] / sum(sizes) / self._batch.num_shards
                share = np.asarray(part, jnp.result_type(float))
                found.append(self._graph.constant(share, place))
        return found

    def _numbers(self, m: int, first: int, place: Place) -> Value:
        """The number of a micro-batch, of shards those of each, and of a layer."""
        if not self._is_mapped:
            return self._graph.constant(np.array([m, first], np.int32), place)
        shards = self._batch.num_shards
        each = [[m * shards + d, first] for d in range(shards)]
        return self._graph.constant(np.array(each, np.int32), place, stacked=True)
