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
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..schedules import Schedule
from ..schedules._action import FORWARD, INPUT, WEIGHT
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


class _CountedStep:
    """The arrays that all ranks hold, now and at each moment of a step so far.

    Args:
      schedule: the actions.
      skips: the stages of each skip connection.

    Attributes:
      moments: for each rank, the different numbers of arrays that it held.
    """

    def __init__(self, schedule: Schedule, skips: Sequence[tuple[int, int]]) -> None:
        placement = schedule.placement
        self._placement = placement
        self._stages = [[0] * len(Held) for _ in placement]
        self._stages[0][Held.INPUT] = schedule.num_microbatches
        # rank -> the counts of its stages, and of its ends of skip connections
        self._ranks = [
            [self._stages[stage] for stage in rank_stages]
            + [[0] * len(Held) for _ in skips]
            for rank_stages in group_by_rank(placement, schedule.num_ranks)
        ]
        # stage -> the counts among which its inputs are, and those of its outputs
        self._inputs: list[list[list[int]]] = [[] for _ in placement]
        self._outputs: list[list[list[int]]] = [[] for _ in placement]
        # stage -> what it sends in a forward, and in a backward
        self._sent: list[list[_Transfer]] = [[] for _ in placement]
        self._sent_back: list[list[_Transfer]] = [[] for _ in placement]
        self._inputs[0].append(self._stages[0])  # the mini-batch
        for stage in range(len(placement) - 1):
            sender, receiver = self._stages[stage : stage + 2]
            self._connect(stage, stage + 1, sender, receiver)
        for place, (source, target) in enumerate(skips, start=-len(skips)):
            sender = self._ranks[placement[source]][place]
            receiver = self._ranks[placement[target]][place]
            self._connect(source, target, sender, receiver)
        self.moments: list[set[tuple[int, ...]]] = [set() for _ in schedule.rows]
        for rank in range(schedule.num_ranks):
            self._record(rank)

    def run(self, op: str, stage: int, *, is_fused: bool) -> None:
        """Runs an action: it frees arrays, stores some, and sends some.

        Args:
          op: the op.
          stage: the stage.
          is_fused: True if forward and backward of the micro-batch are one program.
        """
        rank = self._placement[stage]
        held = self._stages[stage]
        if op == WEIGHT:
            held[Held.PENDING] -= 1
            self._record(rank)
            return
        is_forward = op == FORWARD
        if is_forward != is_fused:
            for inputs in self._inputs[stage]:
                inputs[Held.INPUT] -= 1
        if not is_fused:
            held[Held.RESIDUALS] += 1 if is_forward else -1
        if op == INPUT:
            held[Held.PENDING] += 1
        if not is_forward:
            for outputs in self._outputs[stage]:
                outputs[Held.OUTPUT_GRAD] -= 1
        self._send(rank, self._sent[stage] if is_forward else self._sent_back[stage])

    def _connect(
        self, source: int, target: int, sender: list[int], receiver: list[int]
    ) -> None:
        """Lets a stage send an array to a later one, and that one its gradient back."""
        self._outputs[source].append(sender)
        self._inputs[target].append(receiver)
        source_rank = self._placement[source]
        target_rank = self._placement[target]
        self._sent[source].append(
            _Transfer(sender, Held.SENT_OUTPUT, target_rank, receiver, Held.INPUT)
        )
        self._sent_back[target].append(
            _Transfer(
                receiver, Held.SENT_INPUT_GRAD, source_rank, sender, Held.OUTPUT_GRAD
            )
        )

    def _send(self, rank: int, transfers: Sequence[_Transfer]) -> None:
        """Sends arrays one after the other; both ranks hold them meanwhile."""
        crossing = [x for x in transfers if x.receiver_rank != rank]
        for transfer in transfers:
            if transfer.receiver_rank == rank:
                transfer.receiver[transfer.received] += 1
        for transfer in crossing:
            transfer.sender[transfer.sent] += 1
        self._record(rank)
        for transfer in crossing:
            transfer.receiver[transfer.received] += 1
            self._record(transfer.receiver_rank)
        for transfer in crossing:
            transfer.sender[transfer.sent] -= 1

    def _record(self, rank: int) -> None:
        """Adds a moment of a rank."""
        self.moments[rank].add(tuple(itertools.chain(*self._ranks[rank])))


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
    last = schedule.num_stages - 1
    fused_microbatches = find_fused_microbatches(schedule) if has_fused else set[int]()
    step = _CountedStep(schedule, skips)
    for op, stage, microbatch in schedule.order():
        is_fused = stage == last and microbatch in fused_microbatches
        step.run(op, stage, is_fused=is_fused)
    in_flight: list[Counts] = []
    for moments in step.moments:
        # Skips are those of one cut, for which dropping rows takes more than it saves.
        rows = np.array([*moments]) if skips else _drop_dominated(moments)
        in_flight.append(rows.reshape(len(rows), -1, len(Held)))
    return in_flight


def _drop_dominated(rows: Iterable[tuple[int, ...]]) -> Counts:
    """The rows that no other row exceeds in each of its numbers."""
    by_sum = sorted(rows, key=lambda row: (sum(row), row), reverse=True)
    maximal = np.array(by_sum[:1], np.intp)
    for row in by_sum[1:]:
        if not (maximal >= row).all(axis=1).any():
            maximal = np.vstack([maximal, row])
    return maximal
