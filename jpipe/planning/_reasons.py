"""The best of the candidates as a plan, and why it is that."""

import dataclasses
import os
from collections.abc import Iterable, Sequence

from ..schedules._units import duration, size
from ._fingerprint import estimated, measured_on_cpu
from ._forecast import Candidate, transfers
from ._plan import Forecast, Plan
from ._space import Space


def chosen(
    candidates: Sequence[Candidate], space: Space, missing: Sequence[str] = ()
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
        ),
    )


def _reasons(
    best: Candidate, candidates: Sequence[Candidate], space: Space, sent: int
) -> Iterable[str]:
    """Why this one, in sentences."""
    timeline, hardware = best.timeline, space.hardware
    rank = timeline.bottleneck
    stages = [str(s) for s, at in enumerate(timeline.placement) if at == rank]
    yield (
        f"bottleneck: rank {rank} (stage {' and '.join(stages)}) computes "
        f"{duration(timeline.busy[rank])} of {duration(best.seconds)}"
    )
    if best.host > timeline.makespan:
        yield (
            f"host: one thread has all programs and transfers run, which takes "
            f"{duration(best.host)}, more than the devices need: "
            f"{duration(timeline.makespan)}"
        )
    most, limit = best.most_bytes, hardware.memory_limit
    fullest = [memory.total for memory in best.memory].index(most)
    room = "" if limit is None else f", {size(limit - most)} below the limit"
    yield f"memory: rank {fullest} needs most, {size(most)}{room}"
    free = "" if hardware.bandwidth else "they were taken to cost no time"
    speed = hardware.measured or free
    yield f"transfers: {size(sent)} a step between devices{speed and '; ' + speed}"
    if best.data > 1:
        last = max(timeline.end.values()) - min(timeline.start.values())
        yield (
            f"exchange: the {best.data} devices of a stage add up its gradients once "
            f"in a step, {duration(timeline.makespan - last)} of it"
        )
    fit = [c for c in candidates[1:] if c.fits(hardware)]
    if others := [c for c in fit if not _same(c, best)]:
        more = others[0].seconds / best.seconds - 1 if best.seconds else 0.0
        yield (
            f"runner-up: {others[0]}: {duration(others[0].seconds)}, "
            f"{abs(more):.1%} {'less' if more < 0 else 'more'}"
        )
    if idle := hardware.num_devices - best.num_devices:
        yield (
            f"{idle} of {hardware.num_devices} devices are left idle: no better plan "
            f"that uses them was found"
        )
    if best.num_devices > 1 and measured_on_cpu(best.profile.made):
        yield (
            f"cores: {best.num_devices} devices share the {os.cpu_count() or 1} cores "
            f"of this machine, each layer was measured with all of them to itself: a "
            f"step will take longer than predicted, with halves of backwards above all"
        )
    if (rates := estimated(best.profile.made)) is not None:
        yield (
            f"layers: estimated for a device of {rates['peak_flops']:g} flops and "
            f"{rates['memory_bandwidth']:g} bytes of memory per second, and "
            f"{rates['action_seconds'] * 1e6:g} µs more for each action; peak_flops=, "
            f"memory_bandwidth= and action_seconds= describe yours"
        )


def _same(one: Candidate, other: Candidate) -> bool:
    """Whether two differ in nothing but their residuals and names."""
    mesh = one.data == other.data and one.balance == other.balance
    return mesh and one.schedule.rows == other.schedule.rows


def _nothing_fits(nearest: Candidate, space: Space) -> str:
    limit = space.hardware.memory_limit
    assert limit is not None
    lines = [
        f"rank {rank} {own.short(limit)}"
        for rank, own in enumerate(nearest.memory)
        if own.total > limit
    ]
    return (
        f"memory_limit={limit:,} bytes on {space.hardware.num_devices} devices: no "
        f"plan fits. The nearest is {nearest}:\n  * "
        + "\n  * ".join(lines)
        + f"\nThat one needs {nearest.num_devices} devices of "
        f"{size(nearest.most_bytes)}; else take more devices (num_devices=), smaller "
        f"micro-batches (num_microbatches=) or a smaller model"
    )


def _sent(best: Candidate) -> int:
    """The bytes that cross between devices in a step."""
    sizes = transfers(best.costs, best.schedule.placement)
    moved = sum(sizes) * best.schedule.num_microbatches
    exchanged = 2 * (best.data - 1) * sum(best.costs.accumulator_bytes)
    return int(moved * best.data + exchanged)
