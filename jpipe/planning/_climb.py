"""Cuts made better by moving their ends, where no exact method is known."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

Ends = tuple[int, ...]
# Smaller is better.
Key = tuple[float, ...]


def climb(
    starts: Iterable[Ends],
    key: Callable[[Ends], Key],
    most: int,
    reach: int = 1,
) -> Ends:
    """The best cut that moves from some cuts lead to, each move for the better.

    Args:
      starts: where to begin: at the best of them.
      key: of a cut; its calls are counted.
      most: how many cuts to look at, beside the starts.
      reach: how many layers an end moves at most.

    Returns:
      The best cut seen.
    """
    seen: dict[Ends, Key] = {}

    def known(ends: Ends) -> Key:
        if ends not in seen:
            seen[ends] = key(ends)
        return seen[ends]

    best = min(dict.fromkeys(starts), key=known)
    most += len(seen)
    better = True
    while better and len(seen) < most:
        better = False
        for ends in _moves(best, reach):
            if len(seen) >= most:
                break
            if known(ends) < known(best):
                # Go on from there: what was tried before is not counted again.
                best, better = ends, True
                break
    return best


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
    if all(a < b for a, b in zip(moved, moved[1:], strict=False)):
        yield tuple(moved)
