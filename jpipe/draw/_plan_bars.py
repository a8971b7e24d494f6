"""Lays out a plan: the time and the memory of each rank, above its timeline."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from ..schedules import Action, Timeline
from ..schedules._action import BACKWARD, FORWARD, INPUT
from ..schedules._formats import format_bytes, format_count, format_seconds
from . import _palette as palette
from ._bars import Bar, Column, Part, lay_out_bars
from ._elements import Picture
from ._transfers import has_transfers, list_transfers

# Part of the memory of a rank -> its colour; what stays comes first.
_PARTS = {
    "parameters": "#6b5b95",
    "gradients": "#0072b2",
    "optimizer": "#56b4e9",
    "activations": "#e69f00",
    "workspace": "#b4bcc6",
}
_COMPUTING = palette.OPS["W"]
# Bars that are all less than this fraction of the limit are not drawn on its scale, on
# which they could not be told apart.
_LEAST_FRACTION = 1 / 8


def is_plan(drawn: Any) -> bool:
    """True for a `jpipe.Plan`, which may not be imported here: it needs JAX."""
    return hasattr(drawn, "forecast")


def simulate_plan(plan: Any) -> Timeline:
    """The timeline of the step of a plan from `jpipe.plan`, in seconds.

    Raises:
      ValueError: if the plan has no forecast.
    """
    if plan.forecast is None:
        raise ValueError(
            "a plan without a forecast: draw what jpipe.plan returns, or plan.schedule"
        )
    timeline = _split_fused_forwards(
        plan.schedule.simulate(plan.forecast.costs), plan.forecast.last_forward
    )
    name = timeline.name
    if timeline.makespan < plan.forecast.seconds:
        name += ": the devices alone, which wait for the host"
    # The memory of a timeline lacks the optimizer's state and workspace, so its peaks
    # would contradict the bars.
    schedule = dataclasses.replace(timeline.schedule, name=name)
    return dataclasses.replace(timeline, schedule=schedule, memory=())


def _split_fused_forwards(timeline: Timeline, forward_seconds: float) -> Timeline:
    """The timeline with the forwards of the last stage that are fused into backwards.

    In the costs of a plan such a forward computes nothing, and its backward takes the
    time of both.

    Args:
      timeline: the timeline as simulated.
      forward_seconds: the seconds of a forward of the last stage.
    """
    start = dict(timeline.start)
    end = dict(timeline.end)
    last_stage = timeline.num_stages - 1
    for action in timeline.start:
        if action.stage != last_stage or action.op not in (BACKWARD, INPUT):
            continue
        forward = Action(FORWARD, last_stage, action.microbatch)
        if timeline.compute_start[forward] < timeline.compute_end[forward]:
            continue
        # What it receives may keep the rank: then it stays where that is.
        if start[forward] == end[forward]:
            start[forward] = start[action]
            end[forward] = start[action]
        if end[forward] == start[action]:
            compute_end = timeline.compute_end[action]
            end[forward] = min(start[action] + forward_seconds, compute_end)
            start[action] = end[forward]
    return dataclasses.replace(timeline, start=start, end=end)


def lay_out_plan(plan: Any, timeline: Timeline, width: float) -> Picture:
    """Lays out two bars for each rank: its time in a step, its memory at the peak."""
    forecast = plan.forecast
    seconds = forecast.seconds
    limit = forecast.memory_limit

    title = f"{plan.schedule.name}, "
    title += f"{format_count(plan.schedule.num_microbatches, 'micro-batch')}, "
    memory_head = "memory at the peak"
    if plan.data > 1:
        title += f"{len(forecast.memory)} x {plan.data} devices, "
        memory_head = "memory of each device at the peak"
    title += f"{format_seconds(seconds)} a step predicted"
    if limit:
        memory_head += f", limit {format_bytes(limit)}"

    time_bars: list[Bar] = []
    for rank, busy in enumerate(timeline.busy):
        transferring = 0.0
        for action in timeline.rows[rank]:
            for transfer in list_transfers(timeline, action):
                transferring += transfer.end - transfer.start
        computing = busy - transferring
        layers = _format_layers(plan, rank)
        parts = [
            Part(
                computing,
                _COMPUTING,
                f"computes: {format_seconds(computing)}, {layers}",
            )
        ]
        if transferring:
            tooltip = f"transfers: {format_seconds(transferring)}"
            parts.append(Part(transferring, palette.TRANSFER, tooltip))
        time_bars.append(Bar(parts, f"{busy / seconds:.0%}" if seconds else ""))

    memory_bars: list[Bar] = []
    for memory in forecast.memory:
        parts: list[Part] = []
        for name, fill in _PARTS.items():
            num_bytes = getattr(memory, name)
            parts.append(Part(num_bytes, fill, f"{name}: {format_bytes(num_bytes)}"))
        memory_bars.append(Bar(parts, format_bytes(memory.total)))
    fullest = max(memory.total for memory in forecast.memory)
    shows_limit = limit and fullest >= _LEAST_FRACTION * limit

    colours = {"computing": _COMPUTING}
    if has_transfers(timeline):
        colours["transfers"] = palette.TRANSFER
    colours |= _PARTS
    return lay_out_bars(
        title,
        names=[_format_rank(plan, rank) for rank in range(len(time_bars))],
        columns=[
            Column("busy in a step", time_bars, whole=seconds),
            Column(memory_head, memory_bars, whole=limit if shows_limit else None),
        ],
        colours=colours,
        width=width,
    )


def _format_rank(plan: Any, rank: int) -> str:
    """Formats a rank with its remat modes and layers."""
    modes = dict.fromkeys(stage.remat for stage in plan.stages if stage.rank == rank)
    return f"rank {rank}, {' and '.join(modes)}: {_format_layers(plan, rank)}"


def _format_layers(plan: Any, rank: int) -> str:
    """Formats the layers of all stages of a rank."""
    stages = [stage.index for stage in plan.stages if stage.rank == rank]
    return " + ".join(_abridge(plan.layer_names[index]) for index in stages)


def _abridge(layers: Sequence[str]) -> str:
    """Abridges the layers of a stage: ``Embed to Block (5)``."""
    if not layers:
        return "a part of the function"
    if len(layers) == 1:
        return layers[0]
    return f"{layers[0]} to {layers[-1]} ({len(layers)})"
