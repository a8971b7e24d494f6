"""What is fixed for all mini-batches of a pipeline."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

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
    """

    stages: tuple[StageFunction, ...]
    devices: tuple[Device, ...]
    schedule: Schedule
    remat: tuple[Any, ...]
    unchanged: Unchanged

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
    def stage_of_layer(self) -> tuple[int, ...]:
        """The stage of each layer."""
        return tuple(stage.index for stage in self.stages for _ in stage.layers)
