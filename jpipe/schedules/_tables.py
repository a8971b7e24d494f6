"""The simulator: each rank runs in its order, each action once it can."""

import dataclasses
import functools
import heapq
import operator
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from ._action import (
    BACKWARD,
    FORWARD,
    INPUT,
    LOCAL_READS,
    OPS,
    WEIGHT,
    Action,
    remote_read,
)
from ._costs import Costs, at
from ._homes import Homes

Rows = tuple[tuple[Action, ...], ...]
# The actions of each rank, in order, as numbers.
Numbered = list[list[int]]
# Ranks, and the bytes by which what each holds changes.
Changes = list[tuple[int, float]]
# The end of what did not run.
NEVER = -1.0


class Tables:
    """What every action of a placement costs, by its number.

    The number of an action is ``(op * S + stage) * M + microbatch``, op as in `OPS`.
    Costs are looked up once, for those who try many orders.

    Args:
      costs: what each action costs.
      placement: the rank of each stage.
      num_ranks: the number of ranks.
      num_microbatches: the number of micro-batches.
      homes: the ranks that run each micro-batch; default: those of the placement.
      training: whether there are backwards.

    Attributes:
      seconds: the time of each action.
      local: the action of its own rank that it reads; -1 if there is none.
      remote: the action of the stage before or after that it reads, likewise.
      delay: how long after its end what is read from `remote` arrives.
      exchange: for how long the step goes on after the last of its stage.
      result: itself; of a whole backward the first half, as which it is read.
      changes: the bytes that it adds to ranks, one after the other.
      skips: the actions that skip connections of it come from, and how long they take.
      at_start: the bytes of each rank before the first action.
    """

    def __init__(
        self,
        costs: Costs,
        placement: Sequence[int],
        num_ranks: int,
        num_microbatches: int,
        homes: Homes | None = None,
        training: bool = True,
    ) -> None:
        self.costs, self.placement = costs, tuple(placement)
        self.homes = Homes(self.placement) if homes is None else homes
        self._training = training
        self.num_ranks, self.num_microbatches = num_ranks, num_microbatches
        self.num_stages = len(self.placement)
        self.stages_of: list[list[int]] = [[] for _ in range(num_ranks)]
        for stage, rank in enumerate(self.placement):
            self.stages_of[rank].append(stage)
        self.seconds: list[float] = []
        self.local: list[int] = []
        self.remote: list[int] = []
        self.delay: list[float] = []
        self.exchange: list[float] = []
        self.result: list[int] = []
        self.changes: list[Changes] = []
        self.skips: dict[int, list[tuple[int, float]]] = {}
        count = num_microbatches
        # What does not differ between micro-batches is looked up for one of them.
        every = range(1 if costs.is_uniform and self.homes.are_fixed else count)
        for op in OPS:
            for stage in range(self.num_stages):
                some = [Action(op, stage, i) for i in every]
                copies = count // len(some)
                self.seconds += [costs.of(action) for action in some] * copies
                self.changes += [self._changes(action) for action in some] * copies
                local, remote, delay = self._reads(op, stage, some)
                self.local += _numbers(local, count)
                self.remote += _numbers(remote, count)
                self.delay += delay * copies
                exchange = 0.0 if op == FORWARD else at(costs.exchange, stage)
                self.exchange += [exchange] * count
                to = INPUT if op == BACKWARD else op
                self.result += _numbers(self.first(to, stage), count)
                self._add_skips(op, stage)
        self.at_start = self._at_start()

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
        """The bytes that an action adds to ranks, one after the other."""
        own, sent = changes_of(action, self.costs, self.num_stages - 1, self._training)
        rank_of = self.homes[action.microbatch]
        rank, away = rank_of[action.stage], defaultdict[int, float](float)
        for stage, size in sent:
            if rank_of[stage] != rank and size:
                away[rank_of[stage]] += size
        changes = [(rank, own + sum(size for _, size in sent)), *away.items()]
        return [*changes, (rank, -sum(away.values()))] if away else changes

    def _reads(
        self, op: str, stage: int, some: list[Action]
    ) -> tuple[int, int, list[float]]:
        """What an op of a stage reads of its own rank and of another, and the delay."""
        local = self.first(LOCAL_READS[op], stage) if op in LOCAL_READS else -1
        read = remote_read(op, stage, self.num_stages)
        if read is None:
            return local, -1, [0.0] * len(some)
        delays = [
            self.costs.transfer(Action(*read, i))
            if self.homes[i][read[1]] != self.homes[i][stage]
            else 0.0
            for _, _, i in some
        ]
        return local, self.first(*read), delays

    def _add_skips(self, op: str, stage: int) -> None:
        for i in range(self.num_microbatches if self.costs.skips else 0):
            action, rank_of = Action(op, stage, i), self.homes[i]
            for sender, seconds in self.costs.skip_transfers(action):
                if rank_of[sender.stage] != rank_of[stage]:
                    found = self.skips.setdefault(self.number(action), [])
                    found.append((self.number(sender), seconds))

    def _at_start(self) -> list[float]:
        """The bytes of each rank before the first action."""
        costs, held = self.costs, [0.0] * self.num_ranks
        for stage in range(self.num_stages):
            for i in range(self.num_microbatches):
                rank = self.homes[i][stage]
                held[rank] += at(costs.extra_bytes, stage, i)
                held[rank] += 0 if stage else at(costs.boundary_bytes, stage, i)
        for stage in range(self.num_stages):
            for size in (
                costs.parameter_bytes,
                costs.accumulator_bytes if self._training else 0,
                costs.shared_bytes,
            ):
                for rank in self.homes.ranks(stage):
                    held[rank] += at(size, stage)
        return held

    def memory(self, order: Iterable[int]) -> Iterator[tuple[int, int, float]]:
        """What ranks hold after each change, where actions run one after the other.

        What an action reads is freed when it ends; what it sends to another rank is
        held by both until it has been sent, then by the receiver.

        Args:
          order: of all actions.

        Yields:
          An action, a rank whose bytes it changes, and how many it then holds.
        """
        held, shared = [*self.at_start], self.costs.shared_bytes
        count = self.num_microbatches
        # Of what the micro-batches of a stage share on a rank.
        readers = Counter(
            (stage, self.homes[i][stage])
            for stage in range(self.num_stages if shared else 0)
            for i in range(count)
        )
        first, end = self.first(BACKWARD, 0), self.first(WEIGHT, 0)
        for number in order:
            changes = self.changes[number]
            if shared and (first <= number < end or not self._training):
                stage = number // count % self.num_stages
                rank, change = changes[0]
                readers[stage, rank] -= 1
                if not readers[stage, rank]:
                    freed = rank, change - at(shared, stage)
                    changes = [freed, *changes[1:]]
            for rank, change in changes:
                held[rank] += change
                yield number, rank, held[rank]

    @functools.cached_property
    def dispatch(self) -> "Tables":
        """The same actions with the times that tell the order of dispatch."""
        return Tables(Costs(), self.placement, self.num_ranks, self.num_microbatches)

    def run(self, rows: Numbered) -> "Run | None":
        """Runs each rank in its order; ``None`` if ranks wait for each other."""
        local, remote, delay, result = self.local, self.remote, self.delay, self.result
        seconds, skips = self.seconds, self.skips
        end = [NEVER] * len(seconds)
        free, position = [0.0] * len(rows), [0] * len(rows)
        order: list[int] = []
        starts: list[float] = []
        waiting: dict[int, list[int]] = {}
        turns = list(range(len(rows)))
        # Ranks are looked at in rounds, in their order; one that waits for an action is
        # looked at again when that has run: in this round, if its turn is still to
        # come.
        while turns:
            later: list[int] = []
            while turns:
                rank = heapq.heappop(turns)
                row, now = rows[rank], free[rank]
                at = position[rank]
                for at in range(at, len(row)):  # noqa: B020
                    number = row[at]
                    start = now
                    if (read := remote[number]) >= 0:
                        arrival = end[read]
                        if arrival < 0:
                            waiting.setdefault(read, []).append(rank)
                            break
                        arrival += delay[number]
                        if arrival > start:
                            start = arrival
                    if (read := local[number]) >= 0:
                        arrival = end[read]
                        if arrival < 0:
                            return None
                        if arrival > start:
                            start = arrival
                    if skips and number in skips:
                        start = max(start, *(end[s] + t for s, t in skips[number]))
                    result_of = result[number]
                    end[result_of] = stop = start + seconds[number]
                    # What takes no time, such as a forward that its backward does on
                    # the way, holds nobody up.
                    if stop > start:
                        now = stop
                    order.append(number)
                    starts.append(start)
                    for other in waiting.pop(result_of, ()):
                        heapq.heappush(turns if other > rank else later, other)
                else:
                    at = len(row)
                position[rank], free[rank] = at, now
            turns = later
        if len(order) < sum(map(len, rows)):
            return None
        return Run(self, rows, order, starts, end)


@dataclasses.dataclass
class Run:
    """An order that has been run.

    Attributes:
      tables: what it was run with.
      rows: the order of each rank.
      order: all actions in an order of execution.
      starts: when each of them starts.
      end: when each result ends; below 0 for what did not run.
    """

    tables: Tables
    rows: Numbered
    order: list[int]
    starts: list[float]
    end: list[float]

    def __post_init__(self) -> None:
        result, end, more = self.tables.result, self.end, self.tables.exchange
        self.ends = [end[result[number]] for number in self.order]
        later = map(more.__getitem__, self.order)
        self.makespan = max(map(operator.add, self.ends, later), default=0.0)

    def peaks(self) -> list[float]:
        """The most bytes that each rank holds, as `Timeline.peak_bytes`."""
        tables, peaks = self.tables, [*self.tables.at_start]
        dispatched = tables.dispatch.run(self.rows)
        assert dispatched
        for _, rank, held in tables.memory(dispatched.by_end()):
            if held > peaks[rank]:
                peaks[rank] = held
        return peaks

    def by_end(self) -> Iterable[int]:
        """All actions in the order in which they end."""
        at = sorted(range(len(self.order)), key=self.ends.__getitem__)
        return map(self.order.__getitem__, at)


def _numbers(first: int, count: int) -> Iterable[int]:
    """Of all micro-batches, from that of the first; -1 stays."""
    return range(first, first + count) if first >= 0 else [-1] * count


def changes_of(
    action: Action, costs: Costs, last: int, training: bool
) -> tuple[float, list[tuple[int, float]]]:
    """The bytes that an action adds to its stage, and those that it sends to others."""
    op, stage, i = action
    residual, extra = (
        at(costs.residual_bytes, stage, i),
        at(costs.extra_bytes, stage, i),
    )
    pending = at(costs.pending_bytes, stage, i)
    arrived = [skip for skip in costs.skips if skip.target == stage]
    left = [skip for skip in costs.skips if skip.source == stage]
    if op == FORWARD:
        stored = residual if training else -extra
        stored += at(costs.emitted_bytes, stage, i) - at(costs.boundary_bytes, stage, i)
        stored -= sum(at(skip.bytes, i) for skip in arrived)
        sent = [(skip.target, at(skip.bytes, i)) for skip in left]
        if stage < last:
            sent.append((stage + 1, at(costs.boundary_bytes, stage + 1, i)))
        return stored, sent
    if op not in (BACKWARD, INPUT):
        return -pending, []
    freed = residual + extra + (costs.cotangent(stage + 1, i) if stage < last else 0)
    freed += sum(at(skip.cotangent_bytes, i) for skip in left)
    sent = [(skip.source, at(skip.cotangent_bytes, i)) for skip in arrived]
    if stage:
        sent.append((stage - 1, costs.cotangent(stage, i)))
    return (pending if op == INPUT else 0) - freed, sent
