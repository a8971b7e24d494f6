"""Timelines as a Chrome trace, which Perfetto and chrome://tracing open."""

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

from ..schedules import Timeline
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
    events: list[Event] = []
    numbers = itertools.count(1)  # of arrows, in the whole file
    for pid, (timeline, name) in enumerate(
        zip(shown, named(shown, titles), strict=True)
    ):
        clock = _Clock(timeline, unit)
        events += _names(timeline, name, pid)
        events += _slices(timeline, clock, pid)
        events += _arrows(timeline, clock, pid, numbers)
        events += _counters(timeline, clock, pid)
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events})


class _Clock:
    """Microseconds since the first start, in whole nanoseconds.

    Rounded ends meet the starts that follow them, so that no slice overlaps its
    neighbour by the error of a division.
    """

    def __init__(self, timeline: Timeline, unit: float) -> None:
        self._first, self._unit = timeline.begin, unit

    def __call__(self, time: float) -> float:
        return round((time - self._first) * self._unit * 1000) / 1000


def _names(timeline: Timeline, name: str, pid: int) -> Iterator[Event]:
    def says(key: str, tid: int, **args: Any) -> Event:
        return {"ph": "M", "name": key, "pid": pid, "tid": tid, "args": args}

    yield says("process_name", 0, name=name)
    yield says("process_sort_index", 0, sort_index=pid)
    for rank in range(len(timeline.rows)):
        yield says("thread_name", rank, name=f"rank {rank}")
        yield says("thread_sort_index", rank, sort_index=rank)


def _slices(timeline: Timeline, clock: _Clock, pid: int) -> Iterator[Event]:
    for rank, row in enumerate(timeline.rows):
        for action in row:
            start, end = clock(timeline.start[action]), clock(timeline.end[action])
            yield {
                "ph": "X",
                "name": str(action),
                "cat": action.op,
                "pid": pid,
                "tid": rank,
                "ts": start,
                "dur": round(end - start, 3),
                "args": {"stage": action.stage, "micro-batch": action.microbatch},
            }
        for exchange in timeline.exchanges:
            if rank in exchange.ranks:
                start, end = clock(exchange.start), clock(exchange.end)
                yield {
                    "ph": "X",
                    "name": "exchange of gradients",
                    "cat": "exchange",
                    "pid": pid,
                    "tid": rank,
                    "ts": start,
                    "dur": round(end - start, 3),
                    "args": {"stage": exchange.stage},
                }


def _arrows(
    timeline: Timeline, clock: _Clock, pid: int, numbers: Iterator[int]
) -> Iterator[Event]:
    needs = timeline.needs()
    for rank, row in enumerate(timeline.rows):
        for action in row:
            for need in needs(action):
                source = timeline.homes[need.microbatch][need.stage]
                if source == rank:
                    continue
                number = next(numbers)
                ends = (("s", source, need), ("f", rank, action))
                for phase, tid, at in ends:
                    # An arrow belongs to the slice around its time, so both ends
                    # stay inside: at an edge two slices meet.
                    start, end = timeline.start[at], timeline.end[at]
                    part = 0.99 if phase == "s" else 0.01
                    yield {
                        "ph": phase,
                        "name": "transfer",
                        "cat": "transfer",
                        "id": number,
                        "pid": pid,
                        "tid": tid,
                        "ts": clock(start + part * (end - start)),
                        **({"bp": "e"} if phase == "f" else {}),
                    }


def _counters(timeline: Timeline, clock: _Clock, pid: int) -> Iterator[Event]:
    for time, rank, size in timeline.memory:
        yield {
            "ph": "C",
            "name": f"memory of rank {rank}",
            "pid": pid,
            "ts": max(clock(time), 0.0),
            "args": {"bytes": size},
        }
