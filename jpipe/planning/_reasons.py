"""Makes a plan of the best candidate, and explains why it is the best.

Candidates are sorted: those that fit first, the fastest of them first. If the first
does not fit, an error says which rank lacks how much. Else the reasons are

bottleneck   the rank that is busy longest, or the host that dispatches for longer
memory       the rank that needs most, and what it leaves of the limit
transfers    the bytes that cross in a step, and the speed that was assumed
runner-up    the next candidate that fits and is another run, and what it lacks
idle         devices that no better plan uses

and notes: the origin of the profile, and what was not counted.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

import jax

from ..schedules._formats import format_bytes, format_seconds
from ._forecast import Candidate, rank_transfers, stage_costs
from ._origin import format_differences, format_origin
from ._plan_record import Forecast, Plan
from ._profile import describe_origin
from ._profile_record import Profile
from ._space import Hardware, SearchSpace

# Steps whose seconds differ by a smaller part are called as long.
_EQUAL = 0.0005


def make_plan(
    candidates: Sequence[Candidate], space: SearchSpace, notes: Sequence[str] = ()
) -> Plan:
    """The plan of the first candidate, with the reasons.

    Args:
      candidates: the candidates, the best first.
      space: the choices that there were.
      notes: more sentences for the reasons, such as costs that were not counted.

    Returns:
      The plan.
    """
    best = candidates[0]
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


def check_fits(best: Candidate, hardware: Hardware) -> None:
    """Checks that the best candidate fits.

    Raises:
      ValueError: if it does not: with what is short, where, by how much, and what fits.
    """
    limit = hardware.memory_limit
    if limit is None or best.fits(hardware):
        return
    excesses = [
        f"rank {rank} {memory.describe_excess(limit)}"
        for rank, memory in enumerate(best.memory)
        if memory.total > limit
    ]
    raise ValueError(
        f"memory_limit={limit:,} bytes on {hardware.num_devices} devices: no "
        f"plan fits. The nearest is {best.choice}:\n  * "
        + "\n  * ".join(excesses)
        + f"\nThat one needs {best.choice.num_devices} devices of "
        f"{format_bytes(best.max_bytes)}; else take more devices (num_devices=), "
        f"smaller micro-batches (num_microbatches=) or a smaller model. Stages that "
        f"shard their parameters (FSDP, tensor parallelism) are not planned: "
        f"jpipe.pipeline(mesh=, sharding=) runs them"
    )


def describe_profile(profile: Profile, size: int, *, is_size_fixed: bool) -> str:
    """Says where the costs of a plan are from.

    Args:
      profile: the profile from which all is predicted.
      size: the number of examples of a micro-batch of the plan, on one device.
      is_size_fixed: True if the plan had no choice of this size.
    """
    text = format_origin(profile.origin) or "of unknown origin"
    if "device" in profile.origin:
        here = describe_origin(jax.local_devices()[0])
        if differences := format_differences(profile.origin, here):
            text += f"; planned {differences}"
    sizes = profile.sizes
    if is_size_fixed:
        text += (
            f"; it is of micro-batches of {size} alone, so that num_microbatches times "
            f"data is fixed: jpipe.profile(..., num_microbatches=(4, 16)) lets a plan "
            f"choose"
        )
    elif not sizes[0] <= size <= sizes[-1]:
        measured = " and ".join(map(str, sizes))
        text += f"; micro-batches of {size} are extrapolated from {measured} examples"
    return f"profile: {text}"


def _reasons(
    candidates: Sequence[Candidate], hardware: Hardware, sent_bytes: int
) -> Iterator[str]:
    """Sentences that say why the first candidate is the best."""
    best, *_ = candidates
    yield _bottleneck(best)
    yield _memory(best, hardware)
    yield _transfers(best, sent_bytes, hardware)
    fitting = (x for x in candidates[1:] if x.fits(hardware))
    runner_up = next((x for x in fitting if not x.is_same_run(best)), None)
    if runner_up is not None:
        yield f"runner-up: {runner_up.choice}: {_difference(runner_up, best)}"
    num_idle = hardware.num_devices - best.choice.num_devices
    if num_idle > 0:
        yield (
            f"{num_idle} of {hardware.num_devices} devices are left idle: no better "
            f"plan that uses them was found"
        )


def _bottleneck(best: Candidate) -> str:
    """The rank that is busy longest, or the host if it dispatches for longer."""
    timeline = best.timeline
    if best.host_seconds > best.makespan:
        return (
            f"bottleneck: the host: dispatching a step takes "
            f"{format_seconds(best.host_seconds)}, the devices need "
            f"{format_seconds(best.makespan)}"
        )
    bottleneck = timeline.bottleneck
    placement = best.choice.schedule.placement
    stages = [str(s) for s, rank in enumerate(placement) if rank == bottleneck]
    return (
        f"bottleneck: rank {bottleneck} (stage {' and '.join(stages)}) is busy for "
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


def _transfers(best: Candidate, sent_bytes: int, hardware: Hardware) -> str:
    """The bytes that cross between devices, and the speed that was assumed.

    Args:
      best: the best candidate.
      sent_bytes: the bytes that cross in a step.
      hardware: the devices, with the speed of transfers.
    """
    speed = "they were taken to cost no time"
    link = hardware.link
    if link.bandwidth < math.inf:
        latency = format_seconds(link.latency)
        bandwidth = format_bytes(int(link.bandwidth))
        speed = f"{latency} for each and {bandwidth} per second"
    elif link.latency:
        speed = f"{format_seconds(link.latency)} for each, whatever its size"
    if link.origin_text:
        speed += f", {link.origin_text}"
    text = f"transfers: {format_bytes(sent_bytes)} a step between devices; {speed}"
    if not link.overlap and link.seconds(1) > 0:
        text += "; a transfer keeps both devices from computing, each for half of it"
    if best.choice.num_shards > 1:
        timeline = best.timeline
        actions_end = max(timeline.end.values()) - timeline.begin
        exchange_seconds = timeline.makespan - actions_end
        text += (
            f"; the {best.choice.num_shards} devices of a stage add up its gradients "
            f"in the last {format_seconds(exchange_seconds)}"
        )
    return text


def _difference(runner_up: Candidate, best: Candidate) -> str:
    """The seconds or bytes of a runner-up; why it was not chosen, if they are fewer."""
    more = runner_up.seconds / best.seconds - 1 if best.seconds else 0.0
    if abs(more) < _EQUAL:
        max_bytes = format_bytes(runner_up.max_bytes)
        forecast = "" if runner_up.plan else "a forecast of "
        return f"as long, and {forecast}{max_bytes} in the device that needs most"
    if more > 0:
        return f"{format_seconds(runner_up.seconds)}, {more:.1%} more"
    return (
        f"{format_seconds(runner_up.seconds)}, {-more:.1%} less, if it fits: others as "
        f"fast need more bytes than predicted"
    )


def _sent_bytes(best: Candidate) -> int:
    """The bytes that cross between devices in a step."""
    schedule = best.choice.schedule
    num_shards = best.choice.num_shards
    transfers = rank_transfers(best.costs, schedule.placement)
    activations = sum(x.bytes + x.cotangent_bytes for x in transfers)
    exchanged = 2 * (num_shards - 1) * sum(best.costs.accumulator_bytes)
    return int(activations * schedule.num_microbatches * num_shards + exchanged)
