"""The choices that `jpipe.plan` has, and the devices that it plans for."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..schedules import BY_NAME, Schedule, ScheduleBuilder, ScheduleError
from ..schedules._catalogue import FORWARDS_FIRST, runs_forwards_first
from ..schedules._choose import call_builder, format_argument
from ..schedules._formats import format_count
from ._mesh_shapes import MeshShape
from ._plan import mesh_text
from ._profile import Profile
from ._sums import Matrix
from ._workspace import stage_workspaces


@dataclass(frozen=True)
class Hardware:
    """The devices that a plan is for.

    Attributes:
      num_devices: the number of devices.
      memory_limit: the bytes that a device has; ``None``: no limit.
      bandwidth: bytes per second between two devices; ``None``: transfers take no time
        but ``latency``.
      latency: seconds that a transfer takes whatever its size.
      overlap: True if a device computes while it sends and receives.
      link_text: the devices between which latency, bandwidth or both were measured, in
        words; empty if none was.
    """

    num_devices: int
    memory_limit: int | None = None
    bandwidth: float | None = None
    latency: float = 0.0
    overlap: bool = True
    link_text: str = ""


@dataclass(frozen=True)
class UserSchedule:
    """A builder of the user's, or a `Schedule` as the builder of itself.

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

    def __call__(self, num_ranks: int, num_microbatches: int) -> Schedule:
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


@dataclass(frozen=True)
class SearchSpace:
    """The choices that a plan has.

    Attributes:
      profiles: number of shards of all micro-batches -> profile of one shard, in which
        the state of layers includes that of the optimizer.
      optimizer_bytes: the bytes of the optimizer's state of each layer.
      hardware: the devices.
      schedule_names: the schedules, by names in ``builders``.
      remat_modes: the modes that a stage may have, the one that stores most first.
      fits_schedules: True if schedules are made to measure too.
      balance: the only balance that is allowed; ``None``: any.
      mesh_shapes: numbers of micro-batches, each with the number of devices that share
        a micro-batch.
      builders: name -> builder of a schedule, of the catalogue or the user's.
    """

    profiles: Mapping[int, Profile]
    optimizer_bytes: Sequence[int]
    hardware: Hardware
    schedule_names: tuple[str, ...]
    remat_modes: tuple[str, ...]
    fits_schedules: bool
    balance: tuple[int, ...] | None
    mesh_shapes: tuple[MeshShape, ...]
    builders: Mapping[str, ScheduleBuilder] = field(default_factory=lambda: BY_NAME)

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.optimizer_bytes)

    def profile(self, schedule: Schedule, num_shards: int) -> Profile:
        """The profile of the shard of a micro-batch that one device computes."""
        return self.profiles[schedule.num_microbatches * num_shards]

    def workspace(self, schedule: Schedule, num_shards: int) -> Matrix:
        """The bytes that the largest program of each stage needs while it runs."""
        return self._workspaces[schedule.num_microbatches * num_shards]

    @functools.cached_property
    def _workspaces(self) -> dict[int, Matrix]:
        """Number of shards of all micro-batches -> workspace of each stage."""
        return {
            count: stage_workspaces(profile) for count, profile in self.profiles.items()
        }


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
