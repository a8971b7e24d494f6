"""What a plan may choose from, and for which devices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..schedules import Schedule
from ._mesh_shapes import MeshShape
from ._profile import Profile


@dataclass(frozen=True)
class Hardware:
    """The devices that a plan is for.

    Attributes:
      num_devices: how many there are.
      memory_limit: bytes of each; ``None`` if it is no matter.
      bandwidth: bytes per second between two of them; ``None``: transfers take no time.
      latency: seconds of a transfer of nothing.
      measured: what of the two was measured and between whom, in words.
    """

    num_devices: int
    memory_limit: int | None = None
    bandwidth: float | None = None
    latency: float = 0.0
    measured: str = ""


@dataclass(frozen=True)
class SearchSpace:
    """What a plan may choose from.

    Attributes:
      profiles: of a micro-batch of one shard, by the number of such parts; the
        optimizer's state is a part of that of the layers.
      optimizer_bytes: the optimizer's state of each layer.
      hardware: the devices.
      names: of schedules; see `jpipe.schedules.BY_NAME`.
      remats: modes that a stage may have, the one that stores most first.
      fits_schedules: whether schedules are made to measure too.
      balance: the only cut that is meant, if any.
      shapes: the numbers of micro-batches, each with the number of devices that share
        one.
    """

    profiles: Mapping[int, Profile]
    optimizer_bytes: Sequence[int]
    hardware: Hardware
    names: tuple[str, ...]
    remats: tuple[str, ...]
    fits_schedules: bool
    balance: tuple[int, ...] | None
    shapes: tuple[MeshShape, ...]

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.optimizer_bytes)

    def profile(self, schedule: Schedule, data: int) -> Profile:
        """That of a micro-batch of a schedule, on one of the devices that share it."""
        return self.profiles[schedule.num_microbatches * data]
