"""What a schedule keeps at the same time on each rank, counted in micro-batches."""

from collections.abc import Sequence
from typing import NamedTuple

from ..schedules import Schedule
from ..schedules._action import FORWARD, INPUT, WEIGHT


class Held(NamedTuple):
    """What one rank holds when it holds most.

    Attributes:
      stages: those that it runs.
      counts: each a moment: of how many micro-batches each stage waits for a backward,
        then of how many each waits for the second half of one. No moment holds more
        of everything than another.
    """

    stages: tuple[int, ...]
    counts: tuple[tuple[int, ...], ...]


def of_schedule(schedule: Schedule) -> tuple[Held, ...]:
    """What each rank of a schedule holds."""
    return tuple(
        _of_rank(
            schedule, rank, [s for s, r in enumerate(schedule.placement) if r == rank]
        )
        for rank in range(schedule.num_ranks)
    )


def of_one_f_one_b(num_stages: int, num_microbatches: int | None) -> tuple[Held, ...]:
    """What each rank holds under 1F1B, with as many micro-batches as there may be."""
    most = num_stages if num_microbatches is None else num_microbatches
    return tuple(
        Held((stage,), ((min(num_stages - stage, most), 0),))
        for stage in range(num_stages)
    )


def _of_rank(schedule: Schedule, rank: int, stages: Sequence[int]) -> Held:
    place = {stage: i for i, stage in enumerate(stages)}
    now = [0] * (2 * len(stages))
    seen = {tuple(now): None}
    for op, stage, _ in schedule.rows[rank]:
        i, after = place[stage], place[stage] + len(stages)
        now[after if op == WEIGHT else i] += 1 if op == FORWARD else -1
        if op == INPUT:
            now[after] += 1
        seen[tuple(now)] = None
    most: list[tuple[int, ...]] = []
    for counts in sorted(seen, reverse=True):
        if not any(all(map(int.__ge__, other, counts)) for other in most):
            most.append(counts)
    return Held(tuple(stages), tuple(most))
