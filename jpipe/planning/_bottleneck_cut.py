"""The best cuts of a chain of layers into contiguous stages, by dynamic programming.

``times[s][i, j]`` is the time of stage s with the layers i to j - 1: infinite where it
may not have them. ``transfers[i]`` is the time of the transfers of a cut before layer
i. Of the layers before j, divided into s stages, the two programs below compute

    bottleneck[s + 1, j] = min over i of max(bottleneck[s, i], times[s][i, j])

    latency[s + 1, j]    = min over i of latency[s, i] + transfers[i] + times[s][i, j],
                           where times[s][i, j] is no more than a limit,

and remember the i of each. For n layers a stage takes n ** 2 operations. A step of M
micro-batches takes the latency and M - 1 times the bottleneck: `minimize_step` finds
the least of that by a few limits, instead of one for each time that a stage can take.

References:
  Zheng et al., `Alpa: Automating Inter- and Intra-Operator Parallelism for Distributed
  Deep Learning <https://arxiv.org/abs/2201.12023>`_ (2022), section 5.2.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ._sums import Matrix

Indices = npt.NDArray[np.intp]


class BottleneckCut(NamedTuple):
    """A cut, and the times of its stages.

    Attributes:
      bottleneck: the time of the slowest stage.
      latency: the time of all stages one after another, transfers between.
      ends: the layers at which stages begin and end, 0 and the number of layers
        included.
    """

    bottleneck: float
    latency: float
    ends: tuple[int, ...]

    def step(self, num_microbatches: int) -> float:
        """The time of a step: all pass the slowest stage, the last of them all."""
        return self.latency + (num_microbatches - 1) * self.bottleneck


def minimize_max(matrices: Sequence[Matrix]) -> tuple[float, tuple[int, ...]]:
    """Finds the cut whose largest entry is smallest.

    Args:
      matrices: one per stage; anything, such as times or bytes.

    Returns:
      That entry, infinite if there is no cut, and the ends of the stages.
    """
    num_ends = len(matrices[0])
    bottleneck = np.full(num_ends, np.inf)
    bottleneck[0] = -np.inf
    begins: list[Indices] = []  # of each stage: end -> begin
    for matrix in matrices:
        bottlenecks = np.maximum(bottleneck[:, None], matrix)  # [begin, end]
        begins.append(bottlenecks.argmin(axis=0))
        bottleneck = bottlenecks[begins[-1], np.arange(num_ends)]
    return float(bottleneck[-1]), _trace_ends(begins, num_ends - 1)


def minimize_bottleneck(
    times: Sequence[Matrix], transfers: Matrix
) -> BottleneckCut | None:
    """Finds the cut with the fastest slowest stage.

    Of several the one whose stages and transfers take the least time together, then
    the most even one.

    Args:
      times: one matrix per stage.
      transfers: the time of the transfers of a cut before each layer.

    Returns:
      The cut; ``None`` if there is none.
    """
    bottleneck, _ = minimize_max(times)
    if not math.isfinite(bottleneck):
        return None
    # The time of each layer was rounded to a whole number: of two stages that take as
    # long one may be this much slower.
    rounding = len(transfers)
    return minimize_latency(times, transfers, limit=bottleneck + rounding)


def minimize_step(
    times: Sequence[Matrix], transfers: Matrix, *, num_microbatches: int
) -> list[BottleneckCut]:
    """Finds the cut with the shortest step.

    The slower a stage may be, the less all stages and transfers take together. So
    after the cut without a limit only those can be better whose slowest stage is
    faster, and by so much as the best so far asks for; and so on.

    Args:
      times: one matrix per stage.
      transfers: the time of the transfers of a cut before each layer.
      num_microbatches: the number of micro-batches of a step.

    Returns:
      Cuts, sorted by their steps; of all cuts there are, none has a shorter step than
      the first.
    """
    cuts = set[BottleneckCut]()
    fastest = minimize_bottleneck(times, transfers)
    if fastest is not None:
        cuts.add(fastest)

    limit = np.inf
    while cut := minimize_latency(times, transfers, limit=limit):
        cuts.add(cut)
        shortest_step = min(seen.step(num_microbatches) for seen in cuts)
        # Under a lower limit the latency is no less than that of this cut.
        largest_bottleneck = (shortest_step - cut.latency) / max(
            num_microbatches - 1, 1
        )
        limit = min(cut.bottleneck - 1, largest_bottleneck)
    return sorted(cuts, key=lambda cut: (cut.step(num_microbatches), cut))


def minimize_latency(
    times: Sequence[Matrix], transfers: Matrix, *, limit: float
) -> BottleneckCut | None:
    """Finds the cut with the least time altogether, if no stage may exceed a limit.

    Of several the most even one: with the smallest sum of squares.

    Args:
      times: one matrix per stage.
      transfers: the time of the transfers of a cut before each layer.
      limit: the most time that a stage may take.

    Returns:
      The cut; ``None`` if there is none.
    """
    num_ends = len(transfers)
    latency = np.full(num_ends, np.inf)
    latency[0] = 0.0
    squares = np.zeros(num_ends)
    begins: list[Indices] = []  # of each stage: end -> begin

    for stage, matrix in enumerate(times):
        reached = np.flatnonzero(np.isfinite(latency))
        if not len(reached):
            return None
        # A stage begins where those before it can end.
        rows = slice(reached[0], reached[-1] + 1)
        stage_times = np.where(matrix[rows] <= limit, matrix[rows], np.inf)
        starts = latency + transfers if stage else latency
        latencies = starts[rows, None] + stage_times  # [begin, end]
        latency = latencies.min(axis=0)

        # Of the begins with this latency the one with the smallest sum of squares.
        stage_squares = squares[rows, None] + np.square(stage_times)
        stage_squares[latencies > latency] = np.inf
        best_rows = stage_squares.argmin(axis=0)
        squares = stage_squares[best_rows, np.arange(num_ends)]
        begins.append(reached[0] + best_rows)

    if not np.isfinite(latency[-1]):
        return None
    ends = _trace_ends(begins, num_ends - 1)
    bottleneck = max(
        float(matrix[ends[stage], ends[stage + 1]])
        for stage, matrix in enumerate(times)
    )
    return BottleneckCut(bottleneck, float(latency[-1]), ends)


def _trace_ends(begins: Sequence[Indices], num_layers: int) -> tuple[int, ...]:
    """Reads the ends of a cut from where each stage begins, the last stage first."""
    ends = [num_layers]
    for begin_of_end in reversed(begins):
        ends.append(int(begin_of_end[ends[-1]]))
    return tuple(reversed(ends))
