"""Timelines as a Chrome trace, which Perfetto and chrome://tracing open."""

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

from ..schedules import Action, Timeline
from ._layout import Times, listed, named

Event = dict[str, Any]


def trace(
    timelines: Times,
    *,
    titles: Sequence[str] | None = None,
    unit: float = 1e6,
) -> str:
    """Writes timelines as a trace for ``ui.perfetto.dev``.

    A process for each timeline, a thread for each rank, a slice for each action, an
    arrow for each transfer between ranks, and a counter for what each rank holds.

    Args:
      timelines: one or several, or schedules, with the default costs; each starts at
        0.
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
    names = named(shown, titles)
    events = [
        event
        for pid, (timeline, name) in enumerate(zip(shown, names, strict=True))
        for event in _Process(timeline, pid, unit).events(name, numbers)
    ]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events})


class _Process:
    """One timeline as a process.

    Args:
      timeline: what it shows.
      pid: the number of the process.
      unit: microseconds per unit of time.
    """

    def __init__(self, timeline: Timeline, pid: int, unit: float) -> None:
        self._timeline, self._pid, self._unit = timeline, pid, unit

    def events(self, name: str, numbers: Iterator[int]) -> Iterator[Event]:
        """All of them.

        Args:
          name: of the process.
          numbers: of arrows.
        """
        yield self._event("M", "process_name", 0, args={"name": name})
        yield self._event("M", "process_sort_index", 0, args={"sort_index": self._pid})
        for rank in range(len(self._timeline.rows)):
            yield self._event("M", "thread_name", rank, args={"name": f"rank {rank}"})
            yield self._event("M", "thread_sort_index", rank, args={"sort_index": rank})
        yield from self._slices()
        yield from self._arrows(numbers)
        for time, rank, size in self._timeline.memory:
            at = {"ts": max(self._clock(time), 0.0), "args": {"bytes": size}}
            yield self._event("C", f"memory of rank {rank}", **at)

    def _event(self, phase: str, name: str, tid: int = 0, **fields: Any) -> Event:
        return {"ph": phase, "name": name, "pid": self._pid, "tid": tid, **fields}

    def _clock(self, time: float) -> float:
        """Microseconds since the first start, in whole nanoseconds.

        Rounded ends meet the starts that follow them, so that no slice overlaps its
        neighbour by the error of a division.
        """
        return round((time - self._timeline.begin) * self._unit * 1000) / 1000

    def _slices(self) -> Iterator[Event]:
        timeline = self._timeline
        for rank, row in enumerate(timeline.rows):
            for action in row:
                where = {"stage": action.stage, "micro-batch": action.microbatch}
                times = timeline.start[action], timeline.end[action]
                yield self._slice(rank, str(action), action.op, *times, where)
            for stage, ranks, start, end in timeline.exchanges:
                if rank in ranks:
                    names = "exchange of gradients", "exchange"
                    yield self._slice(rank, *names, start, end, {"stage": stage})

    def _slice(
        self, rank: int, name: str, kind: str, start: float, end: float, args: Event
    ) -> Event:
        first, last = self._clock(start), self._clock(end)
        fields = {"cat": kind, "ts": first, "dur": round(last - first, 3), "args": args}
        return self._event("X", name, rank, **fields)

    def _arrows(self, numbers: Iterator[int]) -> Iterator[Event]:
        timeline, needs = self._timeline, self._timeline.needs()
        for rank, row in enumerate(timeline.rows):
            for action in row:
                for need in needs(action):
                    source = timeline.homes[need.microbatch][need.stage]
                    if source != rank:
                        event = {"id": next(numbers), "cat": "transfer"}
                        # An arrow belongs to the slice around its time, so both ends
                        # stay inside: at an edge two slices meet.
                        event["ts"] = self._inside(need, 0.99)
                        yield self._event("s", "transfer", source, **event)
                        event |= {"ts": self._inside(action, 0.01), "bp": "e"}
                        yield self._event("f", "transfer", rank, **event)

    def _inside(self, action: Action, part: float) -> float:
        """When so much of an action has run."""
        start, end = self._timeline.start[action], self._timeline.end[action]
        return self._clock(start + part * (end - start))
