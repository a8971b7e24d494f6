"""Cuts made better by moving their ends, where no exact method is known.

A best-first search: the neighbors of the best cut that was not yet expanded are
evaluated, those with one end moved or two by one layer each; so are the neighbors of
a few worse ones, which may lead to a better one yet. It ends when some
expansions in a row brought nothing better.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

# The layers at which the stages of a cut begin and end: 0, ..., the number of layers.
Ends = tuple[int, ...]
# The ends of several cuts, of shape (cuts, stages + 1).
Cuts = npt.NDArray[np.intp]
# The value of a cut; smaller is better.
Key = tuple[float, ...]

# The number of cuts around which a climb looks for a better one before it gives up.
_PATIENCE = 12

# Two ends move by one layer each: both to the same side, or to different ones.
_PAIRED_STEPS = ((1, 1), (-1, -1), (1, -1), (-1, 1))


def list_cuts(num_layers: int, num_stages: int, *, max_cuts: int) -> Iterator[Ends]:
    """All cuts, if there are at most ``max_cuts``; else none."""
    if math.comb(num_layers - 1, num_stages - 1) <= max_cuts:
        for inner in itertools.combinations(range(1, num_layers), num_stages - 1):
            yield (0, *inner, num_layers)


def climb(
    starts: Iterable[Ends],
    keys: Callable[[Cuts], Sequence[Key]],
    max_cuts: int,
) -> list[Ends]:
    """The best cuts among some and those around the best of them.

    Args:
      starts: the cuts from which the search begins.
      keys: ``cuts -> keys``, one per cut.
      max_cuts: the number of cuts to evaluate at most, besides the starts.

    Returns:
      All cuts seen, the best first.
    """
    first_cuts = list(dict.fromkeys(starts))
    # cut -> its key
    seen = dict(zip(first_cuts, keys(np.array(first_cuts)), strict=True))
    max_cuts += len(seen)
    moves = _moves(first_cuts[0])
    queue = [(key, ends) for ends, key in seen.items()]
    heapq.heapify(queue)

    best_key, _ = queue[0]
    tries = _PATIENCE
    while queue and tries and len(seen) < max_cuts:
        tries -= 1
        _, ends = heapq.heappop(queue)
        neighbors = ends + moves
        neighbors = neighbors[(np.diff(neighbors) > 0).all(axis=1)]
        new_cuts = [cut for cut in map(tuple, neighbors.tolist()) if cut not in seen]
        new_cuts = new_cuts[: max_cuts - len(seen)]
        if not new_cuts:
            continue

        new_keys = keys(np.array(new_cuts))
        seen.update(zip(new_cuts, new_keys, strict=True))
        for key, cut in zip(new_keys, new_cuts, strict=True):
            heapq.heappush(queue, (key, cut))
        if min(new_keys) < best_key:
            best_key = min(new_keys)
            tries = _PATIENCE
    return sorted(seen, key=lambda ends: (seen[ends], ends))


def _moves(ends: Ends) -> Cuts:
    """The numbers to add to ends for each neighbor, the nearest first."""
    num_ends = len(ends)
    inner_ends = range(1, num_ends - 1)
    unit = np.eye(num_ends, dtype=np.intp)
    # An end moves up to half a stage.
    reach = max(1, ends[-1] // (2 * num_ends))

    moves: list[npt.NDArray[np.intp]] = []
    for distance in range(1, reach + 1):
        for i in inner_ends:
            moves += [-distance * unit[i], distance * unit[i]]
    for i, j in itertools.combinations(inner_ends, 2):
        moves += [a * unit[i] + b * unit[j] for a, b in _PAIRED_STEPS]
    return np.array(moves, np.intp).reshape(-1, num_ends)
