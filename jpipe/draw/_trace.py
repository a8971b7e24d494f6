"""Writes timelines as a Chrome trace, which Perfetto and chrome://tracing open."""

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ..schedules import Action, Timeline
from ._layout import choose_titles, list_timelines
from ._transfers import list_transfers

Event = dict[str, Any]


def trace(
    timelines: Any,
    *,
    titles: Sequence[str] | None = None,
    unit: float = 1e6,
) -> str:
    """Writes timelines as a trace for ``ui.perfetto.dev``.

    The trace has a process for each timeline, a thread for each rank, a slice for each
    action, an arrow for each transfer between ranks, and a counter for the memory of
    each rank. Transfers that keep a rank from computing are slices within its actions.

    Args:
      timelines: one or several timelines, or schedules, with the default costs, or
        plans of `jpipe.plan`; each starts at 0.
      titles: a title for each timeline; default: their names.
      unit: microseconds per unit of time. The default is right for measured timelines,
        and shows a unit of time as a second.

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
    shown = list_timelines(timelines)
    names = choose_titles(shown, titles)
    arrow_ids = itertools.count(1)  # unique in the whole file
    events: list[Event] = []
    for pid, (timeline, name) in enumerate(zip(shown, names, strict=True)):
        clock = _Clock(timeline, unit)
        timeline_events = [
            *_write_names(timeline, name),
            *_write_slices(clock),
            *_write_arrows(clock, arrow_ids),
            *_write_counters(clock),
        ]
        events += [event | {"pid": pid} for event in timeline_events]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events})


class _Clock(NamedTuple):
    """Converts the times of a timeline to microseconds since its first start.

    Attributes:
      timeline: the timeline.
      unit: microseconds per unit of time.
    """

    timeline: Timeline
    unit: float

    def microseconds(self, time: float) -> float:
        """Converts a time, rounded to nanoseconds.

        Rounded ends meet the starts that follow them, so that no slice overlaps its
        neighbour by the error of a division.
        """
        return round((time - self.timeline.begin) * self.unit * 1000) / 1000

    def microseconds_inside(self, action: Action, fraction: float) -> float:
        """The time at which this fraction of an action has run."""
        start = self.timeline.start[action]
        end = self.timeline.end[action]
        return self.microseconds(start + fraction * (end - start))


def _event(phase: str, name: str, tid: int = 0, **fields: Any) -> Event:
    return {"ph": phase, "name": name, "tid": tid, **fields}


def _write_names(timeline: Timeline, name: str) -> Iterator[Event]:
    """Yields the names of the process and of its threads."""
    yield _event("M", "process_name", args={"name": name})
    for rank in range(len(timeline.rows)):
        yield _event("M", "thread_name", rank, args={"name": f"rank {rank}"})


def _write_slices(clock: _Clock) -> Iterator[Event]:
    """Yields a slice for each action and each exchange of each rank."""
    timeline = clock.timeline

    def make_slice(
        rank: int, name: str, *, category: str, start: float, end: float, **args: Any
    ) -> Event:
        begin = clock.microseconds(start)
        length = round(clock.microseconds(end) - begin, 3)
        return _event("X", name, rank, cat=category, ts=begin, dur=length, args=args)

    for rank, row in enumerate(timeline.rows):
        for action in row:
            args = {"stage": action.stage, "micro-batch": action.microbatch}
            yield make_slice(
                rank,
                str(action),
                category=action.op,
                start=timeline.start[action],
                end=timeline.end[action],
                **args,
            )
            for transfer in list_transfers(timeline, action):
                yield make_slice(
                    rank,
                    transfer.verb,
                    category="transfer",
                    start=transfer.start,
                    end=transfer.end,
                    **args,
                )
        for exchange in timeline.exchanges:
            if rank in exchange.ranks:
                yield make_slice(
                    rank,
                    "exchange of gradients",
                    category="exchange",
                    start=exchange.start,
                    end=exchange.end,
                    stage=exchange.stage,
                )


def _write_arrows(clock: _Clock, arrow_ids: Iterator[int]) -> Iterator[Event]:
    """Yields an arrow from each action to those of other ranks that read its result."""
    timeline = clock.timeline
    rank_of: dict[Action, int] = {}
    for rank, row in enumerate(timeline.rows):
        rank_of.update(dict.fromkeys(row, rank))

    for action, target in rank_of.items():
        for need in timeline.needs(action):
            source = rank_of[need]
            if source == target:
                continue
            arrow = {"id": next(arrow_ids), "cat": "transfer"}
            # An arrow belongs to the slice around its time, so both ends stay inside:
            # at an edge two slices meet.
            begin = clock.microseconds_inside(need, 0.99)
            end = clock.microseconds_inside(action, 0.01)
            yield _event("s", "transfer", source, ts=begin, **arrow)
            yield _event("f", "transfer", target, ts=end, bp="e", **arrow)


def _write_counters(clock: _Clock) -> Iterator[Event]:
    """Yields the memory of each rank after each change."""
    for event in clock.timeline.memory:
        time = max(clock.microseconds(event.time), 0.0)
        name = f"memory of rank {event.rank}"
        yield _event("C", name, ts=time, args={"bytes": event.bytes})
