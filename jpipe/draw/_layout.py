"""Lays out the whole picture: timelines one below the other, one axis, one legend."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ..schedules import Costs, Schedule, Timeline
from ..schedules._compare import scale_costs
from ..schedules._formats import format_type
from . import _palette as palette
from ._elements import Path, Picture, Shape, Text
from ._frame import Frame, fit_frame
from ._legend import lay_out_legend
from ._panel import format_summary, lay_out_panel, panel_height
from ._plan_bars import is_plan, lay_out_plan, simulate_plan
from ._transfers import has_transfers

_TOP = 8.0
_PANEL_SPACE = 8.0
_AXIS_HEIGHT = 26.0
# The top of a panel has a heading, over which the grid does not go.
_HEADING_HEIGHT = 26
_TICK_LABEL = 10.0


def lay_out(
    drawn: Any, titles: Sequence[str] | None = None, width: float | None = None
) -> Picture:
    """Lays out timelines, or a plan above its timeline.

    Args:
      drawn: one timeline or schedule, or several; or a plan.
      titles: a title for each timeline; default: their names.
      width: the width in pixels; default: what the actions need.

    Returns:
      The picture that `svg` writes.

    Raises:
      ValueError: if there is no timeline, or another number of titles.
    """
    if is_plan(drawn):
        timelines = (simulate_plan(drawn),)
        frame = fit_frame(timelines, width)
        plan = lay_out_plan(drawn, timelines[0], frame.width)
    else:
        timelines = list_timelines(drawn)
        frame = fit_frame(timelines, width)
        plan = None
    names = choose_titles(timelines, titles)

    first = _TOP if plan is None else plan.height + _TOP
    y = first
    panels: list[Shape] = []
    descriptions: list[str] = []
    for timeline, name in zip(timelines, names, strict=True):
        panels += lay_out_panel(timeline, title=name, frame=frame, top=y)
        descriptions.append(f"{name}: {format_summary(timeline, frame)}")
        y += panel_height(timeline, frame) + _PANEL_SPACE
    bottom = y - _PANEL_SPACE
    grid = list(_lay_out_grid(frame, top=first + _HEADING_HEIGHT, bottom=bottom))
    axis = list(_lay_out_axis(frame, bottom))
    legend, y = lay_out_legend(
        _legend_colours(timelines, frame),
        left=frame.left,
        top=y + _AXIS_HEIGHT,
        right=frame.width,
    )

    shapes = (*grid, *panels, *axis, *legend)
    if plan is not None:
        shapes = (*plan.shapes, *shapes)
        descriptions.insert(0, plan.description)
    return Picture(frame.width, y + 6, shapes, description="; ".join(descriptions))


def list_timelines(timelines: Any) -> tuple[Timeline, ...]:
    """Lists the timelines that a user means.

    Args:
      timelines: one or several timelines, schedules or plans. A schedule is simulated
        with the default costs for the layers of a rank; a plan with those of its step.

    Raises:
      ValueError: if there is none.
      TypeError: if one is something else.
    """
    is_list = isinstance(timelines, Iterable)
    drawn = tuple(timelines) if is_list else (timelines,)
    if not drawn:
        raise ValueError("no timelines: give one or more, as Schedule.simulate returns")
    return tuple(map(_to_timeline, drawn))


def _to_timeline(drawn: Any) -> Timeline:
    if is_plan(drawn):
        return simulate_plan(drawn)
    if isinstance(drawn, Schedule):
        return drawn.simulate(scale_costs(Costs(), drawn))
    if not isinstance(drawn, Timeline):
        raise TypeError(
            f"{format_type(drawn)} is not a timeline: draw a Schedule, such as "
            f"pipe.schedule, or what Schedule.simulate, step.profile or jpipe.plan "
            f"returns"
        )
    return drawn


def choose_titles(
    timelines: tuple[Timeline, ...], titles: Sequence[str] | None
) -> tuple[str, ...]:
    """The title of each timeline: those of the user, or the names."""
    if titles is None:
        return tuple(timeline.name for timeline in timelines)
    texts = (titles,) if isinstance(titles, str) else tuple(titles)
    if len(texts) != len(timelines):
        raise ValueError(
            f"titles={list(texts)} for {len(timelines)} timelines: give one for each"
        )
    return texts


def _lay_out_grid(frame: Frame, *, top: float, bottom: float) -> Iterator[Path]:
    """Yields a vertical line at each tick."""
    for time in frame.ticks():
        x = frame.x(time)
        yield Path(((x, top), (x, bottom)), stroke=palette.GRID)


def _lay_out_axis(frame: Frame, y: float) -> Iterator[Shape]:
    """Yields the axis of time with its ticks."""
    yield Path(((frame.left, y), (frame.right, y)), stroke=palette.GREY)
    baseline = y + 17

    def label(x: float, text: str, anchor: str) -> Text:
        return Text(
            x, baseline, text, size=_TICK_LABEL, fill=palette.GREY, anchor=anchor
        )

    yield label(frame.left - 20, "time", "end")
    for time in frame.ticks():
        x = frame.x(time)
        yield Path(((x, y), (x, y + 4)), stroke=palette.GREY)
        yield label(x, frame.format_time(time), "middle")


def _legend_colours(timelines: tuple[Timeline, ...], frame: Frame) -> dict[str, str]:
    """The texts of the legend, with their colours."""
    colours: dict[str, str] = {}
    for op in palette.list_ops(timelines):
        colours[f"{op} {palette.NAMES[op]}"] = palette.OPS[op]
    if any(has_transfers(timeline) for timeline in timelines):
        colours["transfer, without computing"] = palette.TRANSFER
    if any(timeline.exchanges for timeline in timelines):
        colours["exchange of gradients"] = palette.EXCHANGE
    colours["idle"] = palette.IDLE
    if frame.max_bytes:
        colours["memory held"] = palette.MEMORY
    if max(map(palette.max_chunks, timelines)) > 1:
        colours["dark to light: stages of a rank"] = ""
    colours["number: micro-batch"] = ""
    return colours
