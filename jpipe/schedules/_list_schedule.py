"""List scheduling: each rank, once free, takes the first of what it could run."""

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Sequence

from ._action import BACKWARD, FORWARD, INPUT, WEIGHT
from ._placement import stages_of
from ._tables import Numbered, Tables


def list_schedule(
    tables: Tables,
    priority: Sequence[float],
    max_bytes: Sequence[float] | None = None,
    whole: bool = False,
    reserves: bool = True,
) -> Numbered | None:
    """Orders all actions of a training step.

    Args:
      tables: what they cost.
      priority: of each number; a rank takes the lowest of what it could run.
      max_bytes: the most that each rank may hold; ``None``: any.
      whole: whether backwards stay whole.
      reserves: whether a rank reserves room for gradients that are on their way.
        Without, more fits, but ranks may come to wait for each other.

    Returns:
      The order of each rank; ``None`` if the memory lets nobody go on.
    """
    return _Ranks(tables, priority, max_bytes, whole, reserves).run()


class _Ranks:
    """The ranks at some time."""

    def __init__(
        self,
        tables: Tables,
        priority: Sequence[float],
        max_bytes: Sequence[float] | None,
        whole: bool,
        reserves: bool,
    ) -> None:
        self._tables, self._priority, self._max_bytes = tables, priority, max_bytes
        if max_bytes is not None:
            self._reserved = _reserved(tables, reserves)
        ops = (FORWARD, BACKWARD) if whole else (FORWARD, INPUT, WEIGHT)
        self._stages = stages_of(tables.placement)
        self._kinds = {op: kind for kind, op in enumerate(ops)}
        # Of each stage the next action of each op: each follows the one before it.
        self._next = [
            [tables.first(op, stage) for op in ops]
            for stage in range(tables.num_stages)
        ]
        # When all is there that an action reads; the last is of what does not exist.
        self._arrival = [math.inf] * (len(tables.seconds) + 1)
        self._end = [math.inf] * len(tables.seconds) + [0.0]
        # Who reads a result, by the first of each op of each stage.
        self._readers: dict[int, list[int]] = defaultdict(list)
        for number in itertools.chain.from_iterable(self._next):
            reads = [read[number] for read, _ in tables.reads if read[number] >= 0]
            for read in reads:
                self._readers[read].append(number)
            if not reads:
                for i in range(tables.num_microbatches):
                    self._arrival[number + i] = 0.0
        self._rows: Numbered = [[] for _ in range(tables.num_ranks)]
        self._busy = [0.0] * tables.num_ranks
        self._used = [*tables.at_start]
        # When a rank looks for work, and the action that ended there, if it is one.
        self._events = [(0.0, rank, -1) for rank in range(tables.num_ranks)]
        self._blocked: set[int] = set()

    def run(self) -> Numbered | None:
        """All rows, unless somebody still waits when nothing happens any more."""
        events = self._events
        while events:
            now, awake = events[0][0], set[int]()
            while events and events[0][0] == now:
                _, rank, ended = heapq.heappop(events)
                awake.add(rank)
                if ended >= 0:
                    self._use(ended, -1)
                    awake |= self._blocked
                    self._blocked.clear()
            for rank in sorted(awake):
                if self._busy[rank] <= now:
                    number = self._choice(rank, now)
                    if number is not None:
                        self._start(number, rank, now)
        is_done = all(number < 0 for numbers in self._next for number in numbers)
        return self._rows if is_done else None

    def _choice(self, rank: int, now: float) -> int | None:
        """What a rank does now."""
        priority, best = self._priority, None
        for stage in self._stages[rank]:
            for number in self._next[stage]:
                if (
                    self._arrival[number] <= now
                    and (best is None or priority[number] < priority[best])
                    and self._fits(number, rank)
                ):
                    best = number
        return best

    def _fits(self, number: int, rank: int) -> bool:
        """Whether an action may begin; if not, its rank is tried again later."""
        if self._max_bytes is None:
            return True
        tables = self._tables
        is_forward = number < tables.first(BACKWARD, 0)
        for where, change in tables.changes[number]:
            more = self._used[where] + change
            more += self._reserved[tables.stage(number)][where] if is_forward else 0
            if change > 0 and more > self._max_bytes[where]:
                self._blocked.add(rank)
                return False
        return True

    def _start(self, number: int, rank: int, now: float) -> None:
        tables, end = self._tables, self._end
        end[tables.result[number]] = stop = now + tables.seconds[number]
        self._busy[rank] = stop
        self._rows[rank].append(number)
        self._use(number, 1)
        heapq.heappush(self._events, (stop, rank, number))
        op, stage, i = tables.action(number)
        is_last = i + 1 == tables.num_microbatches
        self._next[stage][self._kinds[op]] = -1 if is_last else number + 1
        for first in self._readers[tables.result[number] - i]:
            reader, arrival = first + i, 0.0
            for read, delay in tables.reads:
                arrival = max(arrival, end[read[reader]] + delay[reader])
            self._arrival[reader] = arrival
            where = tables.placement[tables.stage(reader)]
            if where != rank and arrival < math.inf:
                heapq.heappush(self._events, (arrival, where, -1))

    def _use(self, number: int, sign: int) -> None:
        """Takes what an action adds when it starts, frees the rest when it ends."""
        for where, change in self._tables.changes[number]:
            if change * sign > 0:
                self._used[where] += change


def _reserved(tables: Tables, reserves: bool) -> list[list[float]]:
    """What a forward leaves for others, so that what has started can end.

    Returns:
      For each stage the bytes of each rank that its forward may not use: those that one
      micro-batch needs in the stages after it and, if they are reserved, those of the
      gradients and second halves to come.
    """
    each = range(tables.num_ranks)

    def most(op: str, stage: int) -> list[float]:
        """What an action adds to each rank, at most."""
        found = [0.0 for _ in each]
        for i in range(tables.num_microbatches):
            for rank, change in tables.changes[tables.first(op, stage) + i]:
                found[rank] = max(found[rank], change)
        return found

    stages = range(tables.num_stages)
    gradients = [most(INPUT, stage) for stage in stages]
    later = [reserves * max(own[rank] for own in gradients) for rank in each]
    reserved: list[list[float]] = []
    for stage in reversed(stages):
        reserved.append(later)
        later = [a + b for a, b in zip(later, most(FORWARD, stage), strict=True)]
    return reserved[::-1]
