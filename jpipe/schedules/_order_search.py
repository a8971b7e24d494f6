"""Searches orders for one placement: the catalogue's, list schedules, both improved.

catalogue, one micro-batch at a time   always
list schedules by four rules           unless the bound is reached
the fastest, pushed late, then early   unless the bound is reached
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ._action import BACKWARD, FORWARD
from ._action_tables import ActionTables, IdRows, SimulatedOrder
from ._bound import compute_lower_bound
from ._catalogue import CATALOGUE, TRAINING
from ._improve import compute_latest_starts
from ._list_schedule import list_schedule
from ._schedule import Schedule
from ._simulate import ScheduleError

# The number of the fastest orders that are shifted.
_NUM_SHIFTED = 4
# Sums of the same times in another order differ by less.
_ROUNDING = 1e-12


class _Rule(NamedTuple):
    """Settings of a list schedule; see `list_schedule`."""

    priority: Sequence[float]
    has_whole_backwards: bool
    reserves: bool


def search_orders(
    tables: ActionTables,
    max_bytes: Sequence[float] | None,
    schedules: Sequence[Schedule],
) -> list[SimulatedOrder]:
    """Simulates the orders that are tried for one placement; the fastest first.

    Args:
      tables: the costs of the actions there.
      max_bytes: the most bytes of each rank; ``None``: no limit.
      schedules: schedules of the catalogue; those of the placement are tried.
    """
    bound = compute_lower_bound(tables) * (1 + _ROUNDING)
    orders: list[SimulatedOrder] = []

    def add(rows: IdRows | None) -> None:
        if not rows:
            return
        simulated = tables.simulate(rows)
        if simulated.is_complete:
            orders.append(simulated)
            orders.sort(key=lambda order: order.makespan)  # stable

    for schedule in schedules:
        if schedule.placement == tables.placement:
            add(tables.to_ids(schedule.rows))
    add(_run_one_at_a_time(tables))
    for list_rows in (_list_orders, _shift_orders):
        fastest = next((x.makespan for x in orders if x.fits(max_bytes)), math.inf)
        if fastest > bound:
            for rows in list(list_rows(tables, max_bytes, orders)):
                add(rows)
    return orders


def _list_orders(
    tables: ActionTables,
    max_bytes: Sequence[float] | None,
    orders: list[SimulatedOrder],
) -> Iterator[IdRows | None]:
    """Yields list schedules by simple rules of which action goes first."""
    num_stages = tables.num_stages
    first = [num_stages - stage for stage in range(num_stages)]  # later stages first
    second = [num_stages + place for place in first]
    backward_first = _priorities_by_stage(tables, forward=second, backward=first)
    forward_first = _priorities_by_stage(tables, forward=first, backward=second)
    for rule in (
        _Rule(backward_first, has_whole_backwards=False, reserves=True),
        _Rule(backward_first, has_whole_backwards=False, reserves=False),
        _Rule(forward_first, has_whole_backwards=False, reserves=True),
        _Rule(forward_first, has_whole_backwards=True, reserves=True),
    ):
        yield list_schedule(
            tables,
            rule.priority,
            max_bytes,
            has_whole_backwards=rule.has_whole_backwards,
            reserves=rule.reserves,
        )


def _shift_orders(
    tables: ActionTables,
    max_bytes: Sequence[float] | None,
    orders: list[SimulatedOrder],
) -> Iterator[IdRows | None]:
    """Yields the fastest, whether they fit or not, pushed late, then early again."""
    for order in _distinct(orders, _NUM_SHIFTED):
        yield list_schedule(
            tables,
            compute_latest_starts(order),
            max_bytes,
            has_whole_backwards=order.has_whole_backwards,
            reserves=False,
        )


def _run_one_at_a_time(tables: ActionTables) -> IdRows:
    """Each micro-batch forward and backward before the next begins.

    With one stage per rank no schedule holds less, on any rank: every schedule holds
    what a rank stores of one micro-batch with what other ranks send to it and leave
    there. There are two exceptions. Actions that take no time do not wait, so there may
    be more than one micro-batch at a time; and if the first stage stores less than its
    input, forwards free memory.
    """
    rows: IdRows = [[] for _ in range(tables.num_ranks)]
    stages = range(tables.num_stages)
    for i in range(tables.num_microbatches):
        for stage in stages:
            rows[tables.placement[stage]].append(tables.first_id(FORWARD, stage) + i)
        for stage in reversed(stages):
            rows[tables.placement[stage]].append(tables.first_id(BACKWARD, stage) + i)
    return rows


def _distinct(orders: Sequence[SimulatedOrder], count: int) -> list[SimulatedOrder]:
    """The first ``count`` orders of different makespans."""
    first: dict[float, SimulatedOrder] = {}
    for order in orders:
        first.setdefault(order.makespan, order)
    return list(first.values())[:count]


def _priorities_by_stage(
    tables: ActionTables, *, forward: Sequence[int], backward: Sequence[int]
) -> list[float]:
    """Priorities by ID, from those of each stage; earlier micro-batches first, W last.

    Args:
      tables: the costs of the actions.
      forward: the priority of the forwards of each stage.
      backward: that of its backwards and input gradients.
    """
    count = tables.num_microbatches
    weight = [3 * tables.num_stages] * tables.num_stages
    priorities: list[float] = []
    for priority in (*forward, *backward, *backward, *weight):
        priorities += [float(priority * count + i) for i in range(count)]
    return priorities


def list_catalogue(
    num_ranks: int, num_microbatches: int, num_chunks: int
) -> list[Schedule]:
    """The schedules of the catalogue that have this number of stages per rank."""
    schedules: list[Schedule] = []
    for entry in map(CATALOGUE.__getitem__, TRAINING):
        if entry.num_chunks == num_chunks:
            # Some builders need more micro-batches.
            with contextlib.suppress(ScheduleError):
                schedules.append(entry.build(num_ranks, num_microbatches))
    return schedules
