"""The options of a pipeline, the same for models and for functions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from .._instructions._transfer import Device
from ..schedules import Schedule
from ._cut_points import CutPoints
from ._param_sharding import ShardingRule

# The shape of each parameter.
Shapes = tuple[tuple[int, ...], ...]


class Default(str):
    """A default, which is not the same object as the same text that a user types."""


SCHEDULE = Default("1f1b")
REMAT = Default("min_cut")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options that say how a program is divided and run, checked.

    `jpipe.pipeline` and `jpipe.value_and_grad` name and describe them, and have their
    defaults; those below are for programs that the library runs by itself. In place of
    ``plan`` there is what it decides.

    Attributes:
      num_microbatches: the number of micro-batches of a mini-batch.
      devices: the device of each rank that there could be, along the mesh if there is
        one; a schedule takes the first.
      schedule: as users type it.
      remat: as users type it.
      num_stages: the number of stages; ``None``: as many as marks make, or as the
        ranks and the gaps of the program allow.
      balance: the number of layers in each stage, for a list.
      mesh: the mesh of all ranks, for errors.
      sharding: the rule of parameters' sharding, where stages have several devices.
      gather: as users type it.
      replicas: as users type it.
      cuts: the cut points of a plan, for one model or function.
      planned_shapes: the shapes of the parameters for which a plan was made.
    """

    num_microbatches: int
    devices: Sequence[Device]
    schedule: Any
    remat: Any
    num_stages: int | None = None
    balance: tuple[int, ...] | None = None
    mesh: Mesh | None = None
    sharding: ShardingRule | None = None
    gather: str = "step"
    replicas: Sequence[int] | None = None
    cuts: CutPoints | None = None
    planned_shapes: Shapes | None = None

    def ranks_of(self, schedule: Schedule) -> tuple[Device, ...]:
        """Returns the device of each rank of a schedule; surplus ones are left idle.

        Raises:
          ValueError: if there are fewer devices than ranks.
        """
        needed = schedule.num_ranks
        count = len(self.devices)
        if count >= needed:
            return tuple(self.devices[:needed])

        noun = "stages" if schedule.num_stages == needed else "ranks"
        fewer = "take fewer stages (balance= of layers, num_stages= of a model)"
        if self.mesh is not None:
            raise ValueError(
                f"{needed} {noun} need a mesh of at least as many along 'stage', which "
                f"has {count}; {fewer}, or give a longer mesh"
            )
        raise ValueError(
            f"{needed} {noun} need {needed} devices, there are {count}; repeat "
            f"devices, as in devices=[jax.devices()[i % {max(count, 1)}] for i in "
            f"range({needed})], {fewer}, or, on CPU, make more devices at the start of "
            f"the program with jax.config.update('jax_num_cpu_devices', {needed})"
        )
