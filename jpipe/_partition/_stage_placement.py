"""Stages, devices and a schedule: all that is fixed for all mini-batches.

A stage runs on the rank that the schedule gives it, a rank is a device, and a *place*
is the index of a device among the different devices:

    stage                0  1  2  3
    schedule.placement   0  1  1  0    (stage -> rank)
    ranks                a  b          (rank -> device)
    devices_of_places    a  b          (place -> device)
"""

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.sharding import NamedSharding

from .._instructions._graph import Graph
from .._instructions._sharding import StageMesh
from .._instructions._transfer import AbstractDevice, Device, devices_of
from .._layers._adapter import LayerAdapter
from .._layers._layer_group import LayerGroup
from .._layers._text import abbreviate
from .._processes._arrays import is_here, replicated_sharding
from .._processes._digest import digest
from ..schedules import Schedule
from ..schedules._catalogue import FORWARDS_FIRST, runs_forwards_first
from ._remat import RematSetting


@dataclass(frozen=True)
class StagePlacement:
    """The stages of a pipeline, their devices, and their schedule.

    Attributes:
      layer_groups: the layers of each stage.
      ranks: the device of each rank.
      schedule: the actions of each rank, in order.
      remat: the remat setting of each stage.
      rule: the sharding of parameters, for stages of several devices.
      gather: the time when sharded weights are gathered: once in a ``"step"`` or for
        each ``"microbatch"``.
    """

    layer_groups: tuple[LayerGroup, ...]
    ranks: tuple[Device, ...]
    schedule: Schedule
    remat: tuple[RematSetting, ...]
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

    def check_forwards_first(self) -> None:
        """Checks that each backward follows all forwards.

        Raises:
          ValueError: if a rank runs a forward after a backward.
        """
        if not runs_forwards_first(self.schedule):
            raise ValueError(
                f"schedule {self.schedule.name!r} runs backwards before the last "
                f"forward, and the loss reads the outputs of the whole mini-batch at "
                f"once (jpipe.whole_batch, reduction='batch'): type schedule="
                f"{' or '.join(map(repr, FORWARDS_FIRST))}, or give one of your own in "
                f"which each backward follows all forwards"
            )

    @property
    def layers(self) -> list[LayerAdapter]:
        """All layers, in order."""
        layers = list[LayerAdapter]()
        for stage in self.layer_groups:
            layers += stage.layers
        return layers

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """The device of each stage, or of its first replica.

        Its variables are there, and its gradients are added up there.
        """
        return tuple(self.ranks[rank] for rank in self.schedule.placement)

    @cached_property
    def devices_of_places(self) -> tuple[Device, ...]:
        """The device of each place: a device may serve several stages.

        In a pipeline over several processes each process has a place, if only for
        metrics.
        """
        replica_ranks = itertools.chain.from_iterable(self.schedule.ranks_of)
        replica_devices = [self.ranks[rank] for rank in replica_ranks]
        devices = dict.fromkeys([*self.devices, *replica_devices])
        return (*devices, *idle_process_devices(devices))

    @cached_property
    def processes(self) -> tuple[int, ...]:
        """The process of each place."""
        return tuple(device.process_index for device in self.devices_of_places)

    @cached_property
    def local_devices(self) -> tuple[Device, ...]:
        """The devices of places in this process.

        Raises:
          ValueError: if there are none.
        """
        local = tuple(filter(is_here, self.devices_of_places))
        if not local:
            (process,) = set(self.processes)
            raise ValueError(
                f"all devices of this pipeline are in process {process}, and this is "
                f"process {jax.process_index()} of {jax.process_count()}: call it "
                f"there alone, or give devices=jax.local_devices() for one in each"
            )
        return local

    @cached_property
    def is_one_process(self) -> bool:
        """True if all places are in one process."""
        return len(set(self.processes)) == 1

    @cached_property
    def copies_sharding(self) -> NamedSharding:
        """The sharding of an array with a copy in each process."""
        devices: list[Any] = []
        for process in sorted(set(self.processes)):
            first_place = self.processes.index(process)
            devices += devices_of(self.devices_of_places[first_place])
        return replicated_sharding(devices)

    @cached_property
    def _place_of_device(self) -> dict[Device, int]:
        return {device: place for place, device in enumerate(self.devices_of_places)}

    def device_text(self, device: Device) -> str:
        """The words for a device, with its process if there are several."""
        if self.is_one_process:
            return str(device)
        return f"{device} of process {device.process_index}"

    def graph(self) -> Graph:
        """An empty graph over its places, with the facts that processes compare."""
        graph = Graph(self.devices_of_places)
        if not self.is_one_process:
            layers = [layer.name for layer in self.layers]
            text = self.schedule.to_text()
            graph.facts |= {
                "layers": abbreviate(layers),
                "balance": str([len(stage.layers) for stage in self.layer_groups]),
                "devices": ", ".join(map(self.device_text, self.devices)),
                "micro-batches": str(self.schedule.num_microbatches),
                "schedule": f"{self.schedule.name} ({digest([text])})",
            }
        return graph

    def place_of(self, stage: int, microbatch: int | None = None) -> int:
        """The place of a stage, or that of its replica for a micro-batch."""
        if microbatch is None or not self.schedule.replicas:
            return self._place_of_device[self.devices[stage]]
        rank = self.schedule.rank_of[microbatch][stage]
        return self._place_of_device[self.ranks[rank]]

    def replicas(self, stage: int) -> tuple[Device, ...]:
        """The devices that take turns at a stage."""
        return tuple(self.ranks[rank] for rank in self.schedule.ranks_of[stage])

    def places_of(self, stage: int) -> list[int]:
        """The places that run a stage, in the order of their last micro-batches."""
        microbatches = reversed(range(self.schedule.num_microbatches))
        places = dict.fromkeys(self.place_of(stage, m) for m in microbatches)
        return list(reversed(places))

    @cached_property
    def num_shards(self) -> int:
        """The number of shards over which each micro-batch is spread."""
        first = self.devices[0]
        return first.num_shards if isinstance(first, StageMesh | AbstractDevice) else 1

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The axes of the meshes of all places."""
        names: dict[str, None] = {}  # an ordered set
        for device in self.devices_of_places:
            if isinstance(device, StageMesh):
                names |= dict.fromkeys(device.mesh.axis_names)
        return tuple(names)


def idle_process_devices(devices: Collection[Device]) -> Iterator[Device]:
    """Yields a device of each process that has none of these, if they are of several.

    Raises:
      ValueError: if there is such a process, and stages have meshes.
    """
    processes = {device.process_index for device in devices}
    if len(processes) < 2:
        return
    has_meshes = any(isinstance(device, StageMesh) for device in devices)
    for device in jax.devices():
        if device.process_index not in processes:
            if has_meshes:
                raise ValueError(
                    f"process {device.process_index} has no stage of this pipeline; "
                    f"with a mesh each of the {jax.process_count()} processes needs one"
                )
            processes.add(device.process_index)
            yield device
