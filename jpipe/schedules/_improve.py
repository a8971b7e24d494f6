"""Improves an order: pushes actions late; swaps neighbours on a longest chain.

Late: from the last action to the first, each takes the latest free time of its rank
with

    end[a] <= min over d of (start[d] - delay[d, a])       d: what depends on a

A list schedule whose priorities are these starts then pushes all of them early again.

Swaps: the makespan is the length of a longest chain of actions, each of which depends
on the one before it or follows it on its rank. Only a swap of two that follow each
other on a rank, on such a chain, can make it shorter.

References:
  Valls et al., Justification and RCPSP: a technique that pays (2005).
  Van Laarhoven et al., Job shop scheduling by simulated annealing (1992).
"""

import math
from bisect import bisect_left
from collections.abc import Sequence

from ._action import BACKWARD, INPUT, WEIGHT
from ._action_tables import ActionTables, SimulatedOrder
from ._list_schedule import list_schedule

# The most rounds in which an order is pushed late and early again.
_MAX_ROUNDS = 3


def shorten_ends(
    simulated: SimulatedOrder, max_bytes: float, *, has_whole_backwards: bool
) -> SimulatedOrder:
    """Changes an order before and after its steady phase, where ranks wait.

    Everything is pushed late, then early in that order, as long as the step gets
    shorter.

    Args:
      simulated: the order to start from.
      max_bytes: the most that any rank may hold.
      has_whole_backwards: False if backwards are split.
    """
    tables = simulated.tables
    for _ in range(_MAX_ROUNDS):
        rows = list_schedule(
            tables,
            compute_latest_starts(simulated),
            [max_bytes] * tables.num_ranks,
            has_whole_backwards=has_whole_backwards,
            reserves=True,
        )
        if rows is None:
            break
        shifted = tables.simulate(rows)
        if shifted.makespan >= simulated.makespan:
            break
        simulated = shifted
    return simulated


def compute_latest_starts(simulated: SimulatedOrder) -> list[float]:
    """The start of each action, by ID, if all ran as late as the makespan allows."""
    tables = simulated.tables
    result_ids = tables.result_ids
    latest_ends = [simulated.makespan - more for more in tables.exchange_times]
    starts = [0.0] * len(tables.durations)
    gaps: list[list[tuple[float, float]]] = [
        [(-math.inf, simulated.makespan)] for _ in simulated.rows
    ]
    for action_id in reversed(list(simulated.sort_by_end())):
        rank = tables.placement[tables.stage(action_id)]
        start = _take_gap(
            gaps[rank],
            latest_end=latest_ends[result_ids[action_id]],
            duration=tables.durations[action_id],
        )
        starts[action_id] = start

        for ids, delays in tables.dependencies:
            before = ids[action_id]
            if before >= 0:
                latest_ends[before] = min(
                    latest_ends[before], start - delays[action_id]
                )
        if action_id % tables.num_microbatches:
            # Each stage runs its micro-batches in order.
            before = result_ids[action_id - 1]
            latest_ends[before] = min(latest_ends[before], start)
    return starts


def _take_gap(
    gaps: list[tuple[float, float]], latest_end: float, duration: float
) -> float:
    """Takes the latest time that is free and ends by ``latest_end``.

    Args:
      gaps: the start and end of each time in which the rank is free, ascending; what is
        taken is removed.
      latest_end: the time by which to end.
      duration: the length of what is taken.

    Returns:
      Its start.
    """
    for index in range(bisect_left(gaps, (latest_end,)) - 1, -1, -1):
        low, high = gaps[index]
        end = min(high, latest_end)
        start = end - duration
        if start >= low:
            if duration > 0:
                pieces = [(low, start), (end, high)]
                gaps[index : index + 1] = [gap for gap in pieces if gap[0] < gap[1]]
            return start
    raise AssertionError("the first gap has no beginning")


def _find_critical_pairs(simulated: SimulatedOrder) -> list[tuple[int, int]]:
    """Neighbours on a rank, on a longest chain, the second held up by the first only.

    Swapping other neighbours cannot make the step shorter.

    Returns:
      The rank of each pair and the position of its first action, sorted.
    """
    tables = simulated.tables
    start = dict(zip(simulated.order, simulated.starts, strict=True))
    end = dict(zip(simulated.order, simulated.ends, strict=True))
    location: dict[int, tuple[int, int]] = {}  # ID -> rank and position
    for rank, row in enumerate(simulated.rows):
        for position, action_id in enumerate(row):
            location[action_id] = rank, position
    action_of = {tables.result_ids[action_id]: action_id for action_id in start}

    # Backwards along the chain, from the action with which the step ends.
    pairs: list[tuple[int, int]] = []
    current = max(start, key=lambda number: end[number] + tables.exchange_times[number])
    while start[current] > 0:
        arrived_last = [
            action_of[ids[current]]
            for ids, delays in tables.dependencies
            if ids[current] >= 0
            and simulated.end[ids[current]] + delays[current] == start[current]
        ]
        if arrived_last:
            current = arrived_last[0]
            continue
        # It waited for its rank alone.
        rank, position = location[current]
        row = simulated.rows[rank]
        blocker_position = next(
            before
            for before in reversed(range(position))
            if end[row[before]] == start[current]
        )
        blocker = row[blocker_position]
        is_neighbour = blocker_position == position - 1
        if is_neighbour and _may_swap(tables, blocker, current):
            pairs.append((rank, blocker_position))
        current = blocker
    return sorted(pairs)


def _may_swap(tables: ActionTables, first: int, second: int) -> bool:
    """True if the order of two actions on their rank is free."""
    if tables.stage(first) != tables.stage(second):
        return True
    ops = {tables.action(first).op, tables.action(second).op}
    # An op runs its micro-batches in order; a whole backward is an I and a W.
    is_one_sum = len(ops) == 1 or (BACKWARD in ops and ops & {INPUT, WEIGHT})
    return not is_one_sum


def swap_neighbours(
    simulated: SimulatedOrder, max_bytes: Sequence[float] | None, budget: int
) -> SimulatedOrder:
    """Swaps neighbours on a longest chain while that makes the step shorter.

    Args:
      simulated: the order to start from.
      max_bytes: the most bytes of each rank; ``None``: no limit.
      budget: the number of orders that are tried.
    """
    pairs = _find_critical_pairs(simulated)
    for _ in range(budget):
        if not pairs:
            break
        rank, position = pairs.pop(0)
        rows = [list(row) for row in simulated.rows]
        row = rows[rank]
        row[position : position + 2] = reversed(row[position : position + 2])

        swapped = simulated.tables.simulate(rows)
        is_shorter = swapped.is_complete and swapped.makespan < simulated.makespan
        if is_shorter and swapped.fits(max_bytes):
            simulated = swapped
            pairs = _find_critical_pairs(simulated)
    return simulated
