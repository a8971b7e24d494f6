"""The arrays that each rank holds at each moment of a step, counted.

Arrays are taken and freed in the order in which a step dispatches its actions, however
long these take. So the counts are those of a schedule, whatever its costs:

    F   frees the input, stores residuals, sends the output
    B   frees residuals and the gradient of the output, sends the gradient of the input
    I   does so too, and leaves what W reads
    W   frees that

While a rank sends an array, both ends hold it; so they do those of skip connections,
which go from a stage to a later one. A forward that is fused with its backward frees
and stores nothing.
"""

import functools
import itertools
from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..schedules import Schedule
from ..schedules._action import FORWARD, INPUT, OPS, WEIGHT
from ..schedules._placement import group_by_rank
from ._fused import find_fused_microbatches

Counts = npt.NDArray[np.intp]


class Held(IntEnum):
    """The arrays of a stage that a rank holds, each of one micro-batch."""

    RESIDUALS = 0
    PENDING = 1  # from I to W
    INPUT = 2
    OUTPUT_GRAD = 3
    SENT_OUTPUT = 4
    SENT_INPUT_GRAD = 5


class _Transfer(NamedTuple):
    """An array that goes to another stage.

    Attributes:
      sender: the counts of what its sender holds.
      sent: the array among them.
      receiver_rank: the rank of the other stage.
      receiver: the counts of what that one holds.
      received: the array among them.
    """

    sender: list[int]
    sent: Held
    receiver_rank: int
    receiver: list[int]
    received: Held


@functools.lru_cache(maxsize=64)
def count_in_flight(
    schedule: Schedule,
    *,
    has_fused: bool = True,
    skips: tuple[tuple[int, int], ...] = (),
) -> list[Counts]:
    """Counts the arrays of each rank, at all moments at which it may hold most.

    Args:
      schedule: the actions; one rank for each stage.
      has_fused: True if forwards of the last stage are fused with the backwards that
        follow them.
      skips: the stages of each skip connection: that from which its array comes, and
        the one that reads it.

    Returns:
      For each rank the numbers of arrays: ``[moments, stages of the rank and skips,
      Held]``. Of a skip connection a rank holds the arrays of its own end.
    """
    placement = schedule.placement
    last = schedule.num_stages - 1
    fused_microbatches = find_fused_microbatches(schedule) if has_fused else set[int]()
    counts = [[0] * len(Held) for _ in placement]
    counts[0][Held.INPUT] = schedule.num_microbatches
    stages_of = group_by_rank(placement, schedule.num_ranks)
    # rank -> skip -> its counts there
    skip_counts = [[[0] * len(Held) for _ in skips] for _ in schedule.rows]
    moments: list[set[tuple[int, ...]]] = [set() for _ in schedule.rows]

    def record(rank: int) -> None:
        held = itertools.chain(
            *(counts[stage] for stage in stages_of[rank]), *skip_counts[rank]
        )
        moments[rank].add(tuple(held))

    def list_transfers(op: str, stage: int) -> list[_Transfer]:
        """The arrays that a stage sends."""
        transfers: list[_Transfer] = []
        is_forward = op == FORWARD
        sent = Held.SENT_OUTPUT if is_forward else Held.SENT_INPUT_GRAD
        received = Held.INPUT if is_forward else Held.OUTPUT_GRAD
        neighbor = stage + 1 if is_forward else stage - 1
        if 0 <= neighbor <= last:
            transfer = _Transfer(
                counts[stage], sent, placement[neighbor], counts[neighbor], received
            )
            transfers.append(transfer)
        for index, ends in enumerate(skips):
            begin, end = ends if is_forward else reversed(ends)
            if begin == stage:
                sender = skip_counts[placement[begin]][index]
                receiver = skip_counts[placement[end]][index]
                transfer = _Transfer(sender, sent, placement[end], receiver, received)
                transfers.append(transfer)
        return transfers

    transfers_of = {
        (op, stage): list_transfers(op, stage)
        for op in OPS
        for stage in range(schedule.num_stages)
        if op != WEIGHT
    }
    # stage -> the counts of the skips that it reads, and of those that it sends
    read_skips: list[list[list[int]]] = [[] for _ in placement]
    sent_skips: list[list[list[int]]] = [[] for _ in placement]
    for index, (source, target) in enumerate(skips):
        read_skips[target].append(skip_counts[placement[target]][index])
        sent_skips[source].append(skip_counts[placement[source]][index])

    for rank in range(schedule.num_ranks):
        record(rank)
    for op, stage, microbatch in schedule.order():
        rank = placement[stage]
        held = counts[stage]
        is_fused = stage == last and microbatch in fused_microbatches
        if op == WEIGHT:
            held[Held.PENDING] -= 1
            record(rank)
            continue
        is_forward = op == FORWARD
        if is_forward != is_fused:
            for inputs in (held, *read_skips[stage]):
                inputs[Held.INPUT] -= 1
        if not is_fused:
            held[Held.RESIDUALS] += 1 if is_forward else -1
        if not is_forward:
            if op == INPUT:
                held[Held.PENDING] += 1
            if stage < last:
                held[Held.OUTPUT_GRAD] -= 1
            for grads in sent_skips[stage]:
                grads[Held.OUTPUT_GRAD] -= 1

        crossing: list[_Transfer] = []
        for transfer in transfers_of[op, stage]:
            if transfer.receiver_rank == rank:
                transfer.receiver[transfer.received] += 1
            else:
                transfer.sender[transfer.sent] += 1
                crossing.append(transfer)
        record(rank)
        for transfer in crossing:
            transfer.receiver[transfer.received] += 1
            record(transfer.receiver_rank)
        for transfer in crossing:
            transfer.sender[transfer.sent] -= 1

    in_flight: list[Counts] = []
    for rank, rank_moments in enumerate(moments):
        # Skips are those of one cut, for which dropping rows takes more than it saves.
        rows = np.array([*rank_moments]) if skips else _drop_dominated(rank_moments)
        num_held = len(stages_of[rank]) + len(skips)
        in_flight.append(rows.reshape(len(rows), num_held, len(Held)))
    return in_flight


def _drop_dominated(rows: Iterable[tuple[int, ...]]) -> Counts:
    """The rows that no other row exceeds in each of its numbers."""
    by_sum = sorted(rows, key=lambda row: (sum(row), row), reverse=True)
    maximal = np.array(by_sum[:1], np.intp)
    for row in by_sum[1:]:
        if not (maximal >= row).all(axis=1).any():
            maximal = np.vstack([maximal, row])
    return maximal
