"""What is fixed for all mini-batches of a pipeline."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .._instructions._sharding import SubMesh
from .._instructions._transfer import Device
from .._layers._sharing import Sharing
from .._layers._stage import StageFunction
from .._layers._unchanged import Unchanged
from ..schedules import Schedule


@dataclass(frozen=True)
class Pipe:
    """A pipeline without its batches.

    Attributes:
      stages: all stages, in order.
      devices: the device of each.
      schedule: who runs which action when.
      remat: what each stage keeps: see `_remat`.
      unchanged: what tells whether layers were changed since.
      rule: how variables lie where stages have several devices: see `_resting`.
      gather: when what shards have a part of is gathered: once in a ``"step"`` or for
        each ``"microbatch"``.
    """

    stages: tuple[StageFunction, ...]
    devices: tuple[Device, ...]
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
    def places(self) -> tuple[Device, ...]:
        """The device of each place: a device may serve several stages."""
        return tuple(dict.fromkeys(self.devices))

    def place(self, stage: int) -> int:
        """The place of a stage."""
        return self.places.index(self.devices[stage])

    @cached_property
    def num_shards(self) -> int:
        """Over how many shards the examples of each micro-batch are spread."""
        first = self.devices[0]
        return first.num_shards if isinstance(first, SubMesh) else 1

    @cached_property
    def stage_of_layer(self) -> tuple[int, ...]:
        """The stage of each layer."""
        return tuple(stage.index for stage in self.stages for _ in stage.layers)
