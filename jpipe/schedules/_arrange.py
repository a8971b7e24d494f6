"""List scheduling: each rank, once free, takes the first of what it could run."""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ._action import BACKWARD, FORWARD, INPUT, WEIGHT
from ._tables import Numbered, Tables


@dataclass(frozen=True)
class Limits:
    """What a rank may take on; all of it ``None``: anything.

    Attributes:
      most_bytes: that a rank may hold, one number for each.
      most_held: of the micro-batches' stages that it may have begun and not ended.
      careful: whether a rank keeps room for gradients that are on their way. Without,
        more fits, but ranks may come to wait for each other.
    """

    most_bytes: Sequence[float] | None = None
    most_held: Sequence[int] | None = None
    careful: bool = True


def arrange(
    tables: Tables,
    priority: Sequence[float],
    limits: Limits,
    whole: bool = False,
    patience: float = 0.0,
) -> Numbered | None:
    """Orders all actions of a training step.

    Args:
      tables: what they cost.
      priority: of each number; a rank takes the lowest of what it could run.
      limits: what it may take on.
      whole: whether backwards stay whole.
      patience: which share of an action a rank would rather wait than run it, if one
        that it prefers is on its way.

    Returns:
      The order of each rank; ``None`` if the limits let nobody go on.
    """
    return _Arrangement(tables, priority, limits, whole, patience).rows_at_the_end()


class _Arrangement:
    """The ranks at some time."""

    def __init__(
        self,
        tables: Tables,
        priority: Sequence[float],
        limits: Limits,
        whole: bool,
        patience: float,
    ) -> None:
        self._tables, self._priority = tables, priority
        self._limits, self._patience = limits, patience
        stages, ranks = tables.num_stages, tables.num_ranks
        self._rows: Numbered = [[] for _ in range(ranks)]
        self._end: list[float | None] = [None] * len(tables.seconds)
        self._busy = [0.0] * ranks
        self._used = tables.at_start
        self._held = [0] * ranks
        self._later, self._keep = _reserves(tables, limits.careful)
        back = BACKWARD if whole else INPUT
        self._forward = [tables.first(FORWARD, stage) for stage in range(stages)]
        self._back = [tables.first(back, stage) for stage in range(stages)]
        self._ends = [start + tables.num_microbatches for start in self._forward]
        self._first_of, self._back_of = [*self._forward], [*self._back]
        self._to_forward = self._forward[0] - self._back[0]
        # When what an action reads of another stage is there.
        self._arrives: list[float | None] = [None] * len(tables.seconds)
        for first in (self._forward[0], self._back[-1]):
            here = [0.0] * tables.num_microbatches
            self._arrives[first : first + tables.num_microbatches] = here
        # From the number of an I to that of its W.
        self._to_rest = 0 if whole else tables.first(WEIGHT, 0) - tables.first(INPUT, 0)
        self._rest: list[deque[int]] = [deque() for _ in range(stages)]
        self._first_rest = tables.first(WEIGHT, 0)
        self._first_back = tables.first(BACKWARD, 0)
        self._events: list[tuple[float, int, int]] = [
            (0.0, _WAKE, rank) for rank in range(ranks)
        ]
        self._blocked: set[int] = set()

    def rows_at_the_end(self) -> Numbered | None:
        """All rows, unless somebody still waits when nothing happens any more."""
        events, busy = self._events, self._busy
        while events:
            now, kind, what = heapq.heappop(events)
            if kind == _FREE:
                self._free(now, what)
            elif busy[what] <= now:
                found = self._choice(what, now)
                if found is not None:
                    self._start(*found, what, now)
        tables = self._tables
        per_microbatch = 3 if self._to_rest else 2
        total = tables.num_stages * tables.num_microbatches * per_microbatch
        return self._rows if sum(map(len, self._rows)) == total else None

    def _choice(self, rank: int, now: float) -> tuple[int, int] | None:
        """What a rank does now, and of which stage."""
        priority, arrives = self._priority, self._arrives
        skips = self._tables.skips
        best: tuple[float, int, int] | None = None
        soon: list[tuple[float, float, int, int]] = []
        for stage in self._tables.stages_of[rank]:
            forward, back = self._forward[stage], self._back[stage]
            for number in (
                forward if forward < self._ends[stage] else -1,
                # Only of what has been forward; that is of this rank, and has ended.
                back if back + self._to_forward < forward else -1,
            ):
                arrival = arrives[number] if number >= 0 else None
                if arrival is None:
                    continue
                if skips and number in skips:
                    arrival = self._with_skips(number, arrival)
                if arrival > now:
                    soon.append((arrival, priority[number], number, stage))
                    if skips:
                        heapq.heappush(self._events, (arrival, _WAKE, rank))
                elif (best is None or priority[number] < best[0]) and self._fits(
                    number, stage, rank
                ):
                    best = priority[number], number, stage
            if rest := self._rest[stage]:
                number = rest[0]
                if best is None or priority[number] < best[0]:
                    best = priority[number], number, stage
        if best is None:
            return None
        until = now + self._patience * self._tables.seconds[best[1]]
        for arrival, preference, number, stage in soon:
            if (
                arrival < until
                and preference < best[0]
                and self._fits(number, stage, rank)
            ):
                return None
        return best[1:]

    def _with_skips(self, number: int, arrival: float) -> float:
        """When the skip connections of an action have arrived too."""
        for read, seconds in self._tables.skips[number]:
            ended = self._end[read]
            assert ended is not None  # its sender is what the neighbour had to read
            arrival = max(arrival, ended + seconds)
        return arrival

    def _fits(self, number: int, stage: int, rank: int) -> bool:
        """Whether an action may begin; if not, its rank is asked again later."""
        limits, forward = self._limits, number < self._first_back
        if forward and limits.most_held is not None:
            more = self._held[rank] + 1 + self._later[stage]
            if more > limits.most_held[rank]:
                self._blocked.add(rank)
                return False
        if limits.most_bytes is not None:
            used, keep = self._used, self._keep[stage]
            for where, change in self._tables.changes[number]:
                if change <= 0:
                    continue
                more = used[where] + change
                if forward:
                    more += keep.get(where, 0)
                if more > limits.most_bytes[where]:
                    self._blocked.add(rank)
                    return False
        return True

    def _start(self, number: int, stage: int, rank: int, now: float) -> None:
        tables, events = self._tables, self._events
        stop = now + tables.seconds[number]
        self._end[tables.slot[number]] = stop
        self._busy[rank] = stop
        self._rows[rank].append(number)
        for where, change in tables.changes[number]:
            if change > 0:
                self._used[where] += change
        heapq.heappush(events, (stop, _FREE, number))
        heapq.heappush(events, (stop, _WAKE, rank))
        if number < self._first_back:
            self._forward[stage] += 1
            self._held[rank] += 1
            reader = stage + 1
        elif number < self._first_rest:
            self._back[stage] += 1
            if self._to_rest:
                self._rest[stage].append(number + self._to_rest)
            reader = stage - 1
        else:
            self._rest[stage].popleft()
            return
        if 0 <= reader < tables.num_stages:
            first = (self._first_of if reader > stage else self._back_of)[reader]
            reading = first + number % tables.num_microbatches
            arrival = self._arrives[reading] = stop + tables.delay[reading]
            if tables.placement[reader] != rank:
                heapq.heappush(events, (arrival, _WAKE, tables.placement[reader]))

    def _free(self, now: float, number: int) -> None:
        """Gives back what an action frees when it ends."""
        tables = self._tables
        for where, change in tables.changes[number]:
            if change < 0:
                self._used[where] += change
        if number >= self._first_rest or (
            not self._to_rest and number >= self._first_back
        ):
            rank = tables.placement[number // tables.num_microbatches % len(self._rest)]
            self._held[rank] -= 1
        for rank in self._blocked:
            heapq.heappush(self._events, (now, _WAKE, rank))
        self._blocked.clear()


# At the same time, first what is freed.
_FREE, _WAKE = 0, 1


def _reserves(
    tables: Tables, careful: bool
) -> tuple[list[int], list[dict[int, float]]]:
    """What a forward has to leave for others, so that what has begun can end.

    Returns:
      For each stage how many later stages its rank runs; and the bytes of each rank
      that it may not use: those of one micro-batch in the later stages and, if careful,
      of the gradients and second halves to come.
    """
    most: dict[tuple[str, int, int], float] = {}
    for op in (FORWARD, INPUT):
        for stage in range(tables.num_stages):
            first = tables.first(op, stage)
            for number in range(first, first + tables.num_microbatches):
                for rank, change in tables.changes[number]:
                    key = op, stage, rank
                    most[key] = max(most.get(key, 0), change)
    after = [
        [other for other in stages if other > stage]
        for stage, stages in enumerate(
            tables.stages_of[rank] for rank in tables.placement
        )
    ]
    keep: list[dict[int, float]] = []
    for stage, rank in enumerate(tables.placement):
        kept = {rank: 0.0}
        if stage + 1 < tables.num_stages:
            follower = tables.placement[stage + 1]
            kept.setdefault(follower, most.get((FORWARD, stage + 1, follower), 0))
        for where in kept:
            later = [s for s in tables.stages_of[where] if s > stage + (where != rank)]
            for other in later:
                kept[where] += most.get((FORWARD, other, where), 0)
                kept[where] += most.get((FORWARD, other - 1, where), 0)
            if careful:
                kept[where] += max(
                    (
                        most.get((INPUT, s, where), 0)
                        for s in range(tables.num_stages)
                        if where in (tables.placement[s], tables.placement[s - 1])
                    ),
                    default=0,
                )
        keep.append(kept)
    return list(map(len, after)), keep
