"""Orders made better: pushed late; changed on the longest chain."""

import math
from bisect import bisect_left
from collections.abc import Callable

from ._action import BACKWARD, INPUT, OPS, WEIGHT
from ._tables import Run, Tables


def latest_starts(run: Run) -> list[float]:
    """When each action would start if all ran as late as the makespan lets them.

    The last goes first; each goes to the latest free time of its rank that is early
    enough for all who read it.
    """
    tables = run.tables
    local, remote, delay, result = (
        tables.local,
        tables.remote,
        tables.delay,
        tables.result,
    )
    latest = [run.makespan - more for more in tables.exchange]
    starts = [0.0] * len(tables.seconds)
    gaps: list[list[tuple[float, ...]]] = [
        [(-math.inf, run.makespan)] for _ in run.rows
    ]
    count, stages = tables.num_microbatches, tables.num_stages
    for number in reversed(list(run.by_end())):
        seconds = tables.seconds[number]
        rank = tables.placement[number // count % stages]
        start = _take(gaps[rank], latest[result[number]], seconds)
        starts[number] = start
        reads = [(local[number], 0.0), (remote[number], delay[number])]
        if number % count:
            # Each stage runs its micro-batches in order.
            reads.append((result[number - 1], 0.0))
        for read, later in [*reads, *tables.skips.get(number, ())]:
            if read >= 0:
                latest[read] = min(latest[read], start - later)
    # Who reads a whole backward reads it as a first half; both have one place in line.
    whole, half = tables.first(BACKWARD, 0), tables.first(INPUT, 0)
    for at in range(half - whole):
        one = starts[whole + at] or starts[half + at]
        starts[whole + at] = starts[half + at] = one
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


def tails(run: Run) -> list[float]:
    """How long it takes from the start of each action to the end of the step.

    By result; with the orders as they are.
    """
    tables = run.tables
    local, remote, delay, result = (
        tables.local,
        tables.remote,
        tables.delay,
        tables.result,
    )
    after = [*tables.exchange]
    tail = [0.0] * len(tables.seconds)
    row_of = {number: (row, at) for row in run.rows for at, number in enumerate(row)}
    for number in reversed(run.order):
        at = result[number]
        long = tail[at] = after[at] + tables.seconds[number]
        row, place = row_of[number]
        if place:
            before = result[row[place - 1]]
            after[before] = max(after[before], long)
        if (read := local[number]) >= 0:
            after[read] = max(after[read], long)
        if (read := remote[number]) >= 0:
            after[read] = max(after[read], long + delay[number])
        for read, later in tables.skips.get(number, ()):
            after[read] = max(after[read], long + later)
    return tail


def swaps(run: Run) -> list[tuple[int, int]]:
    """Neighbours of a rank, the second held up by the first, on a longest chain.

    No other change of orders makes the step shorter.

    Returns:
      Rank and place of the first of each.
    """
    tables, tail = run.tables, tails(run)
    end = dict(zip(run.order, run.ends, strict=True))
    close = run.makespan * 1e-9
    found = []
    for rank, row in enumerate(run.rows):
        for at in range(len(row) - 1):
            first, second = row[at], row[at + 1]
            start = end[second] - tables.seconds[second]
            if (
                start - end[first] <= close
                and start + tail[tables.result[second]] >= run.makespan - close
                and _may_swap(tables, first, second)
            ):
                found.append((rank, at))
    return found


def _may_swap(tables: Tables, first: int, second: int) -> bool:
    """Whether the second does not read the first, nor follows it in its stage."""
    count, stages = tables.num_microbatches, tables.num_stages
    if tables.local[second] == tables.result[first]:
        return False
    if first // count % stages != second // count % stages:
        return True
    ops = {OPS[number // count // stages] for number in (first, second)}
    # Gradients are summed in order, and a whole backward is both of its halves.
    return len(ops) == 2 and not (BACKWARD in ops and ops & {INPUT, WEIGHT})


def local_search(run: Run, allowed: Callable[[Run], bool], budget: int) -> Run:
    """Swaps neighbours on a longest chain while that makes the step shorter.

    Args:
      run: the order to start from.
      allowed: whether an order may be kept.
      budget: how many orders are tried.
    """
    left = swaps(run)
    for _ in range(budget):
        if not left:
            break
        rank, at = left.pop(0)
        rows = [list(row) for row in run.rows]
        rows[rank][at : at + 2] = reversed(rows[rank][at : at + 2])
        new = run.tables.run(rows)
        if new is not None and new.makespan < run.makespan and allowed(new):
            run, left = new, swaps(new)
    return run
