"""Timelines as a Chrome trace, which Perfetto and chrome://tracing open."""

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ..schedules import Action, Timeline
from ._layout import listed, named

Event = dict[str, Any]


def trace(
    timelines: Any,
    *,
    titles: Sequence[str] | None = None,
    unit: float = 1e6,
) -> str:
    """Writes timelines as a trace for ``ui.perfetto.dev``.

    A process for each timeline, a thread for each rank, a slice for each action, an
    arrow for each transfer between ranks, and a counter for what each rank holds.

    Args:
      timelines: one or several, or schedules, with the default costs, or plans of
        `jpipe.plan`; each starts at 0.
      titles: one for each; default: their names.
      unit: microseconds per unit of time. The default fits what was measured, and
        shows a unit of time as a second.

    Returns:
      The text of a JSON file.

    Raises:
      ValueError: if there is no timeline, or another number of titles.

    Example:
      >>> from jpipe import schedules
      >>> text = trace(schedules.gpipe(2, 1).simulate())
      >>> [e["name"] for e in json.loads(text)["traceEvents"] if e["ph"] == "X"]
      ['0F0', '0B0', '1F0', '1B0']
    """
    shown = listed(timelines)
    numbers = itertools.count(1)  # of arrows, in the whole file
    events: list[Event] = []
    for pid, (timeline, name) in enumerate(
        zip(shown, named(shown, titles), strict=True)
    ):
        found = [_event("M", "process_name", args={"name": name})]
        for rank in range(len(timeline.rows)):
            args = {"name": f"rank {rank}"}
            found.append(_event("M", "thread_name", rank, args=args))
        clock = _Clock(timeline, unit)
        found += [*_slices(clock), *_arrows(clock, numbers), *_counters(clock)]
        events += [event | {"pid": pid} for event in found]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events})


class _Clock(NamedTuple):
    """The times of a timeline in microseconds since its first start.

    Attributes:
      timeline: of which.
      unit: microseconds per unit of time.
    """

    timeline: Timeline
    unit: float

    def __call__(self, time: float) -> float:
        """In whole nanoseconds.

        Rounded ends meet the starts that follow them, so that no slice overlaps its
        neighbour by the error of a division.
        """
        return round((time - self.timeline.begin) * self.unit * 1000) / 1000

    def inside(self, action: Action, part: float) -> float:
        """When so much of an action has run."""
        start, end = self.timeline.start[action], self.timeline.end[action]
        return self(start + part * (end - start))


def _event(phase: str, name: str, tid: int = 0, **fields: Any) -> Event:
    return {"ph": phase, "name": name, "tid": tid, **fields}


def _slices(clock: _Clock) -> Iterator[Event]:
    timeline = clock.timeline

    def piece(
        rank: int, name: str, kind: str, start: float, end: float, **args: Any
    ) -> Event:
        first, last = clock(start), clock(end)
        fields = {"cat": kind, "ts": first, "dur": round(last - first, 3), "args": args}
        return _event("X", name, rank, **fields)

    for rank, row in enumerate(timeline.rows):
        for action in row:
            where = {"stage": action.stage, "micro-batch": action.microbatch}
            times = timeline.start[action], timeline.end[action]
            yield piece(rank, str(action), action.op, *times, **where)
        for stage, ranks, start, end in timeline.exchanges:
            if rank in ranks:
                names = "exchange of gradients", "exchange"
                yield piece(rank, *names, start, end, stage=stage)


def _arrows(clock: _Clock, numbers: Iterator[int]) -> Iterator[Event]:
    """From each action to those of other ranks that read its result."""
    timeline = clock.timeline
    rank_of = {a: rank for rank, row in enumerate(timeline.rows) for a in row}
    for rank, row in enumerate(timeline.rows):
        for action in row:
            for need in timeline.needs(action):
                source = rank_of[need]
                if source != rank:
                    arrow = {"id": next(numbers), "cat": "transfer"}
                    # An arrow belongs to the slice around its time, so both ends
                    # stay inside: at an edge two slices meet.
                    begin, end = clock.inside(need, 0.99), clock.inside(action, 0.01)
                    yield _event("s", "transfer", source, ts=begin, **arrow)
                    yield _event("f", "transfer", rank, ts=end, bp="e", **arrow)


def _counters(clock: _Clock) -> Iterator[Event]:
    for time, rank, size in clock.timeline.memory:
        at = max(clock(time), 0.0)
        yield _event("C", f"memory of rank {rank}", ts=at, args={"bytes": size})
