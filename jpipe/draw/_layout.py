"""The whole picture: timelines one below the other, one axis, one legend."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ..schedules import Costs, Schedule, Timeline
from ..schedules._compare import fitting
from . import _bars
from . import _palette as palette
from ._frame import LABEL, NARROWEST, Frame, checked, frame_of, number
from ._panel import height, panel, summary
from ._planned import planned
from ._profiled import profiled
from ._shapes import Path, Picture, Rect, Shape, Text, lowered, text_width

_TOP, _BETWEEN = 8.0, 8.0
_WIDE = 890.0  # what bars are given
_AXIS = 26.0
_SMALL = 10.0
_SWATCH, _LEGEND_LINE = 18.0, 18.0


# What has times to draw.
Times = Timeline | Schedule | Iterable[Timeline | Schedule]


def picture(
    drawn: Any, titles: Sequence[str] | None = None, width: float | None = None
) -> Picture:
    """Lays out timelines.

    Args:
      drawn: one timeline or schedule, or several; or a plan; or a profile.
      titles: one for each timeline; default: their names.
      width: in pixels; default: what the actions need.

    Returns:
      What `svg` and `png` draw.

    Raises:
      ValueError: if there is no timeline, or another number of titles.
    """
    # The types of plans and profiles are not imported: a schedule needs neither.
    if hasattr(drawn, "microbatch_size"):
        if titles is not None:
            raise ValueError("titles are for timelines, a profile has none")
        return _bars.picture(
            profiled(drawn), checked(_WIDE if width is None else width)
        )
    if hasattr(drawn, "forecast"):
        bars, timeline = planned(drawn)
        below = _stacked((timeline,), titles, width, _WIDE)
        return _joined(_bars.picture(bars, below.width), below)
    return _stacked(listed(drawn), titles, width)


def _joined(above: Picture, below: Picture) -> Picture:
    """One picture above another that is as wide."""
    shapes = *above.shapes, *(lowered(shape, above.height) for shape in below.shapes)
    description = f"{above.description}; {below.description}"
    return Picture(below.width, above.height + below.height, shapes, description)


def _stacked(
    shown: tuple[Timeline, ...],
    titles: Sequence[str] | None,
    width: float | None,
    at_least: float = NARROWEST,
) -> Picture:
    """Timelines one below the other."""
    names = named(shown, titles)
    frame = frame_of(shown, width, at_least)
    shapes: list[Shape] = []
    y = _TOP
    for timeline, name in zip(shown, names, strict=True):
        shapes += panel(timeline, name, frame, y)
        y += height(timeline, frame) + _BETWEEN
    grid = [*_grid(frame, _TOP + 26, y - _BETWEEN)]
    shapes += _axis(frame, y - _BETWEEN)
    y += _AXIS
    legend, y = _legend(shown, frame, y)
    description = "; ".join(
        f"{name}: {summary(timeline, frame)}"
        for timeline, name in zip(shown, names, strict=True)
    )
    return Picture(frame.width, y + 6, (*grid, *shapes, *legend), description)


def listed(timelines: Any) -> tuple[Timeline, ...]:
    """One timeline or several, as several; none is an error.

    Of a schedule, that with the default costs for the layers of a rank; of a plan of
    stages with replicas, what it simulates.
    """
    given = tuple(timelines) if isinstance(timelines, Iterable) else (timelines,)
    shown = tuple(
        each.simulate(fitting(Costs(), each))
        if isinstance(each, Schedule)
        else each.simulate()
        if hasattr(each, "simulate")
        else each
        for each in given
    )
    for other in shown:
        if not isinstance(other, Timeline):
            raise TypeError(
                f"a {type(other).__name__} is not a timeline: draw what "
                f"Schedule.simulate, jpipe.plan or jpipe.profile returns"
            )
    if not shown:
        raise ValueError("no timelines: give one or more, as Schedule.simulate returns")
    return shown


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
    name = f"time, {frame.unit}" if frame.unit else "time"
    yield Text(frame.left - 8, base, name, _SMALL, palette.GREY, "end")
    for time in frame.ticks():
        x, text = frame.x(time), number(time * frame.factor)
        yield Path(((x, y), (x, y + 4)), stroke=palette.GREY)
        yield Text(x, base, text, _SMALL, palette.GREY, "middle")


def _legend(
    timelines: tuple[Timeline, ...], frame: Frame, top: float
) -> tuple[list[Shape], float]:
    """The entries, from left to right in as many lines as they need."""
    shapes: list[Shape] = []
    x, y = frame.left, top
    for kind, text in _entries(timelines, frame):
        swatch = _SWATCH + 6 if kind else 0.0
        width = swatch + text_width(text, LABEL) + 12
        if x > frame.left and x + width > frame.width:
            x, y = frame.left, y + _LEGEND_LINE
        shapes += _swatch(kind, timelines, x, y + 3)
        shapes.append(Text(x + swatch, y + 12, text, LABEL, palette.INK))
        x += width
    return shapes, y + _LEGEND_LINE


def _entries(
    timelines: tuple[Timeline, ...], frame: Frame
) -> Iterator[tuple[str, str]]:
    for op in palette.ops(timelines):
        yield op, f"{op} {palette.NAMES[op]}"
    if any(timeline.exchanges for timeline in timelines):
        yield "exchange", "exchange of gradients"
    yield "idle", "idle"
    if frame.most_bytes:
        yield "memory", "memory held"
    if max(map(palette.num_chunks, timelines)) > 1:
        yield "", "dark to light: stages of a rank"
    yield "", "number: micro-batch"


def _swatch(
    kind: str, timelines: tuple[Timeline, ...], x: float, y: float
) -> Iterator[Shape]:
    """What an entry of the legend explains, in small; an op with all its shades."""
    tall = 10.0
    if kind == "idle":
        yield Rect(x, y, _SWATCH, tall, palette.HATCH, hatched=True)
    elif kind == "exchange":
        yield Rect(x, y, _SWATCH, tall, palette.EXCHANGE)
    elif kind == "memory":
        right, low = x + _SWATCH, y + tall
        line = ((x, y + 6), (x + 6, y + 6), (x + 6, y), (right, y))
        yield Path((*line, (right, low), (x, low)), fill=palette.MEMORY)
        yield Path(line, stroke=palette.MEMORY_LINE)
    elif kind:
        count = max(map(palette.num_chunks, timelines))
        for i in range(count):
            part = _SWATCH / count
            yield Rect(x + i * part, y, part, tall, palette.shade(kind, i, count))
