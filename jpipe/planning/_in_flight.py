"""The arrays that each rank holds at each moment of a step, counted.

Arrays are taken and freed in the order in which a step dispatches its actions, however
long these take. So the counts are those of a schedule, whatever its costs:

    F   frees the input, stores residuals, sends the output
    B   frees residuals and the gradient of the output, sends the gradient of the input
    I   does so too, and leaves what W reads
    W   frees that

While a rank sends an array, both ends hold it. A forward that is fused with its
backward frees and stores nothing.
"""

import itertools
from collections.abc import Collection, Iterable, Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from ..schedules import Schedule
from ..schedules._action import FORWARD, INPUT, WEIGHT

Counts = npt.NDArray[np.intp]


class Held(IntEnum):
    """The arrays of a stage that a rank holds, each of one micro-batch."""

    RESIDUALS = 0
    PENDING = 1  # from I to W
    INPUT = 2
    OUTPUT_GRAD = 3
    SENT_OUTPUT = 4
    SENT_INPUT_GRAD = 5


def list_stages(placement: Sequence[int], num_ranks: int) -> list[tuple[int, ...]]:
    """The stages of each rank."""
    stages: list[list[int]] = [[] for _ in range(num_ranks)]
    for stage, rank in enumerate(placement):
        stages[rank].append(stage)
    return list(map(tuple, stages))


def count_in_flight(
    schedule: Schedule, fused_microbatches: Collection[int] = ()
) -> list[Counts]:
    """Counts the arrays of each rank, at all moments at which it may hold most.

    Args:
      schedule: the actions; one rank for each stage.
      fused_microbatches: the micro-batches whose forward in the last stage is fused
        with its backward.

    Returns:
      For each rank the numbers of arrays: ``[moments, stages of the rank, Held]``.
    """
    placement = schedule.placement
    last = schedule.num_stages - 1
    counts = [[0] * len(Held) for _ in placement]
    counts[0][Held.INPUT] = schedule.num_microbatches
    stages_of = list_stages(placement, schedule.num_ranks)
    moments: list[set[tuple[int, ...]]] = [set() for _ in schedule.rows]

    def record(rank: int) -> None:
        held = itertools.chain.from_iterable(counts[stage] for stage in stages_of[rank])
        moments[rank].add(tuple(held))

    for rank in range(schedule.num_ranks):
        record(rank)
    for op, stage, microbatch in schedule.order():
        held = counts[stage]
        is_fused = stage == last and microbatch in fused_microbatches
        stored = Held.INPUT if is_fused else Held.RESIDUALS
        receiver = None
        if op == FORWARD:
            held[Held.INPUT] -= 1
            held[stored] += 1
            if stage < last:
                receiver = stage + 1
        elif op == WEIGHT:
            held[Held.PENDING] -= 1
        else:
            held[stored] -= 1
            if op == INPUT:
                held[Held.PENDING] += 1
            if stage < last:
                held[Held.OUTPUT_GRAD] -= 1
            if stage > 0:
                receiver = stage - 1
        if receiver is None:
            record(placement[stage])
            continue

        counts[receiver][Held.INPUT if op == FORWARD else Held.OUTPUT_GRAD] += 1
        sent = Held.SENT_OUTPUT if op == FORWARD else Held.SENT_INPUT_GRAD
        crosses = placement[receiver] != placement[stage]
        held[sent] += crosses
        record(placement[stage])
        held[sent] -= crosses
        record(placement[receiver])

    in_flight: list[Counts] = []
    for stages, rank_moments in zip(stages_of, moments, strict=True):
        rows = _drop_dominated(rank_moments)
        in_flight.append(rows.reshape(len(rows), len(stages), len(Held)))
    return in_flight


def _drop_dominated(rows: Iterable[tuple[int, ...]]) -> Counts:
    """The rows that no other row exceeds in each of its numbers."""
    by_sum = sorted(rows, key=lambda row: (sum(row), row), reverse=True)
    maximal = np.array(by_sum[:1], np.intp)
    for row in by_sum[1:]:
        if not (maximal >= row).all(axis=1).any():
            maximal = np.vstack([maximal, row])
    return maximal
