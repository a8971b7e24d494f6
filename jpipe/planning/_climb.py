"""Cuts made better by moving their ends, where no exact method is known."""

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

Ends = tuple[int, ...]
# The ends of several cuts, of shape (cuts, stages + 1).
Cuts = npt.NDArray[np.intp]
# Smaller is better.
Key = tuple[float, ...]


def every(num_layers: int, num_stages: int, most: int) -> Iterator[Ends]:
    """All cuts, if they are no more than so many; else none."""
    if math.comb(num_layers - 1, num_stages - 1) <= most:
        for inner in itertools.combinations(range(1, num_layers), num_stages - 1):
            yield (0, *inner, num_layers)


def climb(
    starts: Iterable[Ends],
    keys: Callable[[Cuts], Sequence[Key]],
    most: int,
    patience: int = 12,
) -> list[Ends]:
    """The best cuts among some and those around the best of them.

    Args:
      starts: where to begin.
      keys: of some cuts, one or more.
      most: how many cuts to look at, besides the starts.
      patience: around how many cuts to look for a better one before giving up.

    Returns:
      All cuts seen, the best first.
    """
    first = list(dict.fromkeys(starts))
    seen = dict(zip(first, keys(np.array(first)), strict=True))
    most += len(seen)
    moves = _moves(first[0])
    # Around the best first; around some more, which may lead to a better one yet.
    waiting = [(value, ends) for ends, value in seen.items()]
    heapq.heapify(waiting)
    best, left = waiting[0][0], patience
    while waiting and left and len(seen) < most:
        left -= 1
        moved = heapq.heappop(waiting)[1] + moves
        moved = moved[(np.diff(moved) > 0).all(axis=1)]
        new = [ends for ends in map(tuple, moved.tolist()) if ends not in seen]
        if not (new := new[: most - len(seen)]):
            continue
        values = keys(np.array(new))
        seen.update(zip(new, values, strict=True))
        for value, ends in zip(values, new, strict=True):
            heapq.heappush(waiting, (value, ends))
        if min(values) < best:
            best, left = min(values), patience
    return sorted(seen, key=lambda ends: (seen[ends], ends))


def _moves(ends: Ends) -> Cuts:
    """What to add to ends: one moves, or two by one layer each, the nearest first."""
    last = len(ends) - 1
    one = np.eye(last + 1, dtype=np.intp)
    # An end moves up to half a stage.
    reach = max(1, ends[-1] // (2 * len(ends)))
    single = [
        step * one[i]
        for by in range(1, reach + 1)
        for i in range(1, last)
        for step in (-by, by)
    ]
    double = [
        a * one[i] + b * one[j]
        for i, j in itertools.combinations(range(1, last), 2)
        for a, b in ((1, 1), (-1, -1), (1, -1), (-1, 1))
    ]
    return np.array([*single, *double], np.intp).reshape(-1, last + 1)
