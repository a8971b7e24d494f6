"""The checked options of a pipeline, the same for models and for functions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .._instructions._transfer import Device
from ..schedules import Schedule
from ._cut_points import CutPoints
from ._param_sharding import ShardingRule

# The schedule where the user types none.
DEFAULT_SCHEDULE = "1f1b"
# The shape of each parameter.
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """The checked options of users, from arguments or from a plan; none has a default.

    Attributes:
      num_microbatches: the number of micro-batches of a mini-batch.
      ranks: the device of each rank that there could be; a schedule takes the first.
      num_stages: the number of stages; ``None``: as many as marks make, or as the
        ranks and the gaps of the program allow.
      balance: the number of layers in each stage, for a list.
      schedule: as for `jpipe.pipeline`.
      remat: as for `jpipe.pipeline`.
      replicas: as for `jpipe.pipeline`.
      sharding: the rule of parameters' sharding, where stages have several devices.
      gather: as for `jpipe.pipeline`.
      cuts: the cut points of a plan, for one model or function.
      planned_shapes: the shapes of the parameters for which a plan was made.
      is_mesh: True if the ranks are those along a mesh, for errors.
    """

    num_microbatches: int
    ranks: Sequence[Device]
    num_stages: int | None
    balance: tuple[int, ...] | None
    schedule: Any
    remat: Any
    replicas: Sequence[int] | None
    sharding: ShardingRule | None
    gather: str
    cuts: CutPoints | None
    planned_shapes: Shapes | None
    is_mesh: bool

    @classmethod
    def minimal(
        cls,
        *,
        num_microbatches: int,
        ranks: Sequence[Device],
        schedule: Any,
        remat: Any,
        num_stages: int | None = None,
        cuts: CutPoints | None = None,
    ) -> "PipelineConfig":
        """Returns a config without those options that are for users alone."""
        return cls(
            num_microbatches=num_microbatches,
            ranks=ranks,
            num_stages=num_stages,
            balance=None,
            schedule=schedule,
            remat=remat,
            replicas=None,
            sharding=None,
            gather="step",
            cuts=cuts,
            planned_shapes=None,
            is_mesh=False,
        )

    def ranks_of(self, schedule: Schedule) -> tuple[Device, ...]:
        """Returns the device of each rank of a schedule; surplus ones are left idle.

        Raises:
          ValueError: if there are fewer devices than ranks.
        """
        needed = schedule.num_ranks
        count = len(self.ranks)
        if count >= needed:
            return tuple(self.ranks[:needed])

        noun = "stages" if schedule.num_stages == needed else "ranks"
        fewer = "take fewer stages (balance= of layers, num_stages= of a model)"
        if self.is_mesh:
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
