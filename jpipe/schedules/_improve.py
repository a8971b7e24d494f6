"""Improves an order: pushes actions late, and then early in the new order.

From the last action to the first, each takes the latest free time of its rank
with

    end[a] <= min over d of (start[d] - delay[d, a])       d: what depends on a

A list schedule whose priorities are these starts then pushes all of them early again.

References:
  Valls et al., Justification and RCPSP: a technique that pays (2005).
"""

import math
from bisect import bisect_left

from ._action_tables import SimulatedOrder
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
