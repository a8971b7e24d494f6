"""The settings of a pipeline, of whatever model or function it is."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .._instructions._transfer import Device
from ..schedules import Schedule
from ._cut_points import CutPoints
from ._param_sharding import ShardingRule

# The shape of each parameter.
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """What users decide, by arguments or by a plan; checked.

    Attributes:
      num_microbatches: how many micro-batches a mini-batch is split in.
      ranks: the device of each rank that there could be; a schedule takes the first.
      num_stages: how many stages; ``None``: as many as marks make, or ranks are.
      balance: how many layers each stage has, of a list.
      schedule: as for `jpipe.pipeline`.
      remat: as for `jpipe.pipeline`.
      replicas: as for `jpipe.pipeline`.
      sharding: the rule of parameters' sharding, where stages have several devices.
      gather: as for `jpipe.pipeline`.
      cuts: where a plan cuts one model or function.
      planned_shapes: the shapes of the parameters that a plan is of.
      is_mesh: whether the ranks are those along a mesh, for errors.
    """

    num_microbatches: int
    ranks: Sequence[Device]
    num_stages: int | None = None
    balance: tuple[int, ...] | None = None
    schedule: Any = "1f1b"
    remat: Any = "min_cut"
    replicas: Sequence[int] | None = None
    sharding: ShardingRule | None = None
    gather: str = "step"
    cuts: CutPoints | None = None
    planned_shapes: Shapes | None = None
    is_mesh: bool = False

    def ranks_of(self, schedule: Schedule) -> tuple[Device, ...]:
        """Returns the device of each rank of a schedule; surplus ones are left idle.

        Raises:
          ValueError: if there are fewer devices than ranks.
        """
        needed, count = schedule.num_ranks, len(self.ranks)
        if count >= needed:
            return tuple(self.ranks[:needed])

        what = "stages" if schedule.num_stages == needed else "ranks"
        fewer = "take fewer stages (balance= of layers, num_stages= of a model)"
        if self.is_mesh:
            raise ValueError(
                f"{needed} {what} need a mesh of at least as many along 'stage', which "
                f"has {count}; {fewer}, or give a longer mesh"
            )
        raise ValueError(
            f"{needed} {what} need {needed} devices, there are {count}; repeat "
            f"devices, as in devices=[jax.devices()[i % {max(count, 1)}] for i in "
            f"range({needed})], {fewer}, or, on CPU, make more devices at the start of "
            f"the program with jax.config.update('jax_num_cpu_devices', {needed})"
        )
