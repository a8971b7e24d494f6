"""The simulator: each rank runs in its order, each action once it can."""

import dataclasses
import functools
import heapq
import itertools
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
)
from ._costs import Costs, Numbers, at
from ._placement import rank_of, ranks_of

Rows = tuple[tuple[Action, ...], ...]
# The actions of each rank, in order, as numbers.
Numbered = list[list[int]]
# Ranks, and the bytes by which what each holds changes.
Changes = list[tuple[int, float]]
# Stages, and the bytes that go from or to each: one number, or one per micro-batch.
Sent = list[tuple[int, Numbers]]
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
      training: whether there are backwards.
      rows: the actions of each rank, where several take turns at a stage.
      replicas: the ranks of each stage there.

    Attributes:
      seconds: the time of each action.
      reads: the actions that each action reads, -1 where it reads fewer than others,
        and how long after their end that arrives: the first of each, the second, ...
      exchange: for how long the step goes on after the last of its stage.
      result: itself; of a whole backward the first half, as which it is read.
      changes: the bytes that it adds to ranks, one after the other.
      at_start: the bytes of each rank before the first action.
    """

    def __init__(
        self,
        costs: Costs,
        placement: Sequence[int],
        num_ranks: int,
        num_microbatches: int,
        training: bool = True,
        rows: Rows = (),
        replicas: Sequence[Sequence[int]] = (),
    ) -> None:
        self.costs, self.placement = costs, tuple(placement)
        self.ranks_of = ranks_of(placement, replicas)
        self.rank_of = rank_of(placement, rows, replicas)
        self.training = training
        self.num_ranks, self.num_microbatches = num_ranks, num_microbatches
        self.num_stages = len(self.placement)
        # What an op of a stage gets of other stages, and what it sends to them.
        arrives: dict[tuple[str, int], Sent] = defaultdict(list)
        leaves: dict[tuple[str, int], Sent] = defaultdict(list)
        for source, target, size, cotangent in costs.links(self.num_stages):
            arrives[FORWARD, target].append((source, size))
            leaves[FORWARD, source].append((target, size))
            for op in (BACKWARD, INPUT):
                arrives[op, source].append((target, cotangent))
                leaves[op, target].append((source, cotangent))
        self.seconds: list[float] = []
        self.exchange: list[float] = []
        self.result: list[int] = []
        self.changes: list[Changes] = []
        self.reads: list[tuple[list[int], list[float]]] = []
        count = num_microbatches
        # What does not differ between micro-batches is looked up for one of them.
        is_uniform = costs.is_uniform and not replicas
        self._looked_up = range(1 if is_uniform else count)
        copies = count // len(self._looked_up)
        for op, stage in itertools.product(OPS, range(self.num_stages)):
            some = [Action(op, stage, i) for i in self._looked_up]
            ends = arrives[op, stage], leaves[op, stage]
            self.seconds += [costs.of(action) for action in some] * copies
            self.changes += [self._changes(action, *ends) for action in some] * copies
            exchange = 0.0 if op == FORWARD else at(costs.exchange, stage)
            self.exchange += [exchange] * count
            first = self.first(INPUT if op == BACKWARD else op, stage)
            self.result += range(first, first + count)
            self._add_reads(op, stage, arrives[op, stage], copies)
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

    def stage(self, number: int) -> int:
        """The stage of a number."""
        return number // self.num_microbatches % self.num_stages

    def numbered(self, rows: Rows) -> Numbered:
        """Rows of actions as rows of numbers."""
        return [[self.number(action) for action in row] for row in rows]

    def actions(self, rows: Numbered) -> Rows:
        """And back."""
        return tuple(tuple(map(self.action, row)) for row in rows)

    def _changes(self, action: Action, arrives: Sent, leaves: Sent) -> Changes:
        """The bytes that an action adds to ranks, one after the other."""
        (op, stage, i), costs = action, self.costs
        residual, pending, extra = (
            at(field, stage, i)
            for field in (costs.residual_bytes, costs.pending_bytes, costs.extra_bytes)
        )
        if op == FORWARD:
            own = at(costs.emitted_bytes, stage, i)
            own += residual if self.training else -extra
            own -= 0 if stage else at(costs.boundary_bytes, stage, i)
        elif op == WEIGHT:
            own = -pending
        else:
            own = (pending if op == INPUT else 0) - residual - extra
        own -= sum(at(size, i) for _, size in arrives)
        own += sum(at(size, i) for _, size in leaves)
        rank_of = self.rank_of[i]
        rank, away = rank_of[stage], defaultdict[int, float](float)
        for other, size in leaves:
            if rank_of[other] != rank and (sent := at(size, i)):
                away[rank_of[other]] += sent
        changes = [(rank, own), *away.items()]
        return [*changes, (rank, -sum(away.values()))] if away else changes

    def _add_reads(self, op: str, stage: int, arrives: Sent, copies: int) -> None:
        """What an op of a stage reads: of its own stage, then of others."""
        costs, count = self.costs, self.num_microbatches
        other_op = FORWARD if op == FORWARD else INPUT
        found = [(LOCAL_READS[op], stage, 0)] if op in LOCAL_READS else []
        found += [(other_op, other, size) for other, size in arrives]
        first = self.first(op, stage)
        for column, (read, other, size) in enumerate(found):
            if column == len(self.reads):
                total = len(OPS) * self.num_stages * count
                self.reads.append(([-1] * total, [0.0] * total))
            numbers, delays = self.reads[column]
            start = self.first(read, other)
            numbers[first : first + count] = range(start, start + count)
            delays[first : first + count] = [
                costs.latency + at(size, i) / costs.bandwidth
                if self.rank_of[i][other] != self.rank_of[i][stage]
                else 0.0
                for i in self._looked_up
            ] * copies

    def _at_start(self) -> list[float]:
        """The bytes of each rank before the first action."""
        costs, live = self.costs, [0.0] * self.num_ranks
        for stage in range(self.num_stages):
            for i in range(self.num_microbatches):
                rank = self.rank_of[i][stage]
                live[rank] += at(costs.extra_bytes, stage, i)
                live[rank] += 0 if stage else at(costs.boundary_bytes, stage, i)
            lasting = at(costs.parameter_bytes, stage) + at(costs.shared_bytes, stage)
            lasting += at(costs.accumulator_bytes, stage) if self.training else 0
            for rank in self.ranks_of[stage]:
                live[rank] += lasting
        return live

    def memory(self, order: Iterable[int]) -> Iterator[tuple[int, int, float]]:
        """What ranks hold after each change, where actions run one after the other.

        What an action reads is freed when it ends; what it sends to another rank is
        held by both until it has been sent, then by the receiver.

        Args:
          order: of all actions.

        Yields:
          An action, a rank whose bytes it changes, and how many it then holds.
        """
        live, shared = [*self.at_start], self.costs.shared_bytes
        count = self.num_microbatches
        # Of what the micro-batches of a stage share on a rank.
        readers = Counter(
            (stage, self.rank_of[i][stage])
            for stage in range(self.num_stages if shared else 0)
            for i in range(count)
        )
        first, end = self.first(BACKWARD, 0), self.first(WEIGHT, 0)
        for number in order:
            changes = self.changes[number]
            if shared and (first <= number < end or not self.training):
                stage = self.stage(number)
                rank, change = changes[0]
                readers[stage, rank] -= 1
                if not readers[stage, rank]:
                    freed = rank, change - at(shared, stage)
                    changes = [freed, *changes[1:]]
            for rank, change in changes:
                live[rank] += change
                yield number, rank, live[rank]

    @functools.cached_property
    def dispatch(self) -> "Tables":
        """The same actions with the times that tell the order of dispatch."""
        return Tables(Costs(), self.placement, self.num_ranks, self.num_microbatches)

    def run(self, rows: Numbered) -> "Run":
        """Runs each rank in its order, as far as ranks do not wait for each other."""
        reads, result, seconds = self.reads, self.result, self.seconds
        # The last is of what reads nothing.
        end = [NEVER] * len(seconds) + [0.0]
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
                for place in range(position[rank], len(row)):
                    number, start = row[place], now
                    for read, delay in reads:
                        arrival = end[read[number]]
                        if arrival < 0:
                            waiting.setdefault(read[number], []).append(rank)
                            break
                        arrival += delay[number]
                        if arrival > start:
                            start = arrival
                    else:
                        result_of = result[number]
                        end[result_of] = stop = start + seconds[number]
                        # What takes no time, such as a forward that its backward does
                        # on the way, holds nobody up.
                        if stop > start:
                            now = stop
                        order.append(number)
                        starts.append(start)
                        position[rank] = place + 1
                        for other in waiting.pop(result_of, ()):
                            heapq.heappush(turns if other > rank else later, other)
                        continue
                    break
                free[rank] = now
            turns = later
        return Run(self, rows, order, starts, end)


@dataclasses.dataclass(eq=False)
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

    @property
    def is_complete(self) -> bool:
        """Whether all actions ran."""
        return len(self.order) == sum(map(len, self.rows))

    @functools.cached_property
    def peaks(self) -> list[float]:
        """The most bytes that each rank holds, as `Timeline.peak_bytes`."""
        tables, peaks = self.tables, [*self.tables.at_start]
        order = tables.dispatch.run(self.rows).by_end()
        for _, rank, live in tables.memory(order):
            if live > peaks[rank]:
                peaks[rank] = live
        return peaks

    def fits(self, most: Sequence[float] | None) -> bool:
        """Whether no rank holds more than it may; ``None``: any."""
        if most is None:
            return True
        return all(peak <= limit for peak, limit in zip(self.peaks, most, strict=True))

    @property
    def has_whole(self) -> bool:
        """Whether some backwards are whole."""
        tables = self.tables
        whole = range(tables.first(BACKWARD, 0), tables.first(INPUT, 0))
        return any(number in whole for number in self.order)

    def by_end(self) -> Iterable[int]:
        """All actions in the order in which they end."""
        at = sorted(range(len(self.order)), key=self.ends.__getitem__)
        return map(self.order.__getitem__, at)
