"""The inputs of the actions of a step: gathered weights, and micro-batches.

batch leaf [N, ...] -- sent once to each place that reads it
  -> split: micro-batch 0 [n, ...], micro-batch 1 [n, ...], ...
"""

from collections.abc import Sequence

import numpy as np

from .._arguments import _microbatch
from .._arguments._batch import Batch
from .._instructions._graph import Graph, Place, Value
from .._instructions._sharding import MicrobatchCut
from .._jaxprs._computation import Computation
from .._partition._stage_placement import StagePlacement

Values = list[Value]
# The largest number of micro-batches that one call splits off: XLA takes longer for
# each result of a program. The first call of a tiny function of 256 micro-batches took
# 0.5, 2.1 and 9.9 s with 16, 64 and 256 in a call, and its steps as long
# (``python -m benchmarks.overhead.constants``, two shared cores, 2026-11-29).
_MICROBATCHES_PER_SPLIT = 16


class MicrobatchInputs:
    """The inputs of the actions of a mini-batch, each where it is read.

    Args:
      graph: the graph that is written.
      placement: the stages, and where they run.
      batch: the mini-batch.
    """

    def __init__(self, graph: Graph, placement: StagePlacement, batch: Batch) -> None:
        self._graph = graph
        self._placement = placement
        self._batch = batch
        self._is_mapped = batch.num_shards > 1

    def gather_weights(self, variables: Sequence[Value]) -> list[Value]:
        """Gathers variables that are cut along `DATA`; returns all variables.

        They are gathered here, once in a step; or later, by each program that reads
        them.
        """
        weights = list(variables)
        if self._placement.gather == "microbatch":
            return weights
        # place -> the indices of its variables that are cut
        cut_indices: dict[Place, list[int]] = {}
        for i, value in enumerate(variables):
            if not self._graph.shardings[value].is_gathered:
                place = self._graph.places[value]
                cut_indices.setdefault(place, []).append(i)

        for place, indices in cut_indices.items():
            reads = [variables[i] for i in indices]
            specs = [self._graph.specs[value] for value in reads]
            gathered = self._graph.call(
                Computation("gather", lambda *leaves: leaves, specs),
                place,
                reads,
                shardings=[self._graph.shardings[v].gathered() for v in reads],
            )
            for i, value in zip(indices, gathered, strict=True):
                weights[i] = value
        return weights

    def split(
        self, leaves: Sequence[Value], *, axes: Sequence[int | None], stage: int
    ) -> list[Values]:
        """The leaves of each micro-batch where a stage reads them.

        A leaf without a batch axis is the same value in every micro-batch, not a copy.

        Args:
          leaves: leaves of the mini-batch.
          axes: the batch axis of each leaf.
          stage: the stage.
        """
        place = self._placement.place_of(stage)
        sizes = self._batch.sizes
        has_axis = [axis is not None for axis in axes]
        is_whole = len(sizes) == 1 and not self._is_mapped
        if is_whole or not any(has_axis):
            whole = [self._graph.bring(value, place) for value in leaves]
            return [whole for _ in sizes]

        batched: list[tuple[Value, int]] = []
        shared: dict[int, Value] = {}  # index of a leaf without a batch axis -> value
        for i, (value, axis) in enumerate(zip(leaves, axes, strict=True)):
            if axis is None:
                shared[i] = self._graph.bring(value, place)
            else:
                batched.append((value, axis))
        parts = iter(self._parts(batched, place))
        microbatches: list[Values] = []
        for _ in sizes:
            microbatch: Values = []
            for i in range(len(leaves)):
                microbatch.append(shared[i] if i in shared else next(parts))
            microbatches.append(microbatch)
        return microbatches

    def _parts(self, leaves: Sequence[tuple[Value, int]], place: Place) -> Values:
        """The parts of leaves with a batch axis, micro-batch after micro-batch.

        Args:
          leaves: pairs of a leaf and its batch axis.
          place: the place that reads the parts.
        """
        axes = [axis for _, axis in leaves]
        parts: Values = []
        for group in _microbatch.group_by_size(self._batch.sizes):
            local: Values = []
            for value, axis in leaves:
                if self._is_mapped:
                    cut = MicrobatchCut(
                        axis=axis,
                        start=group.start * self._batch.num_shards,
                        parts=group.number,
                        size=group.size,
                    )
                    local.append(self._graph.cut(value, place, cut))
                else:
                    local.append(self._graph.bring(value, place))
            parts += self._split_group(group, local, axes, place)
        return parts

    def _split_group(
        self, group: _microbatch.SizeGroup, local: Values, axes: list[int], place: Place
    ) -> Values:
        """The parts of leaves in a place, for the micro-batches of one size.

        Many are split off by several calls of a program that returns a few.
        """
        graph = self._graph
        is_stacked = self._is_mapped
        # Stacked leaves have an axis of micro-batches, other leaves one of examples.
        first = 0 if is_stacked else group.start
        step = 1 if is_stacked else group.size

        # number of micro-batches of a call -> the function that splits them off
        functions: dict[int, Computation] = {}
        parts: Values = []
        for begin in range(0, group.number, _MICROBATCHES_PER_SPLIT):
            number = min(group.number - begin, _MICROBATCHES_PER_SPLIT)
            start = graph.constant(np.array(first + begin * step, np.int32), place)
            reads = [start, *local]
            if number not in functions:
                split = _microbatch.splitter(
                    axes, size=group.size, number=number, stacked=is_stacked
                )
                specs = [graph.specs[value] for value in reads]
                functions[number] = Computation.from_function("split", split, *specs)
            parts += graph.call(functions[number], place, reads, mapped=is_stacked)
        return parts
