"""Where functions are cut in stages, and where and when these run.

The stages of a list of layers are decided by its user: they end where the trace has
marks. One model or loss function is cut where that balances and few bytes cross; where
that is is kept, in a form that means the same in traces of another batch size, or of
evaluation, so that the parameters of all functions of a model stay where they are.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from .._instructions._transfer import AbstractDevice, Device
from .._layers._layer_group import LayerGroup
from .._messages import WarnOnce
from .._trace import _boundaries
from .._trace._traced_function import TracedFunction
from ..schedules._choose import choose_replicated, choose_schedule
from . import _balanced_cuts, _remat
from ._config import PipelineConfig
from ._cut_points import CutPoints
from ._stage_placement import StagePlacement, idle_process_devices

PyTree = Any


class Partition:
    """The cuts between stages, the owners of parameters, and the devices.

    Args:
      config: the settings.
      groups: the layers of each stage of a list; ``None``: the stages are found by
        cutting.
      is_lasting: whether all functions are cut as the first one is, so that their
        parameters stay where they are.

    Attributes:
      config: likewise.
      stage_of_layer: the stage of each layer of a list; ``None``: found by cutting.
      cuts: where functions are cut, once it is known; ``None`` for a list.
      warnings: the warnings of all that is built in these stages.
    """

    def __init__(
        self,
        config: PipelineConfig,
        groups: Sequence[LayerGroup] | None = None,
        *,
        is_lasting: bool = False,
    ) -> None:
        self.config = config
        self.cuts = config.cuts
        self.warnings = WarnOnce(
            is_muted=any(isinstance(device, AbstractDevice) for device in config.ranks)
        )
        self.stage_of_layer: tuple[int, ...] | None = None
        self._groups = groups
        self._is_lasting = is_lasting
        self._owner_stages: Sequence[int] | None = None
        # number of stages -> their devices and schedule
        self._placements: dict[int, StagePlacement] = {}
        if groups is not None:
            self.stage_of_layer = tuple(
                group.index for group in groups for _ in group.layers
            )
            self.placement(len(groups))  # so that faults of settings are found

    # -------------------------------------------------------------------- micro-batches

    @property
    def num_microbatches(self) -> int:
        """The number of micro-batches of a mini-batch."""
        return self.config.num_microbatches

    @property
    def num_shards(self) -> int:
        """The number of devices over which the examples of each are spread."""
        return getattr(self.config.ranks[0], "num_shards", 1)

    # --------------------------------------------------------------------------- cuts

    @property
    def num_stages(self) -> int | None:
        """The number of stages, once it is known."""
        if self._groups is not None:
            return len(self._groups)
        if self.cuts is not None:
            return len(self.cuts.positions) + 1
        return self.config.num_stages

    @property
    def num_traced_stages(self) -> int:
        """The number of stages for which calls of `jax.checkpoint` are opened.

        In a layer they stay as they are: 1.
        """
        if self._groups is not None:
            return 1
        if self.cuts is not None:
            return self.cuts.about
        return self.config.num_stages or len(self.config.replicas or self.config.ranks)

    @property
    def moves_equations(self) -> bool:
        """Whether equations move to the stage that first reads what they compute."""
        return self._groups is None

    def cut(
        self, programs: Mapping[int, TracedFunction], num_params: int
    ) -> tuple[CutPoints | None, dict[int, list[int]]]:
        """Cuts a function.

        Args:
          programs: the traces of it, by the size of the micro-batch.
          num_params: how many of their parameters all functions have.

        Returns:
          The cuts, and for each trace the indices of the equations with which the
          stages but the first begin.

        Raises:
          ValueError: if a plan is of a function of other parameters.
        """
        if self._groups is not None:
            num_cuts = len(self._groups) - 1
            ends = {
                size: _boundaries.stage_ends(traced.closed)
                for size, traced in programs.items()
            }
            return None, {
                size: [end[stage] for stage in range(num_cuts)]
                for size, end in ends.items()
            }

        first_size, first = next(iter(programs.items()))
        cuts = self.cuts
        about = self.num_traced_stages
        if cuts is None:
            found = _balanced_cuts.choose_cuts(
                first, self.config.num_stages, about, self.warnings
            )
            cuts = CutPoints.of(first, found, num_params, about)
        if cuts.positions and len(cuts.totals) != num_params:
            raise ValueError(
                f"plan: it is of a model or function of {len(cuts.totals)} arrays of "
                f"parameters and state, and this one has {num_params}; make a plan of "
                f"this one, by jpipe.plan"
            )
        if self._is_lasting:
            self.cuts = cuts

        positions = {first_size: cuts.on(first)}
        # Programs of other sizes are more like the first one than what was cut before.
        cuts_of_first = CutPoints.of(first, positions[first_size], num_params, about)
        for size, traced in programs.items():
            if size != first_size:
                positions[size] = cuts_of_first.on(traced)
        return cuts, positions

    # ------------------------------------------------------------------------- owners

    def owner_stages(self, specs: PyTree) -> Sequence[int] | None:
        """Returns the owner stage of each parameter, once these are known.

        Args:
          specs: the parameters, or specs; of a list one entry per layer.
        """
        if self.stage_of_layer is None:
            return self._owner_stages
        return [
            stage
            for stage, entry in zip(self.stage_of_layer, specs, strict=True)
            for _ in jax.tree.leaves(entry)
        ]

    def keep_owner_stages(self, owner_stages: Sequence[int]) -> None:
        """Keeps the owner stages of one function for all others."""
        if self._is_lasting:
            self._owner_stages = owner_stages

    # ---------------------------------------------------------------------- placement

    def placement(self, num_stages: int) -> StagePlacement:
        """Returns the devices and the schedule of so many stages.

        Raises:
          ValueError: if there are too few devices, or settings are for other numbers.
          ScheduleError: if the schedule cannot run.
        """
        if num_stages not in self._placements:
            self._placements[num_stages] = self._place(num_stages)
        return self._placements[num_stages]

    def _place(self, num_stages: int) -> StagePlacement:
        config = self.config
        schedule = config.schedule
        if config.replicas is not None:
            schedule = choose_replicated(
                config.replicas, schedule, num_stages, config.num_microbatches
            )
        schedule = choose_schedule(schedule, num_stages, config.num_microbatches)
        groups = self._groups
        if groups is None:
            groups = [LayerGroup(stage, stage, ()) for stage in range(num_stages)]
        return StagePlacement(
            stages=tuple(groups),
            ranks=config.ranks_of(schedule),
            schedule=schedule,
            remat=_remat.per_stage(config.remat, num_stages),
            rule=config.sharding,
            gather=config.gather,
        )

    @property
    def places(self) -> tuple[Device, ...]:
        """The devices, each once; of several processes at least one of each.

        Those of a list are the ones that its schedule uses.
        """
        if self._groups is not None:
            return self.placement(len(self._groups)).places
        devices = dict.fromkeys(self.config.ranks)
        return (*devices, *idle_process_devices(devices))
