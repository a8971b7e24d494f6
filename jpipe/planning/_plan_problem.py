"""The problem that a plan solves: the choices, and the costs of a model under each.

layers --profile--> seconds and bytes of each layer, for two sizes of micro-batch
--interpolate--> seconds and bytes for each number of micro-batches
"""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import optax

from .._layers._adapter import is_model, is_module
from .._layers._layer_group import check_balance
from .._train._optimizer import opt_state_bytes
from ..schedules import BY_NAME, Schedule, ScheduleBuilder
from ..schedules._catalogue import FORWARDS_FIRST, find_catalogue_key
from ..schedules._choose import format_argument
from ._fingerprint import fingerprint
from ._interpolate import interpolate
from ._layer_profile import Link, find_count_faults
from ._mesh_shapes import mesh_shapes
from ._mode_names import MODE_NAMES, format_unknown_mode, sort_modes
from ._origin import can_overlap
from ._planned_model import PlannedModel
from ._profile import Profile, check_fingerprint
from ._profiler import profile_sizes
from ._ran_step import RanStep, scale_to_step
from ._request import Request
from ._residual_ratios import scale_residuals
from ._space import Hardware, SearchSpace, UserSchedule
from ._traced import TracedLayers

_TRAINING_SCHEDULES = tuple(name for name in BY_NAME if name != "forward_only")
_LOSS_FUNCTION = (
    "is this a loss function, (params, *args) -> loss? A plan is one of layers or a "
    "model: plan the model that it calls, plan = jpipe.plan(model, x, tx, "
    "loss_fn=..., targets=...), and build it with jpipe.value_and_grad(fun, plan=plan)"
)


@dataclass(frozen=True)
class PlanChoices:
    """The choices that a user leaves to a plan.

    Attributes:
      data: the numbers of devices that may share a micro-batch; ``None``: any.
      num_microbatches: the numbers of micro-batches; ``None``: the default ones.
      schedule_names: the schedules, by names in ``builders``.
      remat_modes: the modes that a stage may have.
      fits_schedules: True if schedules are made to measure too.
      allowed_schedules: the schedules of the catalogue that the loss allows.
      builders: name -> builder of the schedule.
    """

    data: tuple[Any, ...] | None
    num_microbatches: tuple[Any, ...] | None
    schedule_names: tuple[Any, ...]
    remat_modes: tuple[Any, ...]
    fits_schedules: bool
    allowed_schedules: tuple[str, ...]
    builders: Mapping[str, ScheduleBuilder]

    @classmethod
    def from_options(
        cls,
        *,
        data: Any,
        num_microbatches: Any,
        schedules: Any,
        remat: Any,
        is_here: bool,
        needs_forwards_first: bool,
    ) -> "PlanChoices":
        """The choices of the arguments of `jpipe.plan` of these names.

        Args:
          data: the argument.
          num_microbatches: likewise.
          schedules: likewise.
          remat: likewise.
          is_here: True if the plan is for the devices of these processes: a stage is in
            one process.
          needs_forwards_first: True if each backward has to follow all forwards.
        """
        data_counts = None if data is None else _as_tuple(data)
        if data is None and is_here:
            data_counts = _counts_in_a_process()
        microbatch_counts = None
        if num_microbatches is not None:
            microbatch_counts = _as_tuple(num_microbatches)
        allowed = FORWARDS_FIRST if needs_forwards_first else _TRAINING_SCHEDULES
        names: list[Any] = []
        builders = dict(BY_NAME)
        for schedule in _as_tuple(allowed if schedules is None else schedules):
            name = _catalogue_name(schedule)
            if isinstance(schedule, Schedule) or (name is schedule and callable(name)):
                if isinstance(schedule, Schedule):
                    schedule.validate()
                user_schedule = UserSchedule(
                    schedule, needs_forwards_first=needs_forwards_first
                )
                name = user_schedule.name
                if builders.get(name, user_schedule) != user_schedule:
                    raise ValueError(
                        f"plan: schedules: {name!r} is the name of another schedule; "
                        f"rename your function, or type "
                        f"dataclasses.replace(schedule, name='mine')"
                    )
                builders[name] = user_schedule
            names.append(name)
        return cls(
            data=data_counts,
            num_microbatches=microbatch_counts,
            schedule_names=tuple(names),
            remat_modes=_as_tuple(remat),
            fits_schedules=schedules is None and not needs_forwards_first,
            allowed_schedules=tuple(allowed),
            builders=builders,
        )

    def find_faults(self, memory_limit: Any) -> Iterator[str]:
        """The faults of the choices and of a limit of bytes."""
        for count in self.data or ():
            yield from find_count_faults("data", count)
        for count in self.num_microbatches or ():
            yield from find_count_faults("num_microbatches", count)
        if memory_limit is not None:
            yield from find_count_faults("memory_limit", memory_limit)
        names = {"schedules": self.schedule_names, "remat": self.remat_modes}
        for option, listed_names in names.items():
            if not listed_names:
                yield f"{option}=(): name one or more, or leave it out"
        user_names = [name for name in self.builders if name not in BY_NAME]
        for name in self.schedule_names:
            key = find_catalogue_key(name)
            if name not in user_names and key not in self.allowed_schedules:
                listed = ", ".join(map(repr, self.allowed_schedules))
                fault = "is unknown"
                if key in _TRAINING_SCHEDULES:
                    fault = (
                        "does not run all forwards first, as reduction='batch' needs"
                    )
                yield (
                    f"schedules: {format_argument(name)} {fault}: choose from {listed}"
                )
        unknown_modes = [mode for mode in self.remat_modes if mode not in MODE_NAMES]
        yield from map(format_unknown_mode, unknown_modes)


@dataclass(frozen=True)
class PlanProblem:
    """The choices that a plan has, and all that lowers one of them.

    Attributes:
      space: the choices.
      request: the mini-batch and the loss.
      model: the model.
      profile: its costs, without the optimizer's state.
    """

    space: SearchSpace
    request: Request
    model: PlannedModel
    profile: Profile

    def with_less_room(self, num_bytes: int) -> "PlanProblem":
        """The problem of devices that have so many bytes less; they have a limit."""
        hardware = self.space.hardware
        assert hardware.memory_limit is not None
        limit = max(hardware.memory_limit - num_bytes, 1)
        hardware = dataclasses.replace(hardware, memory_limit=limit)
        space = dataclasses.replace(self.space, hardware=hardware)
        return dataclasses.replace(self, space=space)


def pose_plan_problem(
    layers: Any,
    request: Request,
    tx: optax.GradientTransformation,
    *,
    profile: Profile | None,
    hardware: Hardware,
    latency: float | None,
    overlap: bool | None,
    choices: PlanChoices,
    balance: Sequence[int] | None = None,
    ran: RanStep | None = None,
) -> PlanProblem:
    """Profiles a model, unless a profile is given, and poses the problem of its plan.

    Args:
      layers: as for `plan`.
      request: the mini-batch and the loss; the request of a profile.
      tx: as for `plan`.
      profile: as for `plan`.
      hardware: the devices; without what the profile says of transfers.
      latency: as for `plan`.
      overlap: as for `plan`.
      choices: the choices that the user leaves.
      balance: as for `plan`.
      ran: a step that ran, whose stages took the times that its layers should have;
        ``None``: none did.
    """
    with explain_loss_functions(layers):
        num_examples = request.batch().sizes[0]
    fixed_size = None
    if profile is not None and profile.larger is None:
        fixed_size = profile.microbatch_size
    model = PlannedModel(layers)
    shapes = mesh_shapes(
        choices.data,
        choices.num_microbatches,
        num_devices=hardware.num_devices,
        num_examples=num_examples,
        shard_size=fixed_size,
    )
    shard_counts = sorted({shape.num_microbatch_shards for shape in shapes})
    finest = dataclasses.replace(request, num_microbatches=shard_counts[-1])

    traced_request = finest
    if profile is not None:
        traced_request = request.resized(profile.microbatch_size)
    with explain_loss_functions(layers):
        traced = model.traced(traced_request)
    if profile is not None:
        check_fingerprint(profile, fingerprint(traced, train=True))
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
    if ran is not None:
        profile = scale_to_step(profile, ran, traced.names, num_examples)
    hardware = _with_link(hardware, latency, profile.link)
    if overlap is None:
        overlap = can_overlap(profile.origin)
    hardware = dataclasses.replace(hardware, overlap=overlap)
    profiles = {
        count: interpolate(profile, -(-num_examples // count)) for count in shard_counts
    }
    if hardware.memory_limit is not None:
        profiles = scale_residuals(profiles, model, finest, hardware.num_devices)
    space = SearchSpace(
        profiles={
            count: _with_state(shard_profile, optimizer_bytes)
            for count, shard_profile in profiles.items()
        },
        optimizer_bytes=optimizer_bytes,
        hardware=hardware,
        schedule_names=choices.schedule_names,
        remat_modes=sort_modes(choices.remat_modes),
        fits_schedules=choices.fits_schedules,
        balance=checked_balance,
        mesh_shapes=shapes,
        builders=choices.builders,
    )
    return PlanProblem(space, request, model, profile)


@contextlib.contextmanager
def explain_loss_functions(layers: Any) -> Iterator[None]:
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
