"""List scheduling: each rank, once free, takes the first of what it could run."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from ._action import BACKWARD, FORWARD, INPUT, WEIGHT
from ._tables import NEVER, Numbered, Tables


@dataclass(frozen=True)
class Limits:
    """What a rank may take on; all of it ``None``: anything.

    Attributes:
      most_bytes: that a rank may hold, one number for each.
      most_held: of the micro-batches' stages that it may have started and not ended.
      reserves: whether a rank reserves room for gradients that are on their way.
        Without, more fits, but ranks may come to wait for each other.
    """

    most_bytes: Sequence[float] | None = None
    most_held: Sequence[int] | None = None
    reserves: bool = True


def list_schedule(
    tables: Tables,
    priority: Sequence[float],
    limits: Limits,
    whole: bool = False,
    lookahead: float = 0.0,
) -> Numbered | None:
    """Orders all actions of a training step.

    Args:
      tables: what they cost.
      priority: of each number; a rank takes the lowest of what it could run.
      limits: what it may take on.
      whole: whether backwards stay whole.
      lookahead: which share of an action a rank would rather wait than run it, if one
        that it prefers is on its way.

    Returns:
      The order of each rank; ``None`` if the limits let nobody go on.
    """
    return _Scheduler(tables, priority, limits, whole, lookahead).rows_at_the_end()


class _Scheduler:
    """The ranks at some time.

    Three numbers tell what a stage has started: of forwards, of backwards, whole or
    their first halves, and of second halves. Each follows the one before it.
    """

    def __init__(
        self,
        tables: Tables,
        priority: Sequence[float],
        limits: Limits,
        whole: bool,
        lookahead: float,
    ) -> None:
        self._tables, self._priority = tables, priority
        self._limits, self._lookahead = limits, lookahead
        stages, ranks = range(tables.num_stages), tables.num_ranks
        self._ops = (FORWARD, BACKWARD) if whole else (FORWARD, INPUT, WEIGHT)
        self._first = [
            [tables.first(op, stage) for stage in stages] for op in self._ops
        ]
        self._started = [[0] * len(stages) for _ in self._ops]
        self._rows: Numbered = [[] for _ in range(ranks)]
        self._end = [NEVER] * len(tables.seconds)
        self._busy = [0.0] * ranks
        self._used = [*tables.at_start]
        self._held = [0] * ranks
        self._later, self._reserved = _reserves(tables, limits.reserves)
        self._events = [(0.0, _WAKE, rank) for rank in range(ranks)]
        self._blocked: set[int] = set()

    def rows_at_the_end(self) -> Numbered | None:
        """All rows, unless somebody still waits when nothing happens any more."""
        while self._events:
            now, kind, what = heapq.heappop(self._events)
            if kind == _FREE:
                self._free(now, what)
            elif self._busy[what] <= now:
                found = self._choice(what, now)
                if found is not None:
                    self._start(*found, what, now)
        count = self._tables.num_microbatches
        is_done = all(n == count for started in self._started for n in started)
        return self._rows if is_done else None

    def _choice(self, rank: int, now: float) -> tuple[int, int, int] | None:
        """What a rank does now: a number, which of the ops, and of which stage."""
        tables, priority = self._tables, self._priority
        best: tuple[int, int, int] | None = None
        soon: list[tuple[float, int, int, int]] = []
        for stage in tables.stages_of[rank]:
            most = tables.num_microbatches
            for kind, started in enumerate(self._started):
                count, before = started[stage], most
                most = count  # of the op that follows
                if count == before:
                    continue
                number = self._first[kind][stage] + count
                arrival = self._arrival(number)
                if arrival is None:
                    continue
                if arrival > now:
                    soon.append((arrival, number, kind, stage))
                    if tables.skips:
                        heapq.heappush(self._events, (arrival, _WAKE, rank))
                elif (
                    best is None or priority[number] < priority[best[0]]
                ) and self._fits(number, kind, stage, rank):
                    best = number, kind, stage
        if best is None:
            return None
        until = now + self._lookahead * tables.seconds[best[0]]
        for arrival, number, kind, stage in soon:
            if (
                arrival < until
                and priority[number] < priority[best[0]]
                and self._fits(number, kind, stage, rank)
            ):
                return None
        return best

    def _arrival(self, number: int) -> float | None:
        """When all is there that an action reads of other stages, if that is known."""
        tables, end = self._tables, self._end
        remote, arrival = tables.remote[number], 0.0
        if remote >= 0:
            if end[remote] == NEVER:
                return None
            arrival = end[remote] + tables.delay[number]
        for read, seconds in tables.skips.get(number, ()) if tables.skips else ():
            arrival = max(arrival, end[read] + seconds)
        return arrival

    def _fits(self, number: int, kind: int, stage: int, rank: int) -> bool:
        """Whether an action may begin; if not, its rank is tried again later."""
        limits, is_forward = self._limits, kind == 0
        if is_forward and limits.most_held is not None:
            more = self._held[rank] + 1 + self._later[stage]
            if more > limits.most_held[rank]:
                self._blocked.add(rank)
                return False
        if limits.most_bytes is not None:
            reserved = self._reserved[stage] if is_forward else {}
            for where, change in self._tables.changes[number]:
                more = self._used[where] + change + reserved.get(where, 0)
                if change > 0 and more > limits.most_bytes[where]:
                    self._blocked.add(rank)
                    return False
        return True

    def _start(self, number: int, kind: int, stage: int, rank: int, now: float) -> None:
        tables, events = self._tables, self._events
        stop = now + tables.seconds[number]
        self._end[tables.result[number]] = stop
        self._busy[rank] = stop
        self._rows[rank].append(number)
        for where, change in tables.changes[number]:
            if change > 0:
                self._used[where] += change
        heapq.heappush(events, (stop, _FREE, number))
        heapq.heappush(events, (stop, _WAKE, rank))
        microbatch = self._started[kind][stage]
        self._started[kind][stage] += 1
        if kind == 0:
            self._held[rank] += 1
        reader = (stage + 1, stage - 1, -1)[kind]
        if 0 <= reader < tables.num_stages and tables.placement[reader] != rank:
            arrival = stop + tables.delay[self._first[kind][reader] + microbatch]
            heapq.heappush(events, (arrival, _WAKE, tables.placement[reader]))

    def _free(self, now: float, number: int) -> None:
        """Gives back what an action frees when it ends."""
        tables = self._tables
        for where, change in tables.changes[number]:
            if change < 0:
                self._used[where] += change
        op, stage, _ = tables.action(number)
        if op == self._ops[-1]:
            self._held[tables.placement[stage]] -= 1
        for rank in self._blocked:
            heapq.heappush(self._events, (now, _WAKE, rank))
        self._blocked.clear()


# At the same time, first what is freed.
_FREE, _WAKE = 0, 1


def _reserves(
    tables: Tables, reserves: bool
) -> tuple[list[int], list[dict[int, float]]]:
    """What a forward has to leave for others, so that what has started can end.

    Returns:
      For each stage how many later stages its rank runs; and the bytes of each rank
      that it may not use: those of one micro-batch in the later stages and, if it
      reserves them, of the gradients and second halves to come.
    """
    most: dict[tuple[str, int, int], float] = {}
    for op in (FORWARD, INPUT):
        for stage in range(tables.num_stages):
            first = tables.first(op, stage)
            for number in range(first, first + tables.num_microbatches):
                for rank, change in tables.changes[number]:
                    key = op, stage, rank
                    most[key] = max(most.get(key, 0), change)
    after: list[int] = []
    reserved: list[dict[int, float]] = []
    for stage, rank in enumerate(tables.placement):
        after.append(sum(other > stage for other in tables.stages_of[rank]))
        nbytes = {rank: 0.0}
        if stage + 1 < tables.num_stages:
            follower = tables.placement[stage + 1]
            nbytes.setdefault(follower, most.get((FORWARD, stage + 1, follower), 0))
        for where in nbytes:
            later = [s for s in tables.stages_of[where] if s > stage + (where != rank)]
            for other in later:
                nbytes[where] += most.get((FORWARD, other, where), 0)
                nbytes[where] += most.get((FORWARD, other - 1, where), 0)
            if reserves:
                nbytes[where] += max(
                    most.get((INPUT, s, where), 0)
                    for s, own in enumerate(tables.placement)
                    if where in (own, tables.placement[s - 1])
                )
        reserved.append(nbytes)
    return after, reserved
