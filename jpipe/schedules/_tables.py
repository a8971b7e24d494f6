"""Costs looked up once: actions as numbers, for those who try many orders."""

import dataclasses
import functools
import heapq
import operator
from collections.abc import Iterable, Sequence

from ._action import BACKWARD, FORWARD, INPUT, OPS, WEIGHT, Action
from ._costs import Costs, at
from ._simulate import Rows, changes_by_rank, changes_of

# The actions of each rank, in order, as numbers.
Numbered = list[list[int]]
# Ranks, and the bytes by which what each holds changes.
Changes = list[tuple[int, float]]


class Tables:
    """What every action of a placement costs, by its number.

    The number of an action is ``(op * S + stage) * M + microbatch``, op as in `OPS`.
    Orders are timed and their bytes counted as `simulate` does it, to the bit.

    Args:
      costs: what each action costs.
      placement: the rank of each stage.
      num_ranks: the number of ranks.
      num_microbatches: the number of micro-batches.

    Attributes:
      seconds: the time of each action.
      own: the action of its own rank that it reads; -1 if there is none.
      far: the action of the stage before or after that it reads, likewise.
      delay: how long after its end what is read from `far` arrives.
      exchange: for how long the step goes on after the last of its stage.
      slot: itself; of a whole backward the first half, as which it is read.
      changes: the bytes that it adds to ranks, one after the other.
    """

    def __init__(
        self,
        costs: Costs,
        placement: Sequence[int],
        num_ranks: int,
        num_microbatches: int,
    ) -> None:
        self.costs, self.placement = costs, tuple(placement)
        self.num_ranks, self.num_microbatches = num_ranks, num_microbatches
        self.num_stages = len(self.placement)
        self.stages_of: list[list[int]] = [[] for _ in range(num_ranks)]
        for stage, rank in enumerate(self.placement):
            self.stages_of[rank].append(stage)
        self.seconds: list[float] = []
        self.own: list[int] = []
        self.far: list[int] = []
        self.delay: list[float] = []
        self.exchange: list[float] = []
        self.slot: list[int] = []
        self.changes: list[Changes] = []
        self.skips: dict[int, list[tuple[int, float]]] = {}
        count = num_microbatches
        # Costs that do not differ between micro-batches are looked up for one of them.
        every = range(count if _vary(costs) else 1)
        for op in OPS:
            for stage in range(self.num_stages):
                some = [Action(op, stage, i) for i in every]
                copies = count // len(some)
                self.seconds += [costs.of(action) for action in some] * copies
                self.changes += [self._changes(action) for action in some] * copies
                own, far, delay = self._reads(op, stage, some)
                self.own += _numbers(own, count)
                self.far += _numbers(far, count)
                self.delay += delay * copies
                exchange = 0.0 if op == FORWARD else at(costs.exchange, stage)
                self.exchange += [exchange] * count
                to = INPUT if op == BACKWARD else op
                self.slot += _numbers(self.first(to, stage), count)
                self._add_skips(op, stage)
        self._held = self._at_start()

    def first(self, op: str, stage: int) -> int:
        """The number of an op of a stage on micro-batch 0; the others follow."""
        return (OPS.index(op) * self.num_stages + stage) * self.num_microbatches

    def number(self, action: Action) -> int:
        """The number of an action."""
        return self.first(action.op, action.stage) + action.microbatch

    def action(self, number: int) -> Action:
        """The action of a number."""
        rest, microbatch = divmod(number, self.num_microbatches)
        op, stage = divmod(rest, self.num_stages)
        return Action(OPS[op], stage, microbatch)

    def numbered(self, rows: Rows) -> Numbered:
        """Rows of actions as rows of numbers."""
        return [[self.number(action) for action in row] for row in rows]

    def actions(self, rows: Numbered) -> Rows:
        """And back."""
        return tuple(tuple(map(self.action, row)) for row in rows)

    def _changes(self, action: Action) -> Changes:
        own, sent = changes_of(action, self.costs, self.num_stages - 1, True)
        home, where = self.placement[action.stage], self.placement
        return [each for each in changes_by_rank(home, own, sent, where) if each[1]]

    def _reads(
        self, op: str, stage: int, some: list[Action]
    ) -> tuple[int, int, list[float]]:
        """What an op of a stage reads of its own rank and of another, and the delay."""
        own, far, other = -1, -1, stage
        if op == FORWARD:
            if stage:
                other = stage - 1
                far = self.first(FORWARD, other)
        elif op == WEIGHT:
            own = self.first(INPUT, stage)
        else:
            own = self.first(FORWARD, stage)
            if stage + 1 < self.num_stages:
                other = stage + 1
                far = self.first(INPUT, other)
        moved = self.placement[other] != self.placement[stage]
        sent = FORWARD if op == FORWARD else INPUT
        delays = [
            self.costs.transfer(Action(sent, other, action.microbatch))
            if moved
            else 0.0
            for action in some
        ]
        return own, far, delays

    def _add_skips(self, op: str, stage: int) -> None:
        for i in range(self.num_microbatches if self.costs.skips else 0):
            action = Action(op, stage, i)
            found = [
                (self.first(self._read_as(sender), sender.stage) + i, seconds)
                for sender, seconds in self.costs.skip_transfers(action)
                if self.placement[sender.stage] != self.placement[stage]
            ]
            if found:
                self.skips[self.number(action)] = found

    def _read_as(self, sender: Action) -> str:
        return FORWARD if sender.op == FORWARD else INPUT

    def _at_start(self) -> list[float]:
        """The bytes of each rank before the first action of a training step."""
        costs, held = self.costs, [0.0] * self.num_ranks
        for stage, rank in enumerate(self.placement):
            for i in range(self.num_microbatches):
                held[rank] += at(costs.extra_bytes, stage, i)
                held[rank] += 0 if stage else at(costs.boundary_bytes, stage, i)
        for stage, rank in enumerate(self.placement):
            for size in (
                costs.parameter_bytes,
                costs.accumulator_bytes,
                costs.shared_bytes,
            ):
                held[rank] += at(size, stage)
        return held

    @functools.cached_property
    def dispatch(self) -> "Tables":
        """The same actions with the times that tell the order of dispatch."""
        return Tables(Costs(), self.placement, self.num_ranks, self.num_microbatches)

    @property
    def at_start(self) -> list[float]:
        """The bytes of each rank before the first action."""
        return list(self._held)

    def run(self, rows: Numbered) -> "Run | None":
        """Runs each rank in its order; ``None`` if ranks wait for each other."""
        own, far, delay, slot = self.own, self.far, self.delay, self.slot
        seconds, skips = self.seconds, self.skips
        end: list[float | None] = [None] * len(seconds)
        free, position = [0.0] * len(rows), [0] * len(rows)
        order: list[int] = []
        waiting: dict[int, list[int]] = {}
        turns = list(range(len(rows)))
        # As in `simulate`, round by round, so that what ends at the same time stands in
        # the same order.
        while turns:
            later: list[int] = []
            while turns:
                rank = heapq.heappop(turns)
                row, now = rows[rank], free[rank]
                at = position[rank]
                for at in range(at, len(row)):  # noqa: B020
                    number = row[at]
                    start = now
                    if (read := far[number]) >= 0:
                        arrival = end[read]
                        if arrival is None:
                            waiting.setdefault(read, []).append(rank)
                            break
                        arrival += delay[number]
                        if arrival > start:
                            start = arrival
                    if (read := own[number]) >= 0:
                        arrival = end[read]
                        if arrival is None:
                            return None
                        if arrival > start:
                            start = arrival
                    if skips and number in skips:
                        start = max(
                            start, *(_known(end[s]) + t for s, t in skips[number])
                        )
                    number_slot = slot[number]
                    end[number_slot] = stop = start + seconds[number]
                    if stop > start:
                        now = stop
                    order.append(number)
                    for other in waiting.pop(number_slot, ()):
                        heapq.heappush(turns if other > rank else later, other)
                else:
                    at = len(row)
                position[rank], free[rank] = at, now
            turns = later
        if len(order) < sum(map(len, rows)):
            return None
        return Run(self, rows, order, end)


@dataclasses.dataclass
class Run:
    """An order that has been run.

    Attributes:
      tables: what it was run with.
      rows: the order of each rank.
      order: all actions in an order of execution.
      end: when each slot ends; ``None`` for what did not run.
    """

    tables: Tables
    rows: Numbered
    order: list[int]
    end: list[float | None]

    def __post_init__(self) -> None:
        slot, end, more = self.tables.slot, self.end, self.tables.exchange
        self.ends = [_known(end[slot[number]]) for number in self.order]
        later = map(more.__getitem__, self.order)
        self.makespan = max(map(operator.add, self.ends, later), default=0.0)

    def peaks(self) -> list[float]:
        """The most bytes that each rank holds, as `Timeline.peak_bytes`."""
        tables, count = self.tables, self.tables.num_microbatches
        held, changes = tables.at_start, tables.changes
        peaks = list(held)
        left = [count] * tables.num_stages  # readers of what micro-batches share
        shared = tables.costs.shared_bytes
        whole, rest = tables.first(BACKWARD, 0), tables.first(WEIGHT, 0)
        dispatched = tables.dispatch.run(self.rows)
        assert dispatched
        for number in dispatched.by_end():
            if shared and whole <= number < rest:
                stage = number // count % tables.num_stages
                left[stage] -= 1
                if not left[stage]:
                    held[tables.placement[stage]] -= at(shared, stage)
            for rank, change in changes[number]:
                held[rank] += change
                if held[rank] > peaks[rank]:
                    peaks[rank] = held[rank]
        return peaks

    def by_end(self) -> Iterable[int]:
        """All actions in the order in which they end."""
        at = sorted(range(len(self.order)), key=self.ends.__getitem__)
        return map(self.order.__getitem__, at)


def _known(end: float | None) -> float:
    assert end is not None
    return end


def _numbers(first: int, count: int) -> Iterable[int]:
    """Of all micro-batches, from that of the first; -1 stays."""
    return range(first, first + count) if first >= 0 else [-1] * count


def _vary(costs: Costs) -> bool:
    """Whether something differs between the micro-batches of a stage."""
    values = (getattr(costs, field.name) for field in dataclasses.fields(costs))
    nested = any(
        isinstance(inner, Sequence)
        for value in values
        if isinstance(value, Sequence)
        for inner in value
        if not hasattr(inner, "_fields")
    )
    return nested or any(
        isinstance(size, Sequence)
        for skip in costs.skips
        for size in (skip.bytes, skip.cotangent_bytes)
    )
