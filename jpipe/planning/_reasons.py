"""Makes a plan of the best candidate, and explains why it is the best."""

import dataclasses
import os
from collections.abc import Iterator, Sequence

from ..schedules import Action, Schedule
from ..schedules._action import BACKWARD, INPUT, WEIGHT
from ..schedules._formats import format_bytes, format_seconds
from ._fingerprint import estimated, is_measured_on_cpu
from ._forecast import Candidate, rank_transfers, stage_costs
from ._plan import Forecast, Plan
from ._space import Hardware, SearchSpace

# Steps whose seconds differ by a smaller part are called as long.
_EQUAL = 0.0005


def explain_best(
    candidates: Sequence[Candidate], space: SearchSpace, notes: Sequence[str] = ()
) -> Plan:
    """The plan of the first candidate, with the reasons.

    Args:
      candidates: the candidates, the best first.
      space: the choices that there were.
      notes: more sentences for the reasons, such as costs that were not counted.

    Returns:
      The plan.

    Raises:
      ValueError: if none fits: with what is short, where, by how much, and what would.
    """
    best = candidates[0]
    if not best.fits(space.hardware):
        raise ValueError(_nothing_fits(best, space.hardware))
    assert best.plan is not None
    sent_bytes = _sent_bytes(best)
    reasons = _reasons(candidates, space.hardware, sent_bytes)
    forecast = Forecast(
        seconds=best.seconds,
        memory=best.memory,
        costs=best.costs,
        memory_limit=space.hardware.memory_limit,
        sent_bytes=sent_bytes,
        reasons=(*reasons, *notes),
        last_forward=stage_costs(space, best.choice).forward[-1],
    )
    return dataclasses.replace(best.plan, forecast=forecast)


def _reasons(
    candidates: Sequence[Candidate], hardware: Hardware, sent_bytes: int
) -> Iterator[str]:
    """Sentences that say why the first candidate is the best."""
    best, *_ = candidates
    yield _bottleneck(best)
    if best.host_seconds > best.makespan:
        yield (
            f"host: one thread has all programs and transfers run, which takes "
            f"{format_seconds(best.host_seconds)}, more than the devices need: "
            f"{format_seconds(best.makespan)}"
        )
    yield _memory(best, hardware)
    yield _transfers(sent_bytes, hardware)
    if best.choice.num_shards > 1:
        yield _exchange(best)

    fitting = (x for x in candidates[1:] if x.fits(hardware))
    runner_up = next((x for x in fitting if not _is_same_run(x, best)), None)
    if runner_up is not None:
        yield f"runner-up: {runner_up.choice}: {_difference(runner_up, best)}"
    num_idle = hardware.num_devices - best.choice.num_devices
    if num_idle > 0:
        yield (
            f"{num_idle} of {hardware.num_devices} devices are left idle: no better "
            f"plan that uses them was found"
        )
    if best.choice.num_devices > 1 and is_measured_on_cpu(best.profile.fingerprint):
        yield (
            f"cores: {best.choice.num_devices} devices share the {os.cpu_count() or 1} "
            f"cores of this machine, each layer was measured with all of them to "
            f"itself: a step will take longer than predicted, with halves of backwards "
            f"above all"
        )
    rates = estimated(best.profile.fingerprint)
    if rates is not None:
        yield (
            f"layers: estimated for a device of {rates['peak_flops']:g} flops and "
            f"{rates['memory_bandwidth']:g} bytes of memory per second, and "
            f"{rates['action_seconds'] * 1e6:g} µs more for each action; peak_flops=, "
            f"memory_bandwidth= and action_seconds= describe yours"
        )


def _bottleneck(best: Candidate) -> str:
    """The rank that computes longest."""
    timeline = best.timeline
    bottleneck = timeline.bottleneck
    placement = best.choice.schedule.placement
    stages = [str(s) for s, rank in enumerate(placement) if rank == bottleneck]
    return (
        f"bottleneck: rank {bottleneck} (stage {' and '.join(stages)}) computes "
        f"{format_seconds(timeline.busy[bottleneck])} of {format_seconds(best.seconds)}"
    )


def _memory(best: Candidate, hardware: Hardware) -> str:
    """The rank that needs most memory."""
    totals = [memory.total for memory in best.memory]
    max_bytes = max(totals)
    text = (
        f"memory: rank {totals.index(max_bytes)} needs most, {format_bytes(max_bytes)}"
    )
    if hardware.memory_limit is not None:
        room = format_bytes(hardware.memory_limit - max_bytes)
        text += f", {room} below the limit"
    return text


def _transfers(sent_bytes: int, hardware: Hardware) -> str:
    """The bytes that cross between devices, and the speed that was assumed."""
    speed = hardware.link_text
    if not speed and not hardware.bandwidth:
        speed = "they were taken to cost no time"
        if hardware.latency:
            speed = f"{format_seconds(hardware.latency)} for each, whatever its size"
    text = f"transfers: {format_bytes(sent_bytes)} a step between devices"
    return f"{text}; {speed}" if speed else text


def _exchange(best: Candidate) -> str:
    """The seconds in which shards add up their gradients."""
    timeline = best.timeline
    actions_end = max(timeline.end.values()) - min(timeline.start.values())
    exchange_seconds = timeline.makespan - actions_end
    return (
        f"exchange: the {best.choice.num_shards} devices of a stage add up its "
        f"gradients once in a step, {format_seconds(exchange_seconds)} of it"
    )


def _difference(runner_up: Candidate, best: Candidate) -> str:
    """The seconds or bytes of a runner-up; why it was not chosen, if they are fewer."""
    more = runner_up.seconds / best.seconds - 1 if best.seconds else 0.0
    if abs(more) < _EQUAL:
        max_bytes = format_bytes(runner_up.max_bytes)
        return f"as long, and {max_bytes} in the device that needs most"
    if more > 0:
        return f"{format_seconds(runner_up.seconds)}, {more:.1%} more"
    less = f"{format_seconds(runner_up.seconds)}, {-more:.1%} less"
    if runner_up.seconds * runner_up.handicap > best.seconds * best.handicap:
        return (
            f"{less} as predicted; but devices that share cores take longer for halves "
            f"of backwards, so it counts {runner_up.handicap - 1:.0%} more"
        )
    return f"{less}, if it fits: others as fast need more bytes than predicted"


def _is_same_run(a: Candidate, b: Candidate) -> bool:
    """True if two candidates differ at most in remat modes and names."""
    has_same_stages = (
        a.choice.num_shards == b.choice.num_shards
        and a.choice.balance == b.choice.balance
    )
    if not has_same_stages:
        return False
    return _executed_rows(a.choice.schedule) == _executed_rows(b.choice.schedule)


def _executed_rows(schedule: Schedule) -> list[list[Action]]:
    """The rows without halves of the first stage: its W is all of its backward."""
    rows = []
    for row in schedule.rows:
        executed = []
        for action in row:
            if action.stage == 0 and action.op == INPUT:
                continue
            if action.stage == 0 and action.op == WEIGHT:
                action = action._replace(op=BACKWARD)
            executed.append(action)
        rows.append(executed)
    return rows


def _nothing_fits(nearest: Candidate, hardware: Hardware) -> str:
    """The message if no candidate fits."""
    limit = hardware.memory_limit
    assert limit is not None
    excesses = [
        f"rank {rank} {memory.describe_excess(limit)}"
        for rank, memory in enumerate(nearest.memory)
        if memory.total > limit
    ]
    return (
        f"memory_limit={limit:,} bytes on {hardware.num_devices} devices: no "
        f"plan fits. The nearest is {nearest.choice}:\n  * "
        + "\n  * ".join(excesses)
        + f"\nThat one needs {nearest.choice.num_devices} devices of "
        f"{format_bytes(nearest.max_bytes)}; else take more devices (num_devices=), "
        f"smaller micro-batches (num_microbatches=) or a smaller model. Stages that "
        f"shard their parameters (FSDP, tensor parallelism) are not planned: "
        f"jpipe.pipeline(mesh=, sharding=) runs them"
    )


def _sent_bytes(best: Candidate) -> int:
    """The bytes that cross between devices in a step."""
    schedule = best.choice.schedule
    num_shards = best.choice.num_shards
    transfers = rank_transfers(best.costs, schedule.placement)
    activations = sum(x.bytes + x.cotangent_bytes for x in transfers)
    exchanged = 2 * (num_shards - 1) * sum(best.costs.accumulator_bytes)
    return int(activations * schedule.num_microbatches * num_shards + exchanged)
