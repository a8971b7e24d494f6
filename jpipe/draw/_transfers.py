"""Transfers within actions: what keeps a rank from computing."""

from collections.abc import Iterator
from typing import NamedTuple

from ..schedules import Action, Timeline


class TransferSpan(NamedTuple):
    """A part of an action in which its rank ``receives`` or ``sends``, its verb."""

    verb: str
    start: float
    end: float


def list_transfers(timeline: Timeline, action: Action) -> Iterator[TransferSpan]:
    """Yields the transfers of an action: before what it computes, and after it."""
    start = timeline.start[action]
    compute_start = timeline.compute_start[action]
    if start < compute_start:
        yield TransferSpan("receives", start, compute_start)

    compute_end = timeline.compute_end[action]
    end = timeline.end[action]
    if compute_end < end:
        yield TransferSpan("sends", compute_end, end)


def has_transfers(timeline: Timeline) -> bool:
    """True if an action of a timeline has one."""
    return any(any(list_transfers(timeline, action)) for action in timeline.start)
