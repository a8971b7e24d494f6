"""What is fixed for all mini-batches of a pipeline."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .._instructions._sharding import SubMesh
from .._instructions._transfer import Device, OnPaper
from .._layers._sharing import Sharing
from .._layers._stage import StageFunction
from .._layers._unchanged import Unchanged
from ..schedules import Schedule


@dataclass(frozen=True)
class Pipe:
    """A pipeline without its batches.

    Attributes:
      stages: all stages, in order.
      ranks: the device of each rank.
      schedule: who runs which action when.
      remat: what each stage keeps: see `_remat`.
      unchanged: what tells whether layers were changed since.
      rule: how variables lie where stages have several devices: see `_resting`.
      gather: when what shards have a part of is gathered: once in a ``"step"`` or for
        each ``"microbatch"``.
    """

    stages: tuple[StageFunction, ...]
    ranks: tuple[Device, ...]
    schedule: Schedule
    remat: tuple[Any, ...]
    unchanged: Unchanged
    rule: Any = None
    gather: str = "step"

    @cached_property
    def sharing(self) -> Sharing:
        """Which variables of the layers are one."""
        return Sharing([layer for stage in self.stages for layer in stage.layers])

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """The device of each stage; of one with replicas, that of the first.

        There its variables are, and gradients are added up.
        """
        return tuple(self.ranks[rank] for rank in self.schedule.placement)

    @cached_property
    def places(self) -> tuple[Device, ...]:
        """The device of each place: a device may serve several stages."""
        own = (self.ranks[rank] for rank in self.schedule.running)
        return tuple(dict.fromkeys([*self.devices, *own]))

    @cached_property
    def _number(self) -> dict[Device, int]:
        return {device: number for number, device in enumerate(self.places)}

    def place(self, stage: int, microbatch: int | None = None) -> int:
        """The place of a stage, or where it runs a micro-batch."""
        if microbatch is None or not self.schedule.replicas:
            return self._number[self.devices[stage]]
        return self._number[self.ranks[self.schedule.homes[microbatch][stage]]]

    def replicas(self, stage: int) -> tuple[Device, ...]:
        """The devices that take turns at a stage."""
        return tuple(self.ranks[rank] for rank in self.schedule.homes.ranks(stage))

    def places_of(self, stage: int) -> list[int]:
        """The places that run a stage, in the order of their last micro-batches."""
        numbers = reversed(range(self.schedule.num_microbatches))
        found = dict.fromkeys(self.place(stage, m) for m in numbers)
        return [*found][::-1]

    @cached_property
    def num_shards(self) -> int:
        """Over how many shards the examples of each micro-batch are spread."""
        first = self.devices[0]
        return first.num_shards if isinstance(first, SubMesh | OnPaper) else 1

    @cached_property
    def stage_of_layer(self) -> tuple[int, ...]:
        """The stage of each layer."""
        return tuple(stage.index for stage in self.stages for _ in stage.layers)
