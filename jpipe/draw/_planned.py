"""A plan: what each rank computes and holds, under the limit, and when."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from ..schedules import Timeline
from ..schedules._units import duration, many, size
from . import _palette as palette
from ._bars import Bars, Part, Row

# From what stays to what comes and goes.
_PARTS = {
    "parameters": "#6b5b95",
    "gradients": "#0072b2",
    "optimizer": "#56b4e9",
    "held": "#e69f00",
    "workspace": "#b4bcc6",
}
_BUSY = palette.OPS["W"]


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
    count, ranks = plan.schedule.num_microbatches, len(forecast.memory)
    parts = [n for n in _PARTS if any(getattr(m, n) for m in forecast.memory)]
    shape = each = ""
    if plan.data > 1:
        shape = f"{ranks} x {plan.data} devices, "
        each = "of each device "
    bars = Bars(
        title=f"{plan.schedule.name}, {many(count, 'micro-batch')}, "
        f"{shape}{duration(forecast.seconds)} a step predicted",
        heads=("busy in a step", f"memory {each}at the peak"),
        rows=tuple(_row(plan, rank) for rank in range(ranks)),
        legend={"busy": _BUSY} | {_named(name): _PARTS[name] for name in parts},
        seconds=forecast.seconds,
        limit=forecast.memory_limit,
    )
    timeline = plan.schedule.simulate(forecast.costs)
    if timeline.makespan < forecast.seconds:
        name = f"{timeline.name}: the devices alone, which wait for the host"
        timeline = dataclasses.replace(timeline, name=name)
    # What a rank holds besides the optimizer's state and workspace would contradict the
    # bars above, which have all of it.
    return bars, dataclasses.replace(timeline, memory=())


def _row(plan: Any, rank: int) -> Row:
    forecast, stages = plan.forecast, [x for x in plan.stages if x.rank == rank]
    layers = " + ".join(_abridged(plan.names[stage.index]) for stage in stages)
    modes = " and ".join(dict.fromkeys(stage.remat for stage in stages))
    busy, memory = forecast.busy[rank], forecast.memory[rank]
    return Row(
        name=f"rank {rank}, {modes}: {layers}",
        times=(Part(busy, _BUSY, f"busy: {duration(busy)}, {layers}"),),
        time=f"{busy / forecast.seconds:.0%}" if forecast.seconds else "",
        sizes=tuple(
            Part(held, fill, f"{name}: {size(held)}")
            for name, fill in _PARTS.items()
            for held in [getattr(memory, name)]
        ),
        size=size(memory.total),
    )


def _abridged(layers: Sequence[str]) -> str:
    """The layers of a stage in some words: ``Embed to Block (5)``, ``Block x 3``."""
    if not layers:
        return "a part of the function"
    first, last = layers[0], layers[-1]
    if len(layers) == 1:
        return first
    if set(layers) == {first}:
        return f"{first} x {len(layers)}"
    return f"{first} to {last} ({len(layers)})"


def _named(part: str) -> str:
    return "activations held" if part == "held" else part
