"""The best contiguous cuts of a chain, exactly: one stage after another."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ._sums import Matrix


class Cut(NamedTuple):
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


def best_max(times: Sequence[Matrix], transfers: Matrix) -> Cut | None:
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
) -> list[Cut]:
    """Cuts of which none has a shorter step than the first.

    Of as many as there are from the fastest slowest stage to the least transfers those
    are tried that can be better than the best so far.
    """
    min_max = best_max(times, transfers)
    if min_max is None:
        return []
    min_latency = within(times, transfers, np.inf)
    assert min_latency is not None
    found = {min_max.ends: min_max, min_latency.ends: min_latency}
    count = num_microbatches - 1

    def best() -> float:
        return min(cut.step(num_microbatches) for cut in found.values())

    most = (best() - min_latency.latency) / count if count else -np.inf
    limits = _limits(times, min_max.bottleneck, min(most, min_latency.bottleneck))
    # Between two limits: slowest stages from limits[low] on, up to limits[high], which
    # allow stages and transfers of no less than `least`.
    intervals = [(0, len(limits) - 1, min_max.latency, min_latency.latency)]
    while intervals:
        low, high, before, least = intervals.pop()
        if low >= high or least >= before:
            continue
        if least + count * limits[low + 1] >= best():
            continue
        middle = (low + high + 1) // 2
        cut = within(times, transfers, limits[middle])
        assert cut is not None
        found[cut.ends] = cut
        if middle < high:
            intervals.append((middle, high, cut.latency, least))
        if middle - 1 > low:
            intervals.append((low, middle - 1, before, cut.latency))
    return sorted(found.values(), key=lambda cut: (cut.step(num_microbatches), cut))


def within(times: Sequence[Matrix], transfers: Matrix, limit: float) -> Cut | None:
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
    return Cut(bottleneck, float(latency[-1]), ends)


def _limits(times: Sequence[Matrix], low: float, high: float) -> list[float]:
    """The times that a stage can take between two, these included."""
    different = {id(matrix): matrix for matrix in times}
    inside = [m[(m > low) & (m <= high)] for m in different.values()]
    return [low, *np.unique(np.concatenate(inside)).tolist()]


def _ends(came: Sequence[npt.NDArray[np.intp]], last: int) -> tuple[int, ...]:
    ends = [last]
    for arrived in reversed(came):
        ends.append(int(arrived[ends[-1]]))
    return tuple(reversed(ends))
