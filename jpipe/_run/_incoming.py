"""What comes into a mini-batch: weights at hand, and its micro-batches."""

from collections.abc import Sequence

import numpy as np

from .._functions import _microbatch
from .._functions._batch import Batch
from .._instructions._graph import Graph, Place, Value
from .._instructions._sharding import Cut
from .._jaxprs._function import Function
from ._pipe import Pipe

Values = list[Value]
# So many micro-batches are cut by one call.
_AT_ONCE = 16


class Incoming:
    """What the actions of a mini-batch are given, each where it is read.

    Args:
      graph: where it is written.
      pipe: the stages.
      batch: the mini-batch.
    """

    def __init__(self, graph: Graph, pipe: Pipe, batch: Batch) -> None:
        self._graph = graph
        self._pipe = pipe
        self._batch = batch
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
            numbers = [i for i in apart if graph.places[variables[i]] == place]
            reads = [variables[i] for i in numbers]
            specs = [graph.specs[v] for v in reads]
            whole = [shardings[v].gathered() for v in reads]
            gather = Function("gather", lambda *leaves: leaves, specs)
            for i, value in zip(
                numbers, graph.call(gather, place, reads, shardings=whole), strict=True
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
        if len(sizes) == 1 and not self._is_mapped:
            return [[graph.at(value, place) for value in leaves]]
        rest = iter(self._parts(cut, place))
        return [
            [v if a is None else next(rest) for v, a in zip(whole, axes, strict=True)]
            for _ in sizes
        ]

    def _parts(self, leaves: Sequence[tuple[Value, int]], place: Place) -> Values:
        """The leaves of each micro-batch, one after the other."""
        graph, shards = self._graph, self._batch.num_shards
        parts: Values = []
        for group in _microbatch.groups(self._batch.sizes):
            if self._is_mapped:
                start = group.start * shards
                cuts = [
                    Cut(axis, start, group.number, group.size) for _, axis in leaves
                ]
                pairs = zip(leaves, cuts, strict=True)
                local = [graph.cut(value, place, cut) for (value, _), cut in pairs]
            else:
                local = [graph.at(value, place) for value, _ in leaves]
            parts += self._parts_of(group, local, [axis for _, axis in leaves], place)
        return parts

    def _parts_of(
        self, group: _microbatch.Group, local: Values, axes: list[int], place: Place
    ) -> Values:
        """The same of micro-batches of one size.

        XLA takes longer for each part that a program makes: many are cut by several
        calls of one that makes a few.
        """
        graph, stacked = self._graph, self._is_mapped
        first, step = (0, 1) if stacked else (group.start, group.size)
        functions: dict[int, Function] = {}
        parts: Values = []
        for begin in range(0, group.number, _AT_ONCE):
            number = min(group.number - begin, _AT_ONCE)
            start = graph.constant(np.array(first + begin * step, np.int32), place)
            reads = [start, *local]
            if number not in functions:
                split = _microbatch.splitter(axes, group.size, number, stacked)
                specs = [graph.specs[value] for value in reads]
                functions[number] = Function.like("split", split, *specs)
            parts += graph.call(functions[number], place, reads, mapped=stacked)
        return parts
