"""A plan: what each rank computes and holds, under the limit, and when."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from ..schedules import Action, Timeline
from ..schedules._action import BACKWARD, FORWARD, INPUT
from ..schedules._units import duration, many, size
from . import _bars
from . import _palette as palette
from ._bars import Bar, Column, Part
from ._shapes import Picture

# From what stays to what comes and goes.
_PARTS = {
    "parameters": "#6b5b95",
    "gradients": "#0072b2",
    "optimizer": "#56b4e9",
    "activations": "#e69f00",
    "workspace": "#b4bcc6",
}
_BUSY = palette.OPS["W"]
# Bars that are smaller parts of the limit than that have a scale of their own: nobody
# would see them.
_SMALLEST = 1 / 8


def is_plan(drawn: Any) -> bool:
    """Whether something is a plan, whose type is not imported: schedules have none."""
    return hasattr(drawn, "forecast")


def timeline_of(plan: Any) -> Timeline:
    """The timeline of the step of a plan from `jpipe.plan`, in seconds.

    Raises:
      ValueError: if nobody planned it.
    """
    if plan.forecast is None:
        raise ValueError(
            "a plan without a forecast: draw what jpipe.plan returns, or plan.schedule"
        )
    timeline = _unjoined(
        plan.schedule.simulate(plan.forecast.costs), plan.forecast.last_forward
    )
    name = timeline.name
    if timeline.makespan < plan.forecast.seconds:
        name += ": the devices alone, which wait for the host"
    # What a rank holds besides the optimizer's state and workspace would contradict the
    # bars, which have all of it.
    return dataclasses.replace(timeline, name=name, memory=())


def _unjoined(timeline: Timeline, forward: float) -> Timeline:
    """The timeline with the forwards of the last stage that run in their backwards.

    In the costs of a plan such a forward takes no time, and its backward takes that of
    both.

    Args:
      timeline: the simulated one.
      forward: the seconds of a forward of the last stage.
    """
    start, end = dict(timeline.start), dict(timeline.end)
    last = timeline.num_stages - 1
    for action in timeline.start:
        op, stage, microbatch = action
        joined = Action(FORWARD, last, microbatch)
        is_whole = op in (BACKWARD, INPUT) and stage == last
        if is_whole and start[joined] == end[joined]:
            between = min(start[action] + forward, end[action])
            start[joined], end[joined] = start[action], between
            start[action] = between
    return dataclasses.replace(timeline, start=start, end=end)


def bars(plan: Any, timeline: Timeline, width: float) -> Picture:
    """For each rank its time in a step and its memory at the peak."""
    forecast, count = plan.forecast, plan.schedule.num_microbatches
    seconds, limit = forecast.seconds, forecast.memory_limit
    shape, each = "", ""
    if plan.data > 1:
        shape = f"{len(forecast.memory)} x {plan.data} devices, "
        each = "of each device "
    busy = [
        Bar(
            [Part(time, _BUSY, f"busy: {duration(time)}, {_layers(plan, rank)}")],
            f"{time / seconds:.0%}" if seconds else "",
        )
        for rank, time in enumerate(timeline.busy)
    ]
    memory = [
        Bar(
            [
                Part(getattr(own, name), fill, f"{name}: {size(getattr(own, name))}")
                for name, fill in _PARTS.items()
            ],
            size(own.total),
        )
        for own in forecast.memory
    ]
    head = f"memory {each}at the peak" + (f", limit {size(limit)}" if limit else "")
    most = max(own.total for own in forecast.memory)
    scale = limit if limit and most >= _SMALLEST * limit else None
    return _bars.picture(
        f"{plan.schedule.name}, {many(count, 'micro-batch')}, "
        f"{shape}{duration(seconds)} a step predicted",
        [_name(plan, rank) for rank in range(len(busy))],
        [Column("busy in a step", busy, seconds), Column(head, memory, scale)],
        {"busy": _BUSY, **_PARTS},
        width,
    )


def _name(plan: Any, rank: int) -> str:
    modes = dict.fromkeys(stage.remat for stage in plan.stages if stage.rank == rank)
    return f"rank {rank}, {' and '.join(modes)}: {_layers(plan, rank)}"


def _layers(plan: Any, rank: int) -> str:
    """What a rank runs in some words."""
    names = [
        plan.layer_names[stage.index] for stage in plan.stages if stage.rank == rank
    ]
    return " + ".join(map(_abridged, names))


def _abridged(layers: Sequence[str]) -> str:
    """The layers of a stage in some words: ``Embed to Block (5)``."""
    if not layers:
        return "a part of the function"
    first, last = layers[0], layers[-1]
    if len(layers) == 1:
        return first
    return f"{first} to {last} ({len(layers)})"
