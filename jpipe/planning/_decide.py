"""`jpipe.plan`: decides the mesh, balance, schedule and remat modes of a pipeline.

layers --profile--> seconds and bytes of each layer, for two sizes of micro-batch
--interpolate--> seconds and bytes for each number of micro-batches
--search---> candidates with forecasts              (`_plan_search`)
--lower----> candidates with counted bytes          (`_verify`)
--explain--> the `Plan`, with reasons               (`_reasons`)
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import optax

from .._arguments._wrong_call import explain_call
from .._instructions._progress import Progress
from .._layers import _rng
from .._layers._adapter import is_model, is_module
from .._layers._layer_group import check_balance
from .._placed._mesh_context import outside_of_meshes
from .._train._optimizer import opt_state_bytes
from .._train._transformation import check_optimizer
from ..schedules import BY_NAME, ScheduleBuilder
from ..schedules._catalogue import find_catalogue_key
from ..schedules._choose import format_argument
from ._fingerprint import fingerprint
from ._interpolate import interpolate
from ._layer_profile import Link, find_count_faults, find_flag_faults
from ._mesh_shapes import mesh_shapes
from ._mode_names import MODE_NAMES, TRIED_MODES, format_unknown_mode, sort_modes
from ._plan import Plan
from ._planned_model import PlannedModel
from ._profile import Profile, check_profile, find_speed_faults
from ._profiler import profile_sizes
from ._reasons import describe_profile, explain_best
from ._request import Request
from ._residual_ratios import scale_residuals
from ._space import Hardware, SearchSpace
from ._traced import TracedLayers
from ._verify import rank_candidates

PyTree = Any
_TRAINING_SCHEDULES = tuple(name for name in BY_NAME if name != "forward_only")
_LOSS_FUNCTION = (
    "is this a loss function, (params, *args) -> loss? A plan is one of layers or a "
    "model: plan the model that it calls, plan = jpipe.plan(model, x, tx, "
    "loss_fn=..., targets=...), and build it with jpipe.value_and_grad(fun, plan=plan)"
)
_NO_LOSS = (
    "loss: none was given (loss_fn=, targets=): what it computes and keeps, such as "
    "log-probabilities, is not counted"
)
# former argument -> what to type
_FORMER_ARGUMENTS = {
    "rounds": "profile=jpipe.profile(layers, x, rounds=...) measures so many times",
    "device": "profile=jpipe.profile(layers, x, device=...) measures on that device",
    "train": "a plan is one of training",
}


@outside_of_meshes
@explain_call("jpipe.plan(layers, sample, tx)", _FORMER_ARGUMENTS)
def plan(
    layers: Any,
    sample: PyTree,
    tx: optax.GradientTransformation,
    *,
    num_devices: int | None = None,
    memory_limit: int | None = None,
    bandwidth: float | None = None,
    latency: float | None = None,
    overlap: bool | None = None,
    num_microbatches: int | Sequence[int] | None = None,
    data: int | Sequence[int] | None = None,
    schedules: str | ScheduleBuilder | Sequence[str | ScheduleBuilder] | None = None,
    remat: str | Sequence[str] = TRIED_MODES,
    balance: Sequence[int] | None = None,
    profile: Profile | None = None,
    loss_fn: Callable[[PyTree, PyTree], Any] | None = None,
    targets: PyTree = (),
    has_aux: bool = False,
    reduction: str = "mean",
    trainable: Any = None,
    in_axes: Any = 0,
    target_axes: Any = 0,
    rngs: _rng.Rngs = None,
    measure: bool = True,
    peak_flops: float | None = None,
    memory_bandwidth: float | None = None,
    action_seconds: float | None = None,
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
      bandwidth: bytes per second between two devices; default: as the profile has it,
        which was measured where there were two; else transfers take no time but
        ``latency``.
      latency: seconds that a transfer takes whatever its size; default: as the profile
        has it, else 0.
      overlap: True if a device computes while it sends and receives, as is taken of
        GPUs; False if a transfer keeps both devices from computing, each for half of
        its time, as it does those of a CPU. Default: False if the profile was measured
        on a CPU, else True, also for an estimate.
      num_microbatches: the number of micro-batches, or several to choose from; default:
        one, two, four and eight times the number of stages that all devices make, as
        far as there are examples, and one. Layers are profiled for the smallest shard
        of a micro-batch that a device would compute, and the largest below the whole
        mini-batch; times and bytes are taken to grow evenly with its size.
      data: the number of devices on which each stage spreads the examples of a
        micro-batch, or several to choose from; default: any number that divides
        ``num_devices`` and the examples. A stage is in one process: with several
        processes type at most the devices of one, which is the default where
        ``num_devices`` is left out.
      schedules: a schedule of the catalogue, or several to choose from, by names or
        builders; default: the catalogue and schedules made to measure.
      remat: a mode, or several that stages may have.
      balance: the balance, if it is decided already. Of one model it counts the
        sections that its profile lists.
      profile: a profile of ``layers``, made anywhere, in place of measuring: no device
        is needed. Of one size of micro-batches it fixes the product of ``data`` and
        ``num_microbatches``; by default it has two.
      loss_fn: ``(outputs, targets) -> scalar``, a part of the last layer; left out,
        what it takes is not counted.
      targets: the targets of the mini-batch, in arrays or specs.
      has_aux: as for `Pipeline.value_and_grad`.
      reduction: likewise.
      trainable: likewise.
      in_axes: as for `jpipe.pipeline`.
      target_axes: likewise.
      rngs: as for `Pipeline.apply`; left out in training, a key, as in a training step.
      measure: True to measure layers, on the first device; else their times are
        estimated.
      peak_flops: operations per second for an estimate; see `jpipe.profile`.
      memory_bandwidth: bytes of memory per second for an estimate; likewise.
      action_seconds: seconds of any action for an estimate; likewise.

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
    with _explain_loss_functions(layers):
        check_optimizer(tx)
    if profile is not None:
        check_profile("plan", profile)
    data_counts = None if data is None else _as_tuple(data)
    if num_devices is None:
        num_devices = len(jax.devices())
        if data_counts is None:
            data_counts = _counts_in_a_process()
    microbatch_counts = None
    if num_microbatches is not None:
        microbatch_counts = _as_tuple(num_microbatches)
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
    if overlap is not None:
        faults += find_flag_faults("overlap", overlap)
    if profile is not None:
        made_by = {
            "peak_flops": peak_flops,
            "memory_bandwidth": memory_bandwidth,
            "action_seconds": action_seconds,
        }
        faults += [
            f"{name}= is for making a profile: leave it out, or leave out profile="
            for name, option in made_by.items()
            if option is not None
        ]
    if faults:
        raise ValueError(f"plan: {'; '.join(faults)}")

    request = Request(
        sample,
        loss_fn=loss_fn,
        targets=targets,
        has_aux=has_aux,
        reduction=reduction,
        trainable=trainable,
        in_axes=in_axes,
        target_axes=target_axes,
        rngs=rngs,
        measure=measure and profile is None,
        peak_flops=peak_flops,
        memory_bandwidth=memory_bandwidth,
        action_seconds=action_seconds,
    )
    with _explain_loss_functions(layers):
        num_examples = request.batch().sizes[0]
    fixed_size = None
    if profile is not None and profile.larger is None:
        fixed_size = profile.microbatch_size
    model = PlannedModel(layers)
    shapes = mesh_shapes(
        data_counts,
        microbatch_counts,
        num_devices=num_devices,
        num_examples=num_examples,
        shard_size=fixed_size,
    )
    shard_counts = sorted({shape.num_microbatch_shards for shape in shapes})
    finest = dataclasses.replace(request, num_microbatches=shard_counts[-1])

    with Progress("plans made"):  # a terminal shows all progress as a part of this
        traced_request = finest
        if profile is not None:
            traced_request = request.resized(profile.microbatch_size)
        with _explain_loss_functions(layers):
            traced = model.traced(traced_request)
        if profile is not None:
            profile.check(fingerprint(traced, train=True))
        checked_balance = None
        if balance is not None:
            checked_balance = check_balance(balance, len(traced.names))
        optimizer_bytes = _optimizer_bytes(tx, traced)
        if profile is None:
            requests = [
                dataclasses.replace(request, num_microbatches=count)
                for count in _profiled_counts(shard_counts)
            ]
            profile = profile_sizes(model, traced, requests)
        hardware = _with_link(hardware, latency, profile.link)
        if overlap is None:
            overlap = profile.overlap
        hardware = dataclasses.replace(hardware, overlap=overlap)
        profiles = {
            count: interpolate(profile, -(-num_examples // count))
            for count in shard_counts
        }
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
    size = candidates[0].profile.microbatch_size
    is_size_fixed = fixed_size is not None and num_microbatches is None
    notes = [describe_profile(profile, size, is_size_fixed=is_size_fixed)]
    if loss_fn is None:
        notes.append(_NO_LOSS)
    return explain_best(candidates, space, notes)


@contextlib.contextmanager
def _explain_loss_functions(layers: Any) -> Iterator[None]:
    """Adds to an error what to type for a loss function, if this may be one."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if is_model(layers) and not is_module(layers):
            error.add_note(_LOSS_FUNCTION)
        raise


def _as_tuple(argument: Any) -> tuple[Any, ...]:
    """A sequence as a tuple; a number, text or function as a tuple of one."""
    if isinstance(argument, Iterable) and not isinstance(argument, str):
        return tuple(argument)
    return (argument,)


def _counts_in_a_process() -> tuple[int, ...] | None:
    """The numbers of devices of a stage if there are several processes."""
    if jax.process_count() == 1:
        return None
    local_count = jax.local_device_count()
    return tuple(x for x in range(1, local_count + 1) if local_count % x == 0)


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


def _profiled_counts(shard_counts: Sequence[int]) -> set[int]:
    """The most shards, and the fewest: their sizes are measured.

    A whole mini-batch at once may be more than a device holds.

    Args:
      shard_counts: the numbers of shards of all micro-batches, in order.
    """
    split_counts = (count for count in shard_counts[:-1] if count > 1)
    return {next(split_counts, shard_counts[0]), shard_counts[-1]}


def _with_link(
    hardware: Hardware, latency: float | None, link: Link | None
) -> Hardware:
    """Hardware with the link of a profile, as far as the user describes none.

    Args:
      hardware: the devices.
      latency: the latency that the user gives.
      link: the link of the profile.
    """
    if link is None or hardware.num_devices == 1:
        return hardware
    if hardware.bandwidth is not None and latency is not None:
        return hardware
    which = ""
    if latency is not None:
        which = "the latter "
    elif hardware.bandwidth is not None:
        which = "the former "
    if latency is None:
        latency = link.latency
    bandwidth = hardware.bandwidth
    if bandwidth is None:
        bandwidth = link.bandwidth
    return dataclasses.replace(
        hardware,
        latency=latency,
        bandwidth=bandwidth,
        link_text=f"{which}measured from {link.source} to {link.target}",
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
