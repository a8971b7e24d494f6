"""What a schedule stores at the same time on each rank, counted in micro-batches."""

from typing import NamedTuple

from ..schedules import Schedule
from ..schedules._action import FORWARD, INPUT, WEIGHT


class InFlight(NamedTuple):
    """What one rank has in flight.

    Attributes:
      stages: those that it runs.
      counts: each a moment: of how many micro-batches each stage waits for a backward,
        then of how many each waits for the weight gradient.
    """

    stages: tuple[int, ...]
    counts: tuple[tuple[int, ...], ...]


def in_flight(schedule: Schedule) -> tuple[InFlight, ...]:
    """What each rank of a schedule has in flight, at all moments that differ."""
    return tuple(_of_rank(schedule, rank) for rank in range(schedule.num_ranks))


def _of_rank(schedule: Schedule, rank: int) -> InFlight:
    stages = [s for s, own in enumerate(schedule.placement) if own == rank]
    place = {stage: i for i, stage in enumerate(stages)}
    now = [0] * (2 * len(stages))
    moments = {tuple(now)}
    for op, stage, _ in schedule.rows[rank]:
        i, after = place[stage], place[stage] + len(stages)
        now[after if op == WEIGHT else i] += 1 if op == FORWARD else -1
        if op == INPUT:
            now[after] += 1
        moments.add(tuple(now))
    return InFlight(tuple(stages), tuple(sorted(moments)))
