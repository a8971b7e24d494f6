"""`jpipe.plan`: decides the mesh, balance, schedule and remat modes of a pipeline.

layers --profile--> seconds and bytes of each layer, for several sizes of micro-batch
--search---> candidates with forecasts              (`_plan_search`)
--lower----> candidates with counted bytes          (`_verify`)
--explain--> the `Plan`, with reasons               (`_reasons`)
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import optax

from .._instructions._progress import Progress
from .._instructions._transfer import Device
from .._layers._layer_group import check_balance
from .._placed._mesh_context import outside_of_meshes
from .._train._optimizer import opt_state_bytes
from .._train._transformation import check_optimizer
from ..schedules import BY_NAME, ScheduleBuilder
from ..schedules._catalogue import find_catalogue_key
from ..schedules._choose import format_argument
from ..schedules._formats import format_bytes, format_seconds
from ._estimate import Rates
from ._fingerprint import estimated, fingerprint
from ._interpolate import interpolate
from ._layer_profile import find_count_faults
from ._link import measure_link
from ._mesh_shapes import mesh_shapes
from ._mode_names import MODE_NAMES, TRIED_MODES, format_unknown_mode, sort_modes
from ._plan import Plan
from ._planned_model import PlannedModel
from ._profile import Profile, find_speed_faults
from ._profiler import profile_traced
from ._reasons import explain_best
from ._request import Request
from ._residual_ratios import scale_residuals
from ._space import Hardware, SearchSpace
from ._traced import TracedLayers
from ._verify import rank_candidates

PyTree = Any
_TRAINING_SCHEDULES = tuple(name for name in BY_NAME if name != "forward_only")
# The arguments of `jpipe.profile` that `plan` takes too.
_PROFILE_OPTIONS = {field.name for field in dataclasses.fields(Request)} - {
    "sample",
    "num_microbatches",
}
_NO_LOSS = (
    "loss: none was given (loss=, targets=): what it computes and keeps, such as "
    "log-probabilities, is not counted"
)


@outside_of_meshes
def plan(
    layers: Any,
    sample: PyTree,
    tx: optax.GradientTransformation,
    *,
    num_devices: int | None = None,
    memory_limit: int | None = None,
    bandwidth: float | None = None,
    latency: float | None = None,
    num_microbatches: int | Sequence[int] | None = None,
    data: int | Sequence[int] | None = None,
    schedules: str | ScheduleBuilder | Sequence[str | ScheduleBuilder] | None = None,
    remat: str | Sequence[str] = TRIED_MODES,
    balance: Sequence[int] | None = None,
    profile: Profile | None = None,
    **options: Any,
) -> Plan:
    """Decides how to run a model: its mesh, cut, micro-batches and schedule.

    Layers are profiled, each by itself. Then every schedule of the catalogue is
    simulated, on any number of the devices, with the cut that suits it; stages of
    devices that need more memory than they have keep less; the best get a schedule made
    to measure. The fastest that fits is the plan.

    A stage may have several devices, all stages as many, on which the examples of each
    micro-batch are spread: the axis ``"data"`` of a mesh. Each of them has all of the
    stage's parameters, gradients and optimizer state, and the residuals of its own
    examples; they add up their gradients once in a step, in a ring. The results of M
    micro-batches on D devices equal those of M * D micro-batches on one device.

    Each action takes the time of its computation and the ``action_seconds`` of the
    profile. One host thread dispatches all programs and transfers, one after another,
    so very small layers are not worth several devices.

    The optimizer's state is counted with the parameters that its paths name, as in a
    train step. State of no parameter, such as counters, is counted with the first
    layer; state of parameters that layers share, with the first of these. The memory
    that `tx.update` needs while it runs is not counted.

    Args:
      layers: as `jpipe.pipeline` takes them; one model is cut where few bytes cross.
      sample: an input of a mini-batch, or its `jax.ShapeDtypeStruct` leaves.
      tx: the optax optimizer, whose state takes memory.
      num_devices: the number of devices; default: that of `jax.devices`.
      memory_limit: the bytes that a device has; ``None``: no limit.
      bandwidth: bytes per second between two devices; default: as measured between
        two of them, where layers are measured and there are two; else transfers take
        no time but ``latency``.
      latency: seconds that a transfer takes whatever its size; default: measured
        likewise, else 0.
      num_microbatches: the number of micro-batches, or several to choose from; default:
        one, two, four and eight times the number of stages that all devices make, as
        far as there are examples, and one. Layers are profiled for the smallest shard
        of a micro-batch that a device would compute, and the largest below the whole
        mini-batch; times and bytes are taken to grow evenly with its size.
      data: the number of devices on which each stage spreads the examples of a
        micro-batch, or several to choose from; default: any number that divides
        ``num_devices`` and the examples.
      schedules: a schedule of the catalogue, or several to choose from, by names or
        builders; default: the catalogue and schedules made to measure.
      remat: a mode, or several that stages may have.
      balance: the balance, if it is decided already. Of one model it counts the
        sections that its profile lists.
      profile: a profile of ``layers`` on a micro-batch of ``sample``, in place of
        measuring. It fixes the product of ``data`` and ``num_microbatches``.
      **options: arguments for `jpipe.profile`, such as ``loss`` and ``targets``, or
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
      >>> plan = jpipe.plan(
      ...     layers, jnp.ones((32, 64)), optax.sgd(0.1), num_devices=2, measure=False
      ... )
      >>> sum(plan.balance), jpipe.Plan.from_json(plan.to_json()) == plan
      (5, True)
    """
    check_optimizer(tx)
    if profile is not None:
        options = {**_options_of_profile(profile), **options}
    if unknown := sorted(options.keys() - _PROFILE_OPTIONS):
        raise TypeError(f"plan takes no {', '.join(unknown)}; see help(jpipe.plan)")
    if num_devices is None:
        num_devices = len(jax.devices())
    microbatch_counts = None
    if num_microbatches is not None:
        microbatch_counts = _as_tuple(num_microbatches)
    data_counts = None if data is None else _as_tuple(data)
    builders = _as_tuple(_TRAINING_SCHEDULES if schedules is None else schedules)
    schedule_names = tuple(map(_catalogue_name, builders))
    remat_modes = _as_tuple(remat)
    hardware = Hardware(
        num_devices=num_devices,
        memory_limit=memory_limit,
        bandwidth=bandwidth,
        latency=0.0 if latency is None else latency,
    )
    faults = [
        *_count_faults(
            {
                "num_devices": [num_devices],
                "data": data_counts,
                "num_microbatches": microbatch_counts,
                "memory_limit": None if memory_limit is None else [memory_limit],
            }
        ),
        *_name_faults(schedule_names, remat_modes),
        *find_speed_faults(hardware.bandwidth, hardware.latency),
    ]
    if faults:
        raise ValueError(f"plan: {'; '.join(faults)}")

    request = Request(sample, **options)
    model = PlannedModel(layers)
    shapes = mesh_shapes(
        data_counts,
        microbatch_counts,
        num_devices=num_devices,
        num_examples=request.batch().sizes[0],
        shard_size=None if profile is None else profile.microbatch_size,
    )
    shard_counts = sorted({shape.num_microbatch_shards for shape in shapes})
    finest = dataclasses.replace(request, num_microbatches=shard_counts[-1])

    with Progress("plans made"):  # a terminal shows all progress as a part of this
        traced = model.traced(finest)
        checked_balance = None
        if balance is not None:
            checked_balance = check_balance(balance, len(traced.names))
        optimizer_bytes = _optimizer_bytes(tx, traced)
        if profile is None:
            profiles = _profile_shards(model, traced, finest, shard_counts)
            hardware = _with_measured_link(hardware, latency, finest.device_or_rates)
        else:
            profile.check(
                fingerprint(traced, finest.device_or_rates, train=finest.train)
            )
            profiles = {shard_counts[0]: profile}
        if memory_limit is not None:
            profiles = scale_residuals(profiles, model, finest, num_devices)
        space = SearchSpace(
            profiles={
                count: _with_state(shard_profile, optimizer_bytes)
                for count, shard_profile in profiles.items()
            },
            optimizer_bytes=optimizer_bytes,
            hardware=hardware,
            schedule_names=schedule_names,
            remat_modes=sort_modes(remat_modes),
            fits_schedules=schedules is None,
            balance=checked_balance,
            mesh_shapes=shapes,
        )
        candidates = rank_candidates(space, request, model)

    if not candidates:
        counts = sorted({shape.num_microbatches for shape in shapes})
        raise ValueError(
            f"plan: schedules={list(schedule_names)} have no order for "
            f"{space.num_layers} layers on {num_devices} devices in {counts} "
            f"micro-batches"
        )
    notes = [_NO_LOSS] if request.loss is None else []
    return explain_best(candidates, space, notes)


def _options_of_profile(profile: Any) -> dict[str, Any]:
    """The options by which a profile was made, as it stores them.

    Raises:
      TypeError: if it is no profile.
    """
    if not isinstance(profile, Profile):
        raise TypeError(
            f"profile={profile!r} is a {type(profile).__name__}; needs what "
            f"jpipe.profile returned, or jpipe.Profile.from_json(text)"
        )
    rates = estimated(profile.fingerprint)
    if rates is None:
        return {}
    return {"measure": False, **rates}


def _as_tuple(argument: Any) -> tuple[Any, ...]:
    """A sequence as a tuple; a number, text or function as a tuple of one."""
    if isinstance(argument, Iterable) and not isinstance(argument, str):
        return tuple(argument)
    return (argument,)


def _catalogue_name(schedule: Any) -> Any:
    """The name of a schedule or builder in the catalogue; unchanged if it has none."""
    name = find_catalogue_key(schedule)
    return schedule if name is None else name


def _count_faults(arguments: Mapping[str, Sequence[Any] | None]) -> Iterator[str]:
    """Faults of arguments that count something; ``None`` where one is left out."""
    for name, counts in arguments.items():
        if counts is None:
            continue
        for count in counts:
            yield from find_count_faults(name, count)


def _name_faults(
    schedule_names: Sequence[Any], remat_modes: Sequence[Any]
) -> Iterator[str]:
    """Faults of the names of schedules and remat modes."""
    for argument, names in (("schedules", schedule_names), ("remat", remat_modes)):
        if not names:
            yield f"{argument}={names!r}: name one or more, or leave it out"
    for name in schedule_names:
        if find_catalogue_key(name) not in _TRAINING_SCHEDULES:
            listed = ", ".join(map(repr, _TRAINING_SCHEDULES))
            yield f"schedules: {format_argument(name)} is unknown: choose from {listed}"
    unknown_modes = [mode for mode in remat_modes if mode not in MODE_NAMES]
    yield from map(format_unknown_mode, unknown_modes)


def _profile_shards(
    model: PlannedModel,
    traced: TracedLayers,
    finest: Request,
    shard_counts: Sequence[int],
) -> Mapping[int, Profile]:
    """Profiles by the number of shards of all micro-batches, the middle interpolated.

    Args:
      model: the model that is planned.
      traced: its layers, traced on the smallest shard.
      finest: the request for the smallest shard.
      shard_counts: the numbers of shards of all micro-batches, in order.
    """
    # A whole mini-batch at once may be more than a device holds.
    split_counts = (count for count in shard_counts[:-1] if count > 1)
    fewest_shards = next(split_counts, shard_counts[0])
    small = profile_traced(traced, finest)
    large = small
    if fewest_shards != finest.num_microbatches:
        coarsest = dataclasses.replace(finest, num_microbatches=fewest_shards)
        large = profile_traced(model.traced(coarsest), coarsest)

    num_examples = sum(finest.batch().sizes)
    return {
        count: interpolate(small, large, -(-num_examples // count))
        for count in shard_counts
    }


def _with_measured_link(
    hardware: Hardware, latency: float | None, device_or_rates: Device | Rates
) -> Hardware:
    """Hardware with a measured link, if it can be measured and is not given.

    Args:
      hardware: the devices.
      latency: the latency of the user; ``None``: as measured.
      device_or_rates: the device that layers are measured on, or the rates of an
        abstract one.
    """
    if isinstance(device_or_rates, Rates) or hardware.num_devices == 1:
        return hardware
    if hardware.bandwidth is not None and latency is not None:
        return hardware
    device = device_or_rates
    devices = jax.local_devices(backend=device.platform)
    neighbor = next((other for other in devices if other != device), None)
    if neighbor is None:
        return hardware

    measured = measure_link(device, neighbor)
    if latency is None:
        latency = measured.latency
    bandwidth = hardware.bandwidth
    if bandwidth is None:
        bandwidth = measured.bandwidth
    return dataclasses.replace(
        hardware,
        latency=latency,
        bandwidth=bandwidth,
        link_text=f"{format_seconds(latency)} for each and "
        f"{format_bytes(int(bandwidth))} per second, "
        f"where not given as measured from {device} to {neighbor}",
    )


def _optimizer_bytes(
    tx: optax.GradientTransformation, traced: TracedLayers
) -> list[int]:
    """The bytes of the optimizer's state of each layer."""
    indices, tree = jax.tree.flatten(traced.params)
    owner_stages = traced.specialization.layout.owner_stages
    return opt_state_bytes(
        tx,
        tree.unflatten(traced.specs(indices)),
        trained=[traced.stages.trained[index] for index in indices],
        layers=[owner_stages[index] for index in indices],
        count=len(traced.names),
    )


def _with_state(profile: Profile, optimizer_bytes: Sequence[int]) -> Profile:
    """A profile whose layers have the optimizer's state as a part of their state."""
    layers = []
    for layer, num_bytes in zip(profile.layers, optimizer_bytes, strict=True):
        state_bytes = layer.state_bytes + num_bytes
        layers.append(dataclasses.replace(layer, state_bytes=state_bytes))
    return dataclasses.replace(profile, layers=tuple(layers))
