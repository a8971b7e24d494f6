"""The whole picture: timelines one below the other, one axis, one legend."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ..schedules import Costs, Schedule, Timeline
from ..schedules._compare import scale_costs
from . import _palette as palette
from ._frame import Frame, frame_of
from ._legend import legend
from ._panel import height, panel, summary
from ._planned import bars, is_plan, timeline_of
from ._shapes import Path, Picture, Shape, Text

_TOP, _BETWEEN = 8.0, 8.0
_AXIS = 26.0
_SMALL = 10.0


def picture(
    drawn: Any, titles: Sequence[str] | None = None, width: float | None = None
) -> Picture:
    """Lays out timelines.

    Args:
      drawn: one timeline or schedule, or several; or a plan.
      titles: one for each timeline; default: their names.
      width: in pixels; default: what the actions need.

    Returns:
      What `svg` draws.

    Raises:
      ValueError: if there is no timeline, or another number of titles.
    """
    if is_plan(drawn):
        shown = (timeline_of(drawn),)
        frame = frame_of(shown, width)
        above = bars(drawn, *shown, frame.width)
    else:
        shown = listed(drawn)
        frame = frame_of(shown, width)
        above = Picture(0, 0, (), "")
    names = named(shown, titles)
    shapes: list[Shape] = []
    first = y = above.height + _TOP
    for timeline, name in zip(shown, names, strict=True):
        shapes += panel(timeline, name, frame, y)
        y += height(timeline, frame) + _BETWEEN
    grid = [*_grid(frame, first + 26, y - _BETWEEN)]
    shapes += _axis(frame, y - _BETWEEN)
    y += _AXIS
    entries, y = legend(_entries(shown, frame), frame.left, y, frame.width)
    pairs = zip(names, shown, strict=True)
    described = [f"{name}: {summary(timeline, frame)}" for name, timeline in pairs]
    return Picture(
        frame.width,
        y + 6,
        (*above.shapes, *grid, *shapes, *entries),
        "; ".join(filter(None, [above.description, *described])),
    )


def listed(timelines: Any) -> tuple[Timeline, ...]:
    """One timeline or several, as several; none is an error.

    Of a schedule, that with the default costs for the layers of a rank; of a plan that
    of its step.
    """
    given = tuple(timelines) if isinstance(timelines, Iterable) else (timelines,)
    if not given:
        raise ValueError("no timelines: give one or more, as Schedule.simulate returns")
    return tuple(map(_timeline, given))


def _timeline(given: Any) -> Timeline:
    if is_plan(given):
        return timeline_of(given)
    if isinstance(given, Schedule):
        return given.simulate(scale_costs(Costs(), given))
    if not isinstance(given, Timeline):
        raise TypeError(
            f"a {type(given).__name__} is not a timeline: draw a Schedule, such as "
            f"pipe.schedule, or what Schedule.simulate, profile_step or jpipe.plan "
            f"returns"
        )
    return given


def named(
    timelines: tuple[Timeline, ...], titles: Sequence[str] | None
) -> tuple[str, ...]:
    """A title for each timeline: those given, or the names."""
    if titles is None:
        return tuple(timeline.name for timeline in timelines)
    given = (titles,) if isinstance(titles, str) else tuple(titles)
    if len(given) != len(timelines):
        raise ValueError(
            f"titles={list(given)} for {len(timelines)} timelines: give one for each"
        )
    return given


def _grid(frame: Frame, top: float, bottom: float) -> Iterator[Path]:
    for time in frame.ticks():
        x = frame.x(time)
        yield Path(((x, top), (x, bottom)), stroke=palette.GRID)


def _axis(frame: Frame, y: float) -> Iterator[Shape]:
    yield Path(((frame.left, y), (frame.right, y)), stroke=palette.GREY)
    base = y + 17
    yield Text(frame.left - 20, base, "time", _SMALL, palette.GREY, "end")
    for time in frame.ticks():
        x = frame.x(time)
        yield Path(((x, y), (x, y + 4)), stroke=palette.GREY)
        yield Text(x, base, frame.text(time), _SMALL, palette.GREY, "middle")


def _entries(timelines: tuple[Timeline, ...], frame: Frame) -> dict[str, str]:
    """What the legend explains, with its colours."""
    ops = palette.ops(timelines)
    entries = {f"{op} {palette.NAMES[op]}": palette.OPS[op] for op in ops}
    if any(timeline.exchanges for timeline in timelines):
        entries["exchange of gradients"] = palette.EXCHANGE
    entries["idle"] = palette.IDLE
    if frame.most_bytes:
        entries["memory held"] = palette.MEMORY
    if max(map(palette.num_chunks, timelines)) > 1:
        entries["dark to light: stages of a rank"] = ""
    return entries | {"number: micro-batch": ""}
