"""The best of the candidates as a plan, and why it is that."""

import dataclasses
import os
from collections.abc import Iterable, Sequence

from ..schedules import Action, Schedule
from ..schedules._action import BACKWARD, INPUT, WEIGHT
from ..schedules._formats import format_bytes, format_seconds
from ._fingerprint import estimated, measured_on_cpu
from ._forecast import Candidate, stage_costs, transfers
from ._plan import Forecast, Plan
from ._space import SearchSpace

# Steps that differ by less are as long.
_EQUAL = 0.0005


def chosen(
    candidates: Sequence[Candidate], space: SearchSpace, missing: Sequence[str] = ()
) -> Plan:
    """The best of the candidates, with the reasons.

    Args:
      candidates: from `search`.
      space: what they were chosen from.
      missing: what was not counted, in sentences.

    Returns:
      The plan.

    Raises:
      ValueError: if none fits: with what is short, where, by how much, and what would.
    """
    best = candidates[0]
    if not best.fits(space.hardware):
        raise ValueError(_nothing_fits(best, space))
    sent = _sent(best)
    assert best.plan is not None
    return dataclasses.replace(
        best.plan,
        forecast=Forecast(
            seconds=best.seconds,
            memory=best.memory,
            costs=best.costs,
            memory_limit=space.hardware.memory_limit,
            sent_bytes=sent,
            reasons=(*_reasons(best, candidates, space, sent), *missing),
            last_forward=stage_costs(space, best).forward[-1],
        ),
    )


def _reasons(
    best: Candidate, candidates: Sequence[Candidate], space: SearchSpace, sent: int
) -> Iterable[str]:
    """Why this one, in sentences."""
    timeline, hardware = best.timeline, space.hardware
    rank = timeline.bottleneck
    stages = [str(s) for s, at in enumerate(timeline.placement) if at == rank]
    yield (
        f"bottleneck: rank {rank} (stage {' and '.join(stages)}) computes "
        f"{format_seconds(timeline.busy[rank])} of {format_seconds(best.seconds)}"
    )
    if best.host > timeline.makespan:
        yield (
            f"host: one thread has all programs and transfers run, which takes "
            f"{format_seconds(best.host)}, more than the devices need: "
            f"{format_seconds(timeline.makespan)}"
        )
    most, limit = best.most_bytes, hardware.memory_limit
    fullest = [memory.total for memory in best.memory].index(most)
    room = "" if limit is None else f", {format_bytes(limit - most)} below the limit"
    yield f"memory: rank {fullest} needs most, {format_bytes(most)}{room}"
    free = ""
    if not hardware.bandwidth:
        free = "they were taken to cost no time"
        if hardware.latency:
            free = f"{format_seconds(hardware.latency)} for each, whatever its size"
    speed = hardware.measured or free
    ending = f"; {speed}" if speed else ""
    yield f"transfers: {format_bytes(sent)} a step between devices{ending}"
    if best.data > 1:
        last = max(timeline.end.values()) - min(timeline.start.values())
        yield (
            f"exchange: the {best.data} devices of a stage add up its gradients once "
            f"in a step, {format_seconds(timeline.makespan - last)} of it"
        )
    fit = [c for c in candidates[1:] if c.fits(hardware)]
    if others := [c for c in fit if not _same(c, best)]:
        yield f"runner-up: {others[0]}: {_difference(others[0], best)}"
    if idle := hardware.num_devices - best.num_devices:
        yield (
            f"{idle} of {hardware.num_devices} devices are left idle: no better plan "
            f"that uses them was found"
        )
    if best.num_devices > 1 and measured_on_cpu(best.profile.fingerprint):
        yield (
            f"cores: {best.num_devices} devices share the {os.cpu_count() or 1} cores "
            f"of this machine, each layer was measured with all of them to itself: a "
            f"step will take longer than predicted, with halves of backwards above all"
        )
    if (rates := estimated(best.profile.fingerprint)) is not None:
        yield (
            f"layers: estimated for a device of {rates['peak_flops']:g} flops and "
            f"{rates['memory_bandwidth']:g} bytes of memory per second, and "
            f"{rates['action_seconds'] * 1e6:g} µs more for each action; peak_flops=, "
            f"memory_bandwidth= and action_seconds= describe yours"
        )


def _difference(other: Candidate, best: Candidate) -> str:
    """The seconds or bytes of a runner-up; why it was not chosen, if they are fewer."""
    more = other.seconds / best.seconds - 1 if best.seconds else 0.0
    if abs(more) < _EQUAL:
        most = format_bytes(other.most_bytes)
        return f"as long, and {most} in the device that needs most"
    if more > 0:
        return f"{format_seconds(other.seconds)}, {more:.1%} more"
    less = f"{format_seconds(other.seconds)}, {-more:.1%} less"
    if other.seconds * other.handicap > best.seconds * best.handicap:
        return (
            f"{less} as predicted; but devices that share cores take longer for halves "
            f"of backwards, so it counts {other.handicap - 1:.0%} more"
        )
    return f"{less}, if it fits: others as fast need more bytes than predicted"


def _same(one: Candidate, other: Candidate) -> bool:
    """Whether two differ in nothing but their residuals and names."""
    mesh = one.data == other.data and one.balance == other.balance
    return mesh and _executed(one.schedule) == _executed(other.schedule)


def _executed(schedule: Schedule) -> list[list[Action]]:
    """The rows without halves of the first stage: its W is all of its backward."""
    rows = []
    for row in schedule.rows:
        actions = [a for a in row if a.stage > 0 or a.op != INPUT]
        rows.append(
            [
                a._replace(op=BACKWARD) if a.stage == 0 and a.op == WEIGHT else a
                for a in actions
            ]
        )
    return rows


def _nothing_fits(nearest: Candidate, space: SearchSpace) -> str:
    limit = space.hardware.memory_limit
    assert limit is not None
    lines = [
        f"rank {rank} {own.describe_excess(limit)}"
        for rank, own in enumerate(nearest.memory)
        if own.total > limit
    ]
    return (
        f"memory_limit={limit:,} bytes on {space.hardware.num_devices} devices: no "
        f"plan fits. The nearest is {nearest}:\n  * "
        + "\n  * ".join(lines)
        + f"\nThat one needs {nearest.num_devices} devices of "
        f"{format_bytes(nearest.most_bytes)}; else take more devices (num_devices=), "
        f"smaller micro-batches (num_microbatches=) or a smaller model"
    )


def _sent(best: Candidate) -> int:
    """The bytes that cross between devices in a step."""
    sizes = transfers(best.costs, best.schedule.placement)
    moved = sum(sizes) * best.schedule.num_microbatches
    exchanged = 2 * (best.data - 1) * sum(best.costs.accumulator_bytes)
    return int(moved * best.data + exchanged)
