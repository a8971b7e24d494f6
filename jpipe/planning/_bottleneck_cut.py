"""The best cuts of a chain of layers into contiguous stages, by dynamic programming.

``times[s][i, j]`` is the time of stage s with the layers i to j - 1: infinite where it
may not have them. ``transfers[i]`` is the time of the transfers of a cut before layer
i. Of the layers before j, divided into s stages, the two programs below compute

    bottleneck[s + 1, j] = min over i of max(bottleneck[s, i], times[s][i, j])

    latency[s + 1, j]    = min over i of latency[s, i] + transfers[i] + times[s][i, j],
                           where times[s][i, j] is no more than a limit,

and remember the i of each: the first finds the least bottleneck, the second of the cuts
that have it the one with the least latency. For n layers a stage takes n ** 2
operations.

References:
  Zheng et al., `Alpa: Automating Inter- and Intra-Operator Parallelism for Distributed
  Deep Learning <https://arxiv.org/abs/2201.12023>`_ (2022), section 5.2.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ._stage_costs import Matrix

Indices = npt.NDArray[np.intp]


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
) -> tuple[int, ...] | None:
    """Finds the cut with the fastest slowest stage.

    Of several the one whose stages and transfers take the least time together, then
    the most even one.

    Args:
      times: one matrix per stage.
      transfers: the time of the transfers of a cut before each layer.

    Returns:
      The ends of the stages; ``None`` if there is no such cut.
    """
    bottleneck, _ = minimize_max(times)
    if not math.isfinite(bottleneck):
        return None
    # The time of each layer was rounded to a whole number: of two stages that take as
    # long one may be this much slower.
    rounding = len(transfers)
    return _minimize_latency(times, transfers, limit=bottleneck + rounding)


def _minimize_latency(
    times: Sequence[Matrix], transfers: Matrix, *, limit: float
) -> tuple[int, ...] | None:
    """Finds the cut with the least time altogether, if no stage may exceed a limit.

    Of several the most even one: with the smallest sum of squares.

    Args:
      times: one matrix per stage.
      transfers: the time of the transfers of a cut before each layer.
      limit: the most time that a stage may take.

    Returns:
      The ends of the stages; ``None`` if there is no such cut.
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
    return _trace_ends(begins, num_ends - 1)


def _trace_ends(begins: Sequence[Indices], num_layers: int) -> tuple[int, ...]:
    """Reads the ends of a cut from where each stage begins, the last stage first."""
    ends = [num_layers]
    for begin_of_end in reversed(begins):
        ends.append(int(begin_of_end[ends[-1]]))
    return tuple(reversed(ends))
