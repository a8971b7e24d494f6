"""The partition of functions into stages, and the devices and schedule of these.

The user of a list of layers decides its stages: they end at the marks in the trace. One
model or loss function is cut where it balances and few bytes cross. The cut points of a
model are kept, and mean the same in traces of another batch size, or of evaluation: so
the parameters of all functions of a model stay where they are.

A function of `jpipe.value_and_grad` shares nothing with others: each signature of its
arguments is cut anew, in the pieces of the first. Most are cut alike. Where one is not,
such as with other static arguments, its parameters belong elsewhere: the call says so,
and `FunctionGradient.place` with these arguments moves them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from .._instructions._transfer import AbstractDevice, Device
from .._layers._layer_group import LayerGroup
from .._messages import WarnOnce
from .._trace import _boundaries
from .._trace._layer_scans import UNDIVIDED, ScanDivision
from .._trace._traced_function import TracedFunction
from ..schedules._choose import choose_replicated, choose_schedule
from . import _balanced_cuts, _remat
from ._cut_points import CutPoints
from ._options import Default, Options
from ._stage_placement import StagePlacement, idle_process_devices

PyTree = Any


@dataclass(frozen=True)
class StageAssignment:
    """The stages that run the equations of a function and own its parameters.

    Attributes:
      cuts: the cut points, with the pieces of scans and parameters; ``None`` for a list
        of layers, whose stages end at marks.
      owner_stages: the owner stage of each parameter; each piece counts as one.
    """

    cuts: CutPoints | None
    owner_stages: tuple[int, ...]


class Partition:
    """The cuts between stages, the owners of parameters, and the devices.

    Args:
      options: the checked options.
      groups: the layers of each stage of a list; ``None``: the stages are found by
        cutting.
      shares_cuts: True if all functions are cut as the first one is, so that their
        parameters stay where they are.

    Attributes:
      options: the checked options.
      stage_of_layer: the stage of each layer of a list; ``None``: found by cutting.
      warnings: the warnings of all functions in these stages.
    """

    def __init__(
        self,
        options: Options,
        groups: Sequence[LayerGroup] | None = None,
        *,
        shares_cuts: bool = False,
    ) -> None:
        self.options = options
        self.warnings = WarnOnce(
            is_muted=any(
                isinstance(device, AbstractDevice) for device in options.devices
            )
        )
        self._groups = groups
        self._shares_cuts = shares_cuts
        # The assignment of the first function; ``None`` before there is one.
        self._first: StageAssignment | None = None
        # (number of stages, has_tail) -> their devices and schedule
        self._placements: dict[tuple[int, bool], StagePlacement] = {}
        self.stage_of_layer: tuple[int, ...] | None = None
        if groups is not None:
            stage_of_layer = list[int]()
            for group in groups:
                stage_of_layer += [group.index] * len(group.layers)
            self.stage_of_layer = tuple(stage_of_layer)
            self.placement(len(groups))  # so that faults of options are found

    # -------------------------------------------------------------------- micro-batches

    @property
    def num_microbatches(self) -> int:
        """The number of micro-batches of a mini-batch."""
        return self.options.num_microbatches

    @property
    def num_shards(self) -> int:
        """The number of devices over which the examples of each are spread."""
        return getattr(self.options.devices[0], "num_shards", 1)

    # --------------------------------------------------------------------------- cuts

    def keep_first(self, assignment: StageAssignment) -> None:
        """Keeps the assignment of the first function; that of any later one agrees."""
        self._first = self._first or assignment

    @property
    def _shared(self) -> StageAssignment | None:
        """The assignment of all functions, once it is known and if they share it."""
        return self._first if self._shares_cuts else None

    @property
    def cuts(self) -> CutPoints | None:
        """The cut points that functions share, once they are known; ``None``: none."""
        return self.options.cuts if self._shared is None else self._shared.cuts

    @property
    def division(self) -> ScanDivision | None:
        """The pieces of scans and parameters, once they are known.

        All functions have those of the first, also if each is cut by itself: parameters
        in pieces are arrays of their user.
        """
        if self._groups is not None:
            return UNDIVIDED
        cuts = self.options.cuts if self._first is None else self._first.cuts
        return None if cuts is None else cuts.division

    @property
    def num_stages(self) -> int | None:
        """The number of stages, once it is known."""
        if self._groups is not None:
            return len(self._groups)
        if self.cuts is not None:
            return len(self.cuts.positions) + 1
        return self.options.num_stages

    @property
    def most_stages(self) -> int:
        """The most stages that there may be: for so many a function is traced.

        It is the number of ranks, if the user gave none. In a layer calls of
        `jax.checkpoint` stay as they are: 1.
        """
        if self._groups is not None:
            return 1
        if self.cuts is not None:
            return self.cuts.num_traced_stages
        return self.options.num_stages or len(
            self.options.replicas or self.options.devices
        )

    @property
    def moves_equations(self) -> bool:
        """True if equations move to the stage that first reads their results."""
        return self._groups is None

    def cut(
        self,
        traced_functions: Mapping[int, TracedFunction],
        division: ScanDivision,
        num_params: int,
    ) -> tuple[CutPoints | None, dict[int, list[int]]]:
        """Cuts a function.

        Args:
          traced_functions: micro-batch size -> trace.
          division: the pieces in which its scans are.
          num_params: the number of parameters that all functions have.

        Returns:
          The cut points, ``None`` for a list; and size -> the index of the first
          equation of each stage but the first.

        Raises:
          ValueError: if a plan is of a function of other parameters.
        """
        if self._groups is not None:
            num_cuts = len(self._groups) - 1
            stage_starts = dict[int, list[int]]()
            for size, traced in traced_functions.items():
                stage_ends = _boundaries.stage_ends(traced.closed)
                stage_starts[size] = [stage_ends[stage] for stage in range(num_cuts)]
            return None, stage_starts

        first_size, first = next(iter(traced_functions.items()))
        cuts = self.cuts
        most_stages = self.most_stages
        if cuts is None:
            first_starts = _balanced_cuts.choose_stage_starts(
                first,
                self.options.num_stages,
                most_stages=most_stages,
                warnings=self.warnings,
            )
            cuts = CutPoints.from_trace(
                first,
                first_starts,
                num_params=num_params,
                num_traced_stages=most_stages,
                division=division,
            )
        if cuts.positions and len(cuts.total_reads) != num_params:
            raise ValueError(
                f"plan: it is of a model or function of {len(cuts.total_reads)} arrays "
                f"of parameters and state, and this one has {num_params}; make a plan "
                f"of this one, by jpipe.plan"
            )

        stage_starts = {first_size: cuts.find_stage_starts(first)}
        # Programs of other sizes are more like the first one than what was cut before.
        cuts_of_first = CutPoints.from_trace(
            first,
            stage_starts[first_size],
            num_params=num_params,
            num_traced_stages=most_stages,
            division=division,
        )
        for size, traced in traced_functions.items():
            if size != first_size:
                stage_starts[size] = cuts_of_first.find_stage_starts(traced)
        return cuts, stage_starts

    # ------------------------------------------------------------------------- owners

    def owner_stages(self, specs: PyTree) -> Sequence[int] | None:
        """Returns the owner stage of each parameter, once these are known.

        Args:
          specs: the parameters, or specs; for a list one entry per layer.
        """
        if self.stage_of_layer is None:
            return None if self._shared is None else self._shared.owner_stages
        owner_stages = list[int]()
        for stage, entry in zip(self.stage_of_layer, specs, strict=True):
            owner_stages += [stage] * len(jax.tree.leaves(entry))
        return owner_stages

    # ---------------------------------------------------------------------- placement

    def placement(self, num_stages: int, *, has_tail: bool = False) -> StagePlacement:
        """Returns the devices, the schedule and the remat modes of so many stages.

        They are chosen once, where the user left them open, and kept.

        Args:
          num_stages: the number of stages.
          has_tail: True if each backward must follow all forwards: see `_whole_batch`.
            Then the default schedule is GPipe, on the same devices.

        Raises:
          ValueError: if there are too few devices, or options are for other numbers;
            or if a backward would not follow all forwards.
          ScheduleError: if the schedule cannot run.
        """
        key = num_stages, has_tail
        if key not in self._placements:
            placement = self._choose_placement(num_stages, has_tail=has_tail)
            if has_tail:
                placement.check_forwards_first()
            self._placements[key] = placement
        return self._placements[key]

    def _choose_placement(self, num_stages: int, *, has_tail: bool) -> StagePlacement:
        options = self.options
        schedule = options.schedule
        if has_tail and options.replicas is not None:
            raise ValueError(
                "replicas= is for schedules whose backwards begin before the last "
                "forward, and the loss reads the outputs of the whole mini-batch at "
                "once (jpipe.whole_batch, reduction='batch'): leave replicas= out; a "
                "mesh with an axis 'data' gives each stage several devices"
            )
        is_default = isinstance(schedule, Default)
        if has_tail and is_default:
            schedule = "gpipe"
        if options.replicas is not None:
            schedule = choose_replicated(
                options.replicas, schedule, num_stages, options.num_microbatches
            )
        schedule = choose_schedule(schedule, num_stages, options.num_microbatches)
        groups = self._groups
        if groups is None:  # the stages of a model have an index, but no layers
            groups = [LayerGroup(stage, stage, ()) for stage in range(num_stages)]
        return StagePlacement(
            layer_groups=tuple(groups),
            ranks=options.ranks_of(schedule),
            schedule=schedule,
            remat=_remat.settings_of_stages(options.remat, num_stages),
            rule=options.sharding,
            gather=options.gather,
        )

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices, each once; every process has at least one.

        For a list these are the devices that its schedule uses; for a model, whose
        stages may not be decided yet, all that the user listed.
        """
        if self._groups is not None:
            return self.placement(len(self._groups)).devices_of_places
        devices = dict.fromkeys(self.options.devices)
        return (*devices, *idle_process_devices(devices))
