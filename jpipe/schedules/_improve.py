"""Orders made better: pushed late; changed on the longest chain."""

import math
from bisect import bisect_left
from collections.abc import Sequence

from ._action import BACKWARD, INPUT, WEIGHT
from ._tables import Run, Tables


def latest_starts(run: Run) -> list[float]:
    """When each action would start if all ran as late as the makespan lets them.

    The last goes first; each goes to the latest free time of its rank that is early
    enough for all who read it.
    """
    tables, result = run.tables, run.tables.result
    latest = [run.makespan - more for more in tables.exchange]
    starts = [0.0] * len(tables.seconds)
    gaps: list[list[tuple[float, ...]]] = [
        [(-math.inf, run.makespan)] for _ in run.rows
    ]
    count = tables.num_microbatches
    for number in reversed(list(run.by_end())):
        seconds = tables.seconds[number]
        rank = tables.placement[tables.stage(number)]
        start = _take(gaps[rank], latest[result[number]], seconds)
        starts[number] = start
        reads = [(read[number], delay[number]) for read, delay in tables.reads]
        if number % count:
            # Each stage runs its micro-batches in order.
            reads.append((result[number - 1], 0.0))
        for read, later in reads:
            if read >= 0:
                latest[read] = min(latest[read], start - later)
    return starts


def _take(gaps: list[tuple[float, ...]], latest: float, seconds: float) -> float:
    """Takes the latest free time that ends by then; returns its start."""
    for at in range(bisect_left(gaps, (latest,)) - 1, -1, -1):
        low, high = gaps[at]
        end = min(high, latest)
        start = end - seconds
        if start >= low:
            if seconds > 0:
                rest = [(low, start), (end, high)]
                gaps[at : at + 1] = [gap for gap in rest if gap[0] < gap[1]]
            return start
    raise AssertionError("the first gap has no beginning")


def _held_up(run: Run) -> list[tuple[int, int]]:
    """Neighbours of a rank, the second held up by the first, on a longest chain.

    No other change of neighbours makes the step shorter.

    Returns:
      Rank and place of the first of each.
    """
    tables = run.tables
    start = dict(zip(run.order, run.starts, strict=True))
    end = dict(zip(run.order, run.ends, strict=True))
    at = {
        number: (r, i) for r, row in enumerate(run.rows) for i, number in enumerate(row)
    }
    action_of = {tables.result[number]: number for number in run.order}
    found = []
    number = max(run.order, key=lambda number: end[number] + tables.exchange[number])
    while start[number] > 0:
        reads = [
            action_of[read[number]]
            for read, delay in tables.reads
            if read[number] >= 0
            and run.end[read[number]] + delay[number] == start[number]
        ]
        (rank, place), last = at[number], number
        earlier = reversed(run.rows[rank][:place])
        earlier = (other for other in earlier if end[other] == start[number])
        number = reads[0] if reads else next(earlier)
        is_next = not reads and at[number] == (rank, place - 1)
        if is_next and _may_swap(tables, number, last):
            found.append((rank, place - 1))
    return sorted(found)


def _may_swap(tables: Tables, first: int, second: int) -> bool:
    """Whether the second does not follow the first in its stage."""
    if tables.stage(first) != tables.stage(second):
        return True
    ops = {tables.action(number).op for number in (first, second)}
    # Gradients are summed in order, and a whole backward is both of its halves.
    return len(ops) == 2 and not (BACKWARD in ops and ops & {INPUT, WEIGHT})


def local_search(run: Run, most: Sequence[float] | None, budget: int) -> Run:
    """Swaps neighbours on a longest chain while that makes the step shorter.

    Args:
      run: the order to start from.
      most: the most bytes of each rank; ``None``: any.
      budget: how many orders are tried.
    """
    left = _held_up(run)
    for _ in range(budget):
        if not left:
            break
        rank, at = left.pop(0)
        rows = [list(row) for row in run.rows]
        rows[rank][at : at + 2] = reversed(rows[rank][at : at + 2])
        new = run.tables.run(rows)
        if new.is_complete and new.makespan < run.makespan and new.fits(most):
            run, left = new, _held_up(new)
    return run
