"""A plan: what each rank computes and holds, under the limit, and when."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from ..schedules import Timeline
from ..schedules._units import duration, many, size
from . import _palette as palette
from ._bars import Bar, Bars, Part, Row

# From what stays to what comes and goes.
_PARTS = {
    "parameters": "#6b5b95",
    "gradients": "#0072b2",
    "optimizer": "#56b4e9",
    "held": "#e69f00",
    "workspace": "#b4bcc6",
}
_BUSY = palette.OPS["W"]
# Bars that are smaller parts of the limit than that have a scale of their own: nobody
# would see them.
_SMALLEST = 1 / 8


def planned(plan: Any) -> tuple[Bars, Timeline]:
    """What is drawn of a plan.

    Args:
      plan: from `jpipe.plan`.

    Returns:
      For each rank its time in a step and its memory at the peak; the timeline of the
      step, in seconds.

    Raises:
      ValueError: if nobody planned it.
    """
    forecast = plan.forecast
    if forecast is None:
        raise ValueError(
            "a plan without a forecast: draw what jpipe.plan returns, or plan.schedule"
        )
    timeline = plan.schedule.simulate(forecast.costs)
    count, ranks = plan.schedule.num_microbatches, len(forecast.memory)
    limit, most = forecast.memory_limit, max(own.total for own in forecast.memory)
    shape = each = ""
    if plan.data > 1:
        shape = f"{ranks} x {plan.data} devices, "
        each = "of each device "
    bars = Bars(
        title=f"{plan.schedule.name}, {many(count, 'micro-batch')}, "
        f"{shape}{duration(forecast.seconds)} a step predicted",
        heads=(
            "busy in a step",
            f"memory {each}at the peak" + (f", limit {size(limit)}" if limit else ""),
        ),
        rows=tuple(_row(plan, rank, own) for rank, own in enumerate(timeline.busy)),
        legend={"busy": _BUSY, **_PARTS},
        wholes=(
            forecast.seconds,
            limit if limit and most >= _SMALLEST * limit else None,
        ),
    )
    if timeline.makespan < forecast.seconds:
        name = f"{timeline.name}: the devices alone, which wait for the host"
        timeline = dataclasses.replace(timeline, name=name)
    # What a rank holds besides the optimizer's state and workspace would contradict the
    # bars above, which have all of it.
    return bars, dataclasses.replace(timeline, memory=())


def _row(plan: Any, rank: int, busy: float) -> Row:
    forecast, stages = plan.forecast, [x for x in plan.stages if x.rank == rank]
    layers = " + ".join(_abridged(plan.names[stage.index]) for stage in stages)
    modes = " and ".join(dict.fromkeys(stage.remat for stage in stages))
    memory = forecast.memory[rank]
    computing = Part(busy, _BUSY, f"busy: {duration(busy)}, {layers}")
    share = f"{busy / forecast.seconds:.0%}" if forecast.seconds else ""
    parts = [
        Part(getattr(memory, name), fill, f"{name}: {size(getattr(memory, name))}")
        for name, fill in _PARTS.items()
    ]
    bars = Bar((computing,), share), Bar(tuple(parts), size(memory.total))
    return Row(f"rank {rank}, {modes}: {layers}", bars)


def _abridged(layers: Sequence[str]) -> str:
    """The layers of a stage in some words: ``Embed to Block (5)``."""
    if not layers:
        return "a part of the function"
    first, last = layers[0], layers[-1]
    if len(layers) == 1:
        return first
    return f"{first} to {last} ({len(layers)})"
