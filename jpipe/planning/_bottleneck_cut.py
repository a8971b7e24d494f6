"""The best contiguous cuts of a chain, exactly: one stage after another."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ._sums import Matrix


class BottleneckCut(NamedTuple):
    """One way to cut.

    Attributes:
      bottleneck: the time of the slowest stage.
      latency: the time of all stages one after another, transfers between.
      ends: where stages begin and end, 0 and the number of layers included.
    """

    bottleneck: float
    latency: float
    ends: tuple[int, ...]

    def step(self, num_microbatches: int) -> float:
        """The time of a step: all pass the slowest stage, one of them the others."""
        return self.latency + (num_microbatches - 1) * self.bottleneck


def smallest_max(matrices: Sequence[Matrix]) -> tuple[float, tuple[int, ...]]:
    """The cut whose largest entry is smallest; infinite if there is none."""
    size = len(matrices[0])
    best = np.full(size, np.inf)
    best[0] = -np.inf
    came = []
    for matrix in matrices:
        each = np.maximum(best[:, None], matrix)
        came.append(each.argmin(axis=0))
        best = each[came[-1], np.arange(size)]
    return float(best[-1]), _ends(came, size - 1)


def best_max(times: Sequence[Matrix], transfers: Matrix) -> BottleneckCut | None:
    """The cut with the fastest slowest stage.

    Of several the one whose stages and transfers take the least time together, then
    the most even one.

    Args:
      times: of each stage, by where it begins and ends; infinite where it may not.
      transfers: the time of the transfers of a cut before each layer.
    """
    bottleneck, _ = smallest_max(times)
    # Each layer was rounded to a whole number: of two stages that take as long one may
    # be this much slower.
    same = bottleneck + len(transfers)
    return within(times, transfers, same) if math.isfinite(bottleneck) else None


def best_step(
    times: Sequence[Matrix], transfers: Matrix, num_microbatches: int
) -> list[BottleneckCut]:
    """Cuts of which none has a shorter step than the first.

    The slower a stage may be, the less all stages and transfers take together. So
    after the cut without a limit only those can be better whose slowest stage is
    faster, and by so much as the best so far asks for; and so on.
    """
    cut = best_max(times, transfers)
    found = set[BottleneckCut]() if cut is None else {cut}
    limit = np.inf
    while cut := within(times, transfers, limit):
        found.add(cut)
        best = min(each.step(num_microbatches) for each in found)
        faster = (best - cut.latency) / max(num_microbatches - 1, 1)
        limit = min(cut.bottleneck - 1, faster)
    return sorted(found, key=lambda cut: (cut.step(num_microbatches), cut))


def within(
    times: Sequence[Matrix], transfers: Matrix, limit: float
) -> BottleneckCut | None:
    """The cut with the least time altogether whose stages take no more than a limit.

    Of several the most even one: with the smallest sum of squares.
    """
    size = len(transfers)
    latency, squares = np.full(size, np.inf), np.zeros(size)
    latency[0] = 0.0
    came = []
    for stage, matrix in enumerate(times):
        reached = np.flatnonzero(np.isfinite(latency))
        if not len(reached):
            return None
        begins = slice(reached[0], reached[-1] + 1)
        own = np.where(matrix[begins] <= limit, matrix[begins], np.inf)
        starts = latency + transfers if stage else latency
        each = starts[begins, None] + own
        latency = each.min(axis=0)
        even = squares[begins, None] + np.square(own)
        even[each > latency] = np.inf
        arrived = even.argmin(axis=0)
        squares = even[arrived, np.arange(size)]
        came.append(reached[0] + arrived)
    if not np.isfinite(latency[-1]):
        return None
    ends = _ends(came, size - 1)
    bottleneck = max(
        float(matrix[ends[s], ends[s + 1]]) for s, matrix in enumerate(times)
    )
    return BottleneckCut(bottleneck, float(latency[-1]), ends)


def _ends(came: Sequence[npt.NDArray[np.intp]], last: int) -> tuple[int, ...]:
    ends = [last]
    for arrived in reversed(came):
        ends.append(int(arrived[ends[-1]]))
    return tuple(reversed(ends))
