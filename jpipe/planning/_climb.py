"""Cuts made better by moving their ends, where no exact method is known."""

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Ends = tuple[int, ...]
# Smaller is better.
Key = tuple[float, ...]


def every(num_layers: int, num_stages: int, most: int) -> Iterator[Ends]:
    """All cuts, if they are no more than so many; else none."""
    if math.comb(num_layers - 1, num_stages - 1) <= most:
        for inner in itertools.combinations(range(1, num_layers), num_stages - 1):
            yield (0, *inner, num_layers)


def climb(
    starts: Iterable[Ends],
    key: Callable[[Ends], Key],
    most: int,
    patience: int = 12,
) -> list[Ends]:
    """The best cuts among some and those around the best of them.

    Args:
      starts: where to begin.
      key: of a cut.
      most: how many cuts to look at, beside the starts.
      patience: around how many cuts to look for a better one before giving up.

    Returns:
      All cuts seen, the best first.
    """
    seen = {ends: key(ends) for ends in dict.fromkeys(starts)}
    most += len(seen)
    # An end moves up to half a stage.
    reach = max(1, max((ends[-1] // (2 * len(ends)) for ends in seen), default=1))
    # Around the best first; around some more, which may lead to a better one yet.
    waiting = [(value, ends) for ends, value in seen.items()]
    heapq.heapify(waiting)
    best, left = waiting[0][0], patience
    while waiting and left and len(seen) < most:
        left -= 1
        for ends in _moves(heapq.heappop(waiting)[1], reach):
            if ends in seen or len(seen) >= most:
                continue
            value = seen[ends] = key(ends)
            heapq.heappush(waiting, (value, ends))
            if value < best:
                best, left = value, patience
    return sorted(seen, key=lambda ends: (seen[ends], ends))


def _moves(ends: Ends, reach: int) -> Iterator[Ends]:
    """Cuts with one end moved, or two by one layer each, the nearest first."""
    last = len(ends) - 1
    inner = range(1, last)
    for by in range(1, reach + 1):
        for i in inner:
            for step in (-by, by):
                yield from _moved(ends, {i: step})
    for i in inner:
        for j in range(i + 1, last):
            for steps in ((1, 1), (-1, -1), (1, -1), (-1, 1)):
                yield from _moved(ends, dict(zip((i, j), steps, strict=True)))


def _moved(ends: Ends, by: dict[int, int]) -> Iterator[Any]:
    moved = list(ends)
    for i, step in by.items():
        moved[i] += step
    if all(a < b for a, b in itertools.pairwise(moved)):
        yield tuple(moved)
