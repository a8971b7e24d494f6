"""The choices that `jpipe.plan` has, and the devices that it plans for.

`PlanChoices` are those that a user leaves; a `SearchSpace` has them with their costs; a
`Choice` is one of each. A mini-batch is split into micro-batches, and each of these
into as many shards as there are devices that share it:

    num_microbatch_shards = num_microbatches * num_shards

One device computes one shard at once, so a layer has to be profiled once for each of
these products, whatever the shape of the mesh.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax

from ..schedules import Schedule, ScheduleError
from ..schedules._catalogue import (
    CATALOGUE,
    FORWARDS_FIRST,
    TRAINING,
    CatalogueEntry,
    find_catalogue_key,
    runs_forwards_first,
)
from ..schedules._choose import call_builder, format_argument
from ..schedules._formats import format_count
from ._byte_errors import ByteErrors
from ._layer_profile import Link, find_count_faults
from ._mode_names import MODE_NAMES, format_unknown_mode
from ._plan_record import mesh_text
from ._profile_record import Profile
from ._slowdowns import Slowdowns, StepKind
from ._stage_times import count_split_shares

# By default the micro-batches have so many shards times the number of devices.
_SHARDS_PER_DEVICE = (1, 2, 4, 8)


@dataclass(frozen=True)
class Hardware:
    """The devices that a plan is for.

    Attributes:
      num_devices: the number of devices.
      memory_limit: the bytes that a device has; ``None``: no limit.
      link: the transfers between two devices.
    """

    num_devices: int
    memory_limit: int | None = None
    link: Link = field(default_factory=Link)


@dataclass(frozen=True)
class UserSchedule:
    """A builder of the user's, or a `Schedule` as the builder of itself.

    It has the methods of a `CatalogueEntry`, and builds the schedule to answer.

    Attributes:
      schedule: the builder or schedule.
      needs_forwards_first: True if each backward has to follow all forwards.
    """

    schedule: Any
    needs_forwards_first: bool

    @property
    def name(self) -> str:
        """The name of the schedule, or of the function that builds it."""
        if isinstance(self.schedule, Schedule):
            return self.schedule.name
        return format_argument(self.schedule)

    @property
    def family(self) -> str:
        """Its name: it is compared with no other schedule."""
        return self.name

    def outline(
        self, num_ranks: int, num_microbatches: int
    ) -> tuple[tuple[int, ...], float | None]:
        """The rank of each stage, and the share of backwards that run in halves.

        Raises:
          ScheduleError: if there is no order for these numbers.
        """
        schedule = self.build(num_ranks, num_microbatches)
        shares = set(count_split_shares(schedule))
        return schedule.placement, shares.pop() if len(shares) == 1 else None

    def build(self, num_ranks: int, num_microbatches: int) -> Schedule:
        """The valid schedule for these numbers.

        Raises:
          ScheduleError: if there is none.
          ValueError: if it is one that no plan has.
          TypeError: if the builder makes something else.
        """
        schedule = self.schedule
        if not isinstance(schedule, Schedule):
            schedule = call_builder(schedule, num_ranks, num_microbatches)
        sizes = schedule.num_ranks, schedule.num_microbatches
        if sizes != (num_ranks, num_microbatches):
            raise ScheduleError(
                f"{self.name} is for {sizes[0]} ranks and {sizes[1]} micro-batches"
            )
        if schedule.replicas or schedule.forward_only:
            feature = "is forward_only"
            if schedule.replicas:
                feature = "has replicas of stages"
            raise ValueError(
                f"plan: schedules: {self.name} {feature}, which is not planned; type "
                f"jpipe.pipeline(layers, num_microbatches, schedule=...)"
            )
        if self.needs_forwards_first and not runs_forwards_first(schedule):
            raise ValueError(
                f"plan: schedules: {self.name} runs backwards before the last forward "
                f"with {format_count(num_ranks, 'rank')} and "
                f"{format_count(num_microbatches, 'micro-batch')}, and "
                f"reduction='batch' needs all forwards first: type "
                f"{' or '.join(map(repr, FORWARDS_FIRST))}, or an order of your own in "
                f"which each backward follows all forwards"
            )
        return schedule.validate()


NamedSchedule = CatalogueEntry | UserSchedule


@dataclass(frozen=True)
class PlanChoices:
    """The choices that a user leaves to a plan.

    Attributes:
      schedule_names: the schedules, by names in ``builders``.
      remat_modes: the modes that a stage may have; in a `SearchSpace` the one that
        stores most first.
      fits_schedules: True if schedules are made to measure too.
      balance: the only balance that is allowed; ``None``: any.
      data: the numbers of devices that may share a micro-batch; ``None``: any.
      num_microbatches: the numbers of micro-batches; ``None``: the default ones.
      builders: name -> a schedule that the loss allows, of the catalogue or the user's.
    """

    schedule_names: tuple[Any, ...]
    remat_modes: tuple[Any, ...]
    fits_schedules: bool = False
    balance: Sequence[int] | None = None
    data: tuple[Any, ...] | None = None
    num_microbatches: tuple[Any, ...] | None = None
    builders: Mapping[str, NamedSchedule] = field(default_factory=lambda: CATALOGUE)

    @classmethod
    def from_options(
        cls,
        *,
        data: Any,
        num_microbatches: Any,
        schedules: Any,
        remat: Any,
        balance: Sequence[int] | None = None,
        is_here: bool,
        needs_forwards_first: bool,
    ) -> "PlanChoices":
        """The choices of the arguments of `jpipe.plan` of these names.

        Args:
          data: the argument.
          num_microbatches: likewise.
          schedules: likewise.
          remat: likewise.
          balance: likewise.
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
        allowed = FORWARDS_FIRST if needs_forwards_first else TRAINING
        names: list[Any] = []
        builders: dict[str, NamedSchedule] = {name: CATALOGUE[name] for name in allowed}
        for schedule in _as_tuple(allowed if schedules is None else schedules):
            key = find_catalogue_key(schedule)
            name = schedule if key is None else key
            if isinstance(schedule, Schedule):
                schedule.validate()
            if isinstance(schedule, Schedule) or (key is None and callable(schedule)):
                user_schedule = UserSchedule(
                    schedule, needs_forwards_first=needs_forwards_first
                )
                name = user_schedule.name
                is_taken = builders.get(name, user_schedule) != user_schedule
                if is_taken or name in CATALOGUE:
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
            balance=balance,
            fits_schedules=schedules is None and not needs_forwards_first,
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
        allowed = [name for name in self.builders if name in CATALOGUE]
        for name in self.schedule_names:
            if name not in [*self.builders]:  # it may be of a type without a hash
                listed = ", ".join(map(repr, allowed))
                fault = "is unknown"
                if find_catalogue_key(name) in TRAINING:
                    fault = (
                        "does not run all forwards first, as reduction='batch' needs"
                    )
                yield (
                    f"schedules: {format_argument(name)} {fault}: choose from {listed}"
                )
        unknown_modes = [mode for mode in self.remat_modes if mode not in MODE_NAMES]
        yield from map(format_unknown_mode, unknown_modes)


class MeshShape(NamedTuple):
    """The numbers by which a mini-batch is split.

    Attributes:
      num_microbatches: the number of micro-batches.
      num_shards: the number of devices on which the examples of each are spread.
    """

    num_microbatches: int
    num_shards: int = 1

    @property
    def num_microbatch_shards(self) -> int:
        """The number of shards of all micro-batches; a device computes one at once."""
        return self.num_microbatches * self.num_shards


@dataclass(frozen=True)
class SearchSpace:
    """The choices that a plan has, and what each costs.

    Attributes:
      profiles: number of shards of all micro-batches -> profile of one shard, in which
        the state of layers includes that of the optimizer.
      optimizer_bytes: the bytes of the optimizer's state of each layer.
      hardware: the devices.
      mesh_shapes: numbers of micro-batches, each with the number of devices that share
        a micro-batch.
      choices: schedules, remat modes and balance.
      slowdowns: how many times as long actions take in a step of several devices.
      byte_errors: the errors of forecasts of bytes.
    """

    profiles: Mapping[int, Profile]
    optimizer_bytes: Sequence[int]
    hardware: Hardware
    mesh_shapes: tuple[MeshShape, ...]
    choices: PlanChoices
    slowdowns: Slowdowns = field(default_factory=Slowdowns)
    byte_errors: ByteErrors = field(default_factory=ByteErrors)

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.optimizer_bytes)

    def profile(self, schedule: Schedule, num_shards: int) -> Profile:
        """The profile of the shard of a micro-batch that one device computes."""
        return self.profiles[schedule.num_microbatches * num_shards]

    def with_schedules(self, names: tuple[str, ...]) -> "SearchSpace":
        """The space of these schedules alone, without any made to measure."""
        choices = dataclasses.replace(
            self.choices, schedule_names=names, fits_schedules=False
        )
        return dataclasses.replace(self, choices=choices)

    def with_byte_error(self, choice: "Choice", num_bytes: int) -> "SearchSpace":
        """The space that knows how many bytes the forecast of a choice lacks."""
        errors = self.byte_errors.noted(choice.schedule, choice.num_shards, num_bytes)
        return dataclasses.replace(self, byte_errors=errors)


@dataclass(frozen=True)
class Choice:
    """One choice for everything that a plan decides.

    Attributes:
      balance: the number of layers of each stage.
      remat: the remat mode of each stage.
      schedule: the actions of each rank, in order.
      num_shards: the number of devices of each rank on which the examples of a
        micro-batch are spread.
    """

    balance: tuple[int, ...]
    remat: tuple[str, ...]
    schedule: Schedule
    num_shards: int = 1

    @property
    def num_devices(self) -> int:
        """The number of devices that it uses."""
        return self.schedule.num_ranks * self.num_shards

    @property
    def step_kind(self) -> StepKind:
        """The kind of its steps, which tells how much devices slow each other down."""
        return StepKind(
            num_microbatches=self.schedule.num_microbatches,
            num_shards=self.num_shards,
            num_ranks=self.schedule.num_ranks,
            num_stages=self.schedule.num_stages,
        )

    def __str__(self) -> str:
        modes = dict.fromkeys(self.remat)
        parts = [
            self.schedule.name,
            f"balance {list(self.balance)}",
            format_count(self.schedule.num_microbatches, "micro-batch"),
            f"remat {' and '.join(modes)}",
        ]
        if self.num_shards > 1:
            parts.append(mesh_text(self.schedule, self.num_shards))
        return ", ".join(parts)


def mesh_shapes(
    data: Sequence[int] | None,
    num_microbatches: Sequence[int] | None,
    *,
    num_devices: int,
    num_examples: int,
    shard_size: int | None,
) -> tuple[MeshShape, ...]:
    """The shapes to choose from; all shards of a micro-batch have as many examples.

    Args:
      data: the numbers of devices that may share a micro-batch; ``None``: any number.
      num_microbatches: the numbers of micro-batches; ``None``: numbers with which each
        rank has something to do.
      num_devices: the number of devices.
      num_examples: the number of examples in the mini-batch.
      shard_size: the number of examples in a shard, if a profile of one size decides
        it.

    Returns:
      The shapes; those of one device per stage first.

    Raises:
      ValueError: if examples cannot be spread so, or nothing is left to choose.
    """
    # The number of shards of all micro-batches that a profile decides.
    profiled_count = None if shard_size is None else -(-num_examples // shard_size)
    shapes = []
    for num_shards in range(1, num_devices + 1) if data is None else sorted(set(data)):
        if num_devices % num_shards != 0 or num_examples % num_shards != 0:
            continue
        if num_microbatches is not None:
            counts = set(num_microbatches)
        elif profiled_count is not None:
            counts = {profiled_count // num_shards}
        else:
            counts = _default_microbatch_counts(num_shards, num_devices, num_examples)
        for count in sorted(counts):
            shape = MeshShape(count, num_shards)
            if shape.num_microbatch_shards <= num_examples:
                shapes.append(shape)

    if profiled_count is not None:
        shapes = [x for x in shapes if x.num_microbatch_shards == profiled_count]
    if not shapes:
        note = ""
        if shard_size is not None:
            note = (
                f" in parts of {shard_size}, of which alone the profile is (jpipe."
                f"profile(..., num_microbatches=(4, 16)) makes one of several sizes)"
            )
        raise ValueError(
            f"plan: data={data!r} and num_microbatches={num_microbatches!r} leave "
            f"nothing to choose for {num_examples} examples{note}: data divides the "
            f"{num_devices} devices and the examples, and data times num_microbatches "
            f"is no more than {num_examples}"
        )
    return tuple(shapes)


def _default_microbatch_counts(
    num_shards: int, num_devices: int, num_examples: int
) -> set[int]:
    """The numbers of micro-batches to try if the user names none.

    Shards have the same sizes whatever the shape: a few profiles are enough.
    """
    counts = set()
    for shards_per_device in _SHARDS_PER_DEVICE:
        shard_count = min(num_devices * shards_per_device, num_examples)
        counts.add(shard_count // num_shards)
    if num_shards == 1:
        return counts | {1}
    return counts - {0}


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
