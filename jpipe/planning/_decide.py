"""`jpipe.plan`: how to cut a model, how many micro-batches, which schedule, and why."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import optax

from .._instructions._bytes import nbytes
from .._run import _variables
from .._train._step import check_optimizer
from ..schedules import BY_NAME, lower_bound
from ._forecast import Candidate, Hardware
from ._layer import LayerProfile
from ._plan import Forecast, Plan, StagePlan
from ._profile import Profile
from ._profiler import MODES
from ._profiler import profile as profiled
from ._request import Request
from ._search import REMATS, Space, search
from ._units import duration, size

PyTree = Any


def plan(
    layers: Any,
    sample: PyTree,
    tx: optax.GradientTransformation,
    *,
    num_devices: int | None = None,
    memory_limit: int | None = None,
    bandwidth: float | None = None,
    latency: float = 0.0,
    num_microbatches: int | Sequence[int] | None = None,
    schedules: str | Sequence[str] | None = None,
    remat: str | Sequence[str] = REMATS,
    profile: Profile | None = None,
    **options: Any,
) -> Plan:
    """Decides how to run a model: which cut, how many micro-batches, which schedule.

    Layers are profiled, each by itself. Then every schedule of the catalogue is tried
    on paper, on up to so many devices, with the cut that suits it; stages of devices
    that need more than they have keep less; the best get a schedule made to measure.
    The fastest that fits is the plan.

    Args:
      layers: as `jpipe.pipeline` takes them.
      sample: an input of a mini-batch, or its `jax.ShapeDtypeStruct` leaves.
      tx: the optax optimizer, whose state takes memory.
      num_devices: how many devices there are; default: as many as `jax.devices`.
      memory_limit: bytes of each; ``None``: as many as it takes.
      bandwidth: bytes per second between two devices; ``None``: transfers take no time
        but ``latency``.
      latency: seconds that a transfer takes whatever its size.
      num_microbatches: how many, or a choice; default: one, two, four and eight times
        the number of devices, as far as there are examples.
      schedules: a name, or names to choose from; default: the catalogue and what is
        made to measure.
      remat: a mode, or what stages may keep, from what keeps most.
      profile: of ``layers`` on one micro-batch of ``sample``, in place of measuring.
      **options: for `jpipe.profile`, such as ``loss`` and ``targets``, or
        ``measure=False``.

    Returns:
      The plan: it prints with the reasons, `jpipe.draw.svg` draws it, and
      ``jpipe.pipeline(layers, plan=plan)`` builds it.

    Raises:
      ValueError: with all faults of the arguments; or if nothing fits the memory: with
        what is short, where and by how much, and what would fit.
      TypeError: if an argument is of a wrong type.

    Example:
      >>> import jax.numpy as jnp, jpipe, optax
      >>> from flax import linen as nn
      >>> layers = [nn.Dense(64), nn.relu, nn.Dense(64), nn.relu, nn.Dense(64)]
      >>> made = jpipe.plan(
      ...     layers, jnp.ones((32, 64)), optax.sgd(0.1), num_devices=2, measure=False
      ... )
      >>> sum(made.balance), jpipe.Plan.from_json(made.to_json()) == made
      (5, True)
    """
    check_optimizer(tx)
    count = len(jax.devices()) if num_devices is None else num_devices
    hardware = Hardware(count, memory_limit, bandwidth, latency)
    request = Request(layers, sample, **options)
    examples = request.model.batch.sizes[0]
    numbers = _numbers(num_microbatches, count, examples, profile)
    names = _listed(BY_NAME if schedules is None else schedules)
    modes = _listed(remat)
    faults = [*hardware.faults(), *_faults(numbers, names, modes, examples)]
    if profile is not None and len(numbers) != 1:
        faults.append(f"a profile is of one micro-batch, num_microbatches={numbers}")
    if faults:
        raise ValueError(f"plan: {'; '.join(faults)}")
    profiles = {}
    if profile is not None:
        profile.check(
            Request(layers, sample, num_microbatches=numbers[0], **options).made
        )
        profiles[numbers[0]] = profile
    else:
        ends = [
            profiled(layers, sample, num_microbatches=number, **options)
            for number in dict.fromkeys([max(numbers), min(numbers)])
        ]
        for number in numbers:
            profiles[number] = interpolated(ends[0], ends[-1], -(-examples // number))
    slots = [
        sum(map(nbytes, jax.tree.leaves(jax.eval_shape(tx.init, params))))
        for visit in request.model.visits
        for params in [_variables.params([visit.variables])]
    ]
    space = Space(
        profiles,
        slots,
        hardware,
        tuple(name for name in names if name != "forward_only"),
        modes,
        made=schedules is None,
    )
    candidates = search(space)
    if not candidates:
        raise ValueError(
            f"plan: schedules={list(names)} have no order for {len(slots)} layers on "
            f"{count} devices in {list(numbers)} micro-batches"
        )
    return chosen(candidates, space)


def _listed(given: str | Iterable[str]) -> tuple[str, ...]:
    """One name or several, as several."""
    return (given,) if isinstance(given, str) else tuple(given)


def _numbers(
    given: Any, num_devices: int, examples: int, profile: Profile | None
) -> tuple[int, ...]:
    """The numbers of micro-batches to choose from."""
    if given is not None:
        return (given,) if isinstance(given, int) else tuple(given)
    if profile is not None:
        return (-(-examples // profile.microbatch_size),)
    some = {min(num_devices * times, examples) for times in (1, 2, 4, 8)}
    return tuple(sorted(some))


def _faults(
    numbers: Sequence[Any], names: Sequence[str], remat: Sequence[str], examples: int
) -> Iterable[str]:
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            yield f"num_microbatches={number!r}: needs an int of at least 1"
        elif number > examples:
            yield f"num_microbatches={number} for {examples} examples"
    for name in names:
        if name not in BY_NAME:
            listed = ", ".join(map(repr, BY_NAME))
            yield f"schedules: {name!r} is unknown: choose from {listed}"
    for mode in remat:
        if mode not in MODES:
            yield f"remat: {mode!r} is unknown: choose {', '.join(map(repr, MODES))}"


def chosen(candidates: Sequence[Candidate], space: Space) -> Plan:
    """The best of the candidates, with the reasons.

    Args:
      candidates: from `search`.
      space: what they were chosen from.

    Returns:
      The plan.

    Raises:
      ValueError: if none fits: with what is short, where, by how much, and what would.
    """
    best = candidates[0]
    if not best.fits(space.hardware):
        raise ValueError(_nothing_fits(best, space))
    profile = space.profiles[best.schedule.num_microbatches]
    costs = best.timeline.costs
    assert costs is not None
    sent = _sent(best)
    return Plan(
        stages=tuple(_stages(best, profile)),
        schedule=best.schedule,
        skips=tuple(_skips(best, profile)),
        forecast=Forecast(
            seconds=best.seconds,
            bound=lower_bound(
                costs,
                best.schedule.num_ranks,
                best.schedule.num_microbatches,
                placement=best.schedule.placement,
            ),
            bubble=best.timeline.bubble_fraction,
            busy=best.timeline.busy,
            memory=best.memory,
            costs=costs,
            memory_limit=space.hardware.memory_limit,
            sent_bytes=sent,
            reasons=tuple(_reasons(best, candidates, space, sent)),
        ),
    )


def _reasons(
    best: Candidate, candidates: Sequence[Candidate], space: Space, sent: int
) -> Iterable[str]:
    """Why this one, in sentences."""
    timeline, hardware = best.timeline, space.hardware
    rank = timeline.bottleneck
    stages = [s for s, at in enumerate(timeline.placement) if at == rank]
    named = " and ".join(map(str, stages))
    yield (
        f"bottleneck: rank {rank} (stage {named}) computes "
        f"{duration(timeline.busy[rank])} of {duration(best.seconds)}"
    )
    fullest = max(range(len(best.memory)), key=lambda r: best.memory[r].total)
    room = ""
    if hardware.memory_limit is not None:
        left = hardware.memory_limit - best.memory[fullest].total
        room = f", {size(left)} below the limit"
    yield f"memory: rank {fullest} needs most, {size(best.memory[fullest].total)}{room}"
    slow = "" if hardware.bandwidth else "; they were taken to cost no time"
    yield f"transfers: {size(sent)} a step between devices{slow}"
    others = [c for c in candidates[1:] if c.fits(hardware) and not _same(c, best)]
    if others:
        more = others[0].seconds / best.seconds - 1
        yield f"runner-up: {others[0]}: {duration(others[0].seconds)}, {more:.1%} more"
    idle = hardware.num_devices - best.schedule.num_ranks
    if idle:
        full = [
            c
            for c in candidates
            if c.schedule.num_ranks == hardware.num_devices and c.fits(hardware)
        ]
        instead = (
            f"with all {hardware.num_devices} it would take {duration(full[0].seconds)}"
            if full
            else f"nothing that uses all {hardware.num_devices} was found"
        )
        yield f"{idle} of {hardware.num_devices} devices are left idle: {instead}"


def _same(one: Candidate, other: Candidate) -> bool:
    """Whether two differ in nothing that takes time: in what they keep only."""
    return (one.balance, one.schedule) == (other.balance, other.schedule)


def _nothing_fits(nearest: Candidate, space: Space) -> str:
    limit = space.hardware.memory_limit
    assert limit is not None
    lines = []
    for rank, memory in enumerate(nearest.memory):
        if memory.total > limit:
            lines.append(
                f"rank {rank} needs {size(memory.total)}, {size(memory.total - limit)} "
                f"more than it has: parameters {size(memory.parameters)}, gradients "
                f"{size(memory.gradients)}, optimizer {size(memory.optimizer)}, "
                f"activations {size(memory.held)}, workspace {size(memory.workspace)}"
            )
    return (
        f"memory_limit={limit:,} bytes on {space.hardware.num_devices} devices: no "
        f"plan fits. The nearest is {nearest}:\n  * "
        + "\n  * ".join(lines)
        + f"\nIt fits {nearest.schedule.num_ranks} devices of "
        f"{size(nearest.most_bytes)}; else take more devices (num_devices=), smaller "
        f"micro-batches (num_microbatches=) or a smaller model"
    )


def _sent(best: Candidate) -> int:
    """The bytes that cross between ranks in a step."""
    costs, placement = best.timeline.costs, best.timeline.placement
    assert costs is not None
    count = best.schedule.num_microbatches
    total = 0
    for stage in range(1, len(placement)):
        if placement[stage] != placement[stage - 1]:
            total += costs.boundary_bytes[stage] + costs.cotangent(stage, 0)
    for skip in costs.skips:
        if placement[skip.source] != placement[skip.target]:
            total += skip.bytes + skip.cotangent_bytes
    return int(total * count)


def _stages(best: Candidate, profile: Profile) -> Iterable[StagePlan]:
    first = 0
    for index, count in enumerate(best.balance):
        own = profile.layers[first : first + count]
        rank = best.schedule.placement[index]
        modes = dict.fromkeys(mode for layer in own for mode in layer.kept_bytes)
        yield StagePlan(
            index=index,
            rank=rank,
            device=f"rank {rank}",
            layers=tuple(layer.name for layer in own),
            remat=best.remat[index],
            num_params=sum(layer.num_params for layer in own),
            param_bytes=sum(layer.param_bytes for layer in own),
            held_bytes=int(best.timeline.peak_kept(index)),
            kept={
                mode: sum(layer.kept_bytes.get(mode, 0) for layer in own)
                for mode in modes
            },
        )
        first += count


def _skips(best: Candidate, profile: Profile) -> Iterable[tuple[str, int, int]]:
    stage_of = [s for s, count in enumerate(best.balance) for _ in range(count)]
    for skip in profile.skips:
        source, target = stage_of[skip.source], stage_of[skip.target]
        if source != target:
            yield skip.name, source, target


def interpolated(small: Profile, large: Profile, size: int) -> Profile:
    """A profile of micro-batches of another size, from those of two sizes.

    Times and bytes are taken to grow evenly: a part that does not depend on the size,
    and a part for each example.

    Args:
      small: of the smaller micro-batch.
      large: of the larger one; may be the same.
      size: examples of the micro-batch that is sought.

    Returns:
      The profile.
    """
    span = large.microbatch_size - small.microbatch_size
    part = (size - small.microbatch_size) / span if span else 0.0

    def between(a: Any, b: Any) -> Any:
        if a is None or b is None:
            return None
        value = a + part * (b - a)
        return max(value, 0.0) if isinstance(a, float) else max(round(value), 0)

    def layer(a: LayerProfile, b: LayerProfile) -> LayerProfile:
        fields = {
            f.name: between(getattr(a, f.name), getattr(b, f.name))
            for f in dataclasses.fields(a)
            if f.name not in ("name", "kept_bytes")
        }
        kept = {
            mode: between(a.kept_bytes[mode], b.kept_bytes[mode])
            for mode in a.kept_bytes
        }
        return LayerProfile(a.name, kept_bytes=kept, **fields)

    return dataclasses.replace(
        small,
        layers=tuple(map(layer, small.layers, large.layers)),
        input_bytes=between(small.input_bytes, large.input_bytes),
        skips=tuple(
            dataclasses.replace(
                a,
                bytes=between(a.bytes, b.bytes),
                cotangent_bytes=between(a.cotangent_bytes, b.cotangent_bytes),
            )
            for a, b in zip(small.skips, large.skips, strict=True)
        ),
        microbatch_size=size,
    )
