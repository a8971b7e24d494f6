"""What is fixed for all mini-batches of a pipeline."""

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.sharding import NamedSharding

from .._instructions._graph import Graph
from .._instructions._sharding import SubMesh
from .._instructions._transfer import Device, OnPaper, devices_of
from .._layers._layer import LayerAdapter
from .._layers._stage import StageLayers, abbreviate
from .._processes._digest import digest
from .._processes._elsewhere import copies, is_here
from ..schedules import Schedule


@dataclass(frozen=True)
class Pipe:
    """A pipeline without its batches.

    Attributes:
      stages: all stages, in order.
      ranks: the device of each rank.
      schedule: who runs which action when.
      remat: which residuals each stage stores: see `_remat`.
      rule: of parameters' sharding, where stages have several devices.
      gather: when what shards have a part of is gathered: once in a ``"step"`` or for
        each ``"microbatch"``.
    """

    stages: tuple[StageLayers, ...]
    ranks: tuple[Device, ...]
    schedule: Schedule
    remat: tuple[Any, ...]
    rule: Any = None
    gather: str = "step"

    def check_trains(self) -> None:
        """Checks that the schedule has backwards.

        Raises:
          ValueError: if it has forwards alone.
        """
        if self.schedule.forward_only:
            raise ValueError(
                f"schedule {self.schedule.name!r} has forwards only: it can apply, not "
                f"train; take another, such as schedule='1f1b'"
            )

    @property
    def layers(self) -> list[LayerAdapter]:
        """All layers, in order."""
        return [layer for stage in self.stages for layer in stage.layers]

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """The device of each stage; of one with replicas, that of the first.

        There its variables are, and gradients are added up.
        """
        return tuple(self.ranks[rank] for rank in self.schedule.placement)

    @cached_property
    def places(self) -> tuple[Device, ...]:
        """The device of each place: a device may serve several stages.

        Where they are of several processes, each process has one, if only for metrics.
        """
        every = itertools.chain.from_iterable(self.schedule.ranks_of)
        running = (self.ranks[rank] for rank in every)
        found = dict.fromkeys([*self.devices, *running])
        return (*found, *idle(found))

    @cached_property
    def processes(self) -> tuple[int, ...]:
        """The process of each place."""
        return tuple(device.process_index for device in self.places)

    @cached_property
    def own_places(self) -> tuple[Device, ...]:
        """The places of this process.

        Raises:
          ValueError: if there are none.
        """
        local = tuple(filter(is_here, self.places))
        if not local:
            (process,) = set(self.processes)
            raise ValueError(
                f"all devices of this pipeline are in process {process}, and this is "
                f"process {jax.process_index()} of {jax.process_count()}: call it "
                f"there alone, or give devices=jax.local_devices() for one in each"
            )
        return local

    @cached_property
    def copies(self) -> NamedSharding | None:
        """The sharding of what each process has; ``None`` where there is only one."""
        heads = {p: self.processes.index(p) for p in sorted(set(self.processes))}
        if len(heads) == 1:
            return None
        found = (devices_of(self.places[place]) for place in heads.values())
        return copies([device for own in found for device in own])

    @cached_property
    def _number(self) -> dict[Device, int]:
        return {device: number for number, device in enumerate(self.places)}

    def called(self, device: Device) -> str:
        """A place in words; of several processes with its own."""
        several = self.copies is not None
        return f"{device} of process {device.process_index}" if several else str(device)

    def graph(self) -> Graph:
        """A graph over its places; with what processes compare of it, in words."""
        graph = Graph(self.places)
        if self.copies is not None:
            layers = [layer.name for stage in self.stages for layer in stage.layers]
            text = self.schedule.to_text()
            graph.facts |= {
                "layers": abbreviate(layers),
                "balance": str([len(stage.layers) for stage in self.stages]),
                "devices": ", ".join(map(self.called, self.devices)),
                "micro-batches": str(self.schedule.num_microbatches),
                "schedule": f"{self.schedule.name} ({digest([text])})",
            }
        return graph

    def place(self, stage: int, microbatch: int | None = None) -> int:
        """The place of a stage, or where it runs a micro-batch."""
        if microbatch is None or not self.schedule.replicas:
            return self._number[self.devices[stage]]
        return self._number[self.ranks[self.schedule.rank_of[microbatch][stage]]]

    def replicas(self, stage: int) -> tuple[Device, ...]:
        """The devices that take turns at a stage."""
        return tuple(self.ranks[rank] for rank in self.schedule.ranks_of[stage])

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
    def axes(self) -> tuple[str, ...]:
        """The axes of the meshes of all places."""
        meshes = [place.mesh for place in self.places if isinstance(place, SubMesh)]
        return tuple(dict.fromkeys(name for mesh in meshes for name in mesh.axis_names))

    @cached_property
    def stage_of_layer(self) -> tuple[int, ...]:
        """The stage of each layer."""
        return tuple(stage.index for stage in self.stages for _ in stage.layers)


def idle(devices: Collection[Device]) -> Iterator[Device]:
    """A device of each process that has none of these, where they are of several."""
    taken = {device.process_index for device in devices}
    if len(taken) < 2:
        return
    for device in jax.devices():
        if device.process_index not in taken:
            if any(isinstance(own, SubMesh) for own in devices):
                raise ValueError(
                    f"process {device.process_index} has no stage of this pipeline; "
                    f"with a mesh each of the {jax.process_count()} processes needs one"
                )
            taken.add(device.process_index)
            yield device
