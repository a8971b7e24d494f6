"""The bytes of a rank, as limits of cuts and forecasts of plans count them.

    bytes = parameters + gradients + max(activations + workspace, exchange)

    activations = max over moments of
                  sum over its stages s, arrays h of count[moment, s, h] * size[s, h]
    workspace   = max over its stages of what the largest program needs; if forward and
                  backward are one, with the residuals, which it holds itself
    exchange    = the gradients of its largest stage, if several devices share a
                  micro-batch: they stand beside their sums when activations are gone

The counts are those of a schedule (`_in_flight`), the sizes those of a cut and its
remat modes. All numbers may be arrays: of one stage in all cuts, or of several cuts.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .._partition._remat_mode import FULL
from ..schedules import Schedule, Skip
from ..schedules._placement import group_by_rank
from ._fused import find_fused_microbatches
from ._in_flight import Held, count_in_flight
from ._mode_names import stores_only_inputs
from ._stage_costs import StageCosts

# Where a stage begins and ends: layers, or arrays of them.
Bounds = tuple[Any, Any]


class RankBytes(NamedTuple):
    """The bytes of a rank; one number for all, or arrays of one shape.

    Attributes:
      static: parameters and other state.
      gradients: the sums of gradients.
      activations: the arrays of micro-batches, when they are most.
      workspace: the bytes that programs need beside these.
    """

    static: Any
    gradients: Any
    activations: Any
    workspace: Any

    @property
    def total(self) -> Any:
        """The sum of all parts."""
        return self.static + self.gradients + self.activations + self.workspace


class ByteCounter:
    """Counts the bytes of each rank of a schedule.

    Args:
      stage_costs: the costs of every stage of the layers.
      schedule: the schedule of the stages.
      num_shards: the number of devices that share a micro-batch.
      residuals_only: True to count no arrays that come from other stages or go there,
        and no workspace.
    """

    def __init__(
        self,
        stage_costs: StageCosts,
        schedule: Schedule,
        *,
        num_shards: int = 1,
        residuals_only: bool = False,
    ) -> None:
        self._stage_costs = stage_costs
        self._schedule = schedule
        self._num_shards = num_shards
        self._residuals_only = residuals_only
        self._rank_stages = group_by_rank(schedule.placement, schedule.num_ranks)

    def count(
        self,
        rank: int,
        bounds: Sequence[Bounds],
        modes: Sequence[str],
        skips: Sequence[Skip] | None = None,
    ) -> RankBytes:
        """Counts the bytes of a rank.

        Args:
          rank: the rank.
          bounds: where each of its stages begins and ends.
          modes: the remat mode of each of them.
          skips: the skip connections between all stages, if these are of one cut;
            ``None``: their arrays count as inputs of the stages that read them.
        """
        costs = self._stage_costs
        gradients = [costs.param_bytes[bound] for bound in bounds]
        activations = self._count_activations(rank, bounds, modes, skips)
        workspace = 0.0
        if not self._residuals_only:
            workspace = self.count_workspace(rank, bounds, modes)
        if self._num_shards > 1:
            exchange = functools.reduce(np.maximum, gradients, 0.0)
            workspace = np.maximum(workspace, exchange - activations)
        return RankBytes(
            static=sum(costs.static_bytes[bound] for bound in bounds),
            gradients=sum(gradients),
            activations=activations,
            workspace=workspace,
        )

    def count_workspace(
        self, rank: int, bounds: Sequence[Bounds], modes: Sequence[str]
    ) -> Any:
        """Counts the bytes that the largest program of a rank needs while it runs.

        Args:
          rank: the rank.
          bounds: where each of its stages begins and ends.
          modes: the remat mode of each of them.
        """
        costs = self._stage_costs
        last = self._schedule.num_stages - 1
        largest: Any = 0.0
        stages = self._rank_stages[rank]
        for stage, bound, mode in zip(stages, bounds, modes, strict=True):
            workspace = costs.workspace_bytes[bound]
            is_fused = stage == last and self._has_fused
            if stores_only_inputs(mode) or is_fused:
                residuals = costs.residual_bytes[costs.pending_mode(mode)]
                workspace = workspace + residuals[bound]
            largest = np.maximum(largest, workspace)
        return largest

    @functools.cached_property
    def _has_fused(self) -> bool:
        """True if some forwards of the last stage are fused with their backwards."""
        return bool(find_fused_microbatches(self._schedule))

    def _count_activations(
        self,
        rank: int,
        bounds: Sequence[Bounds],
        modes: Sequence[str],
        skips: Sequence[Skip] | None,
    ) -> Any:
        in_flight = count_in_flight(
            self._schedule,
            has_fused=not self._residuals_only,
            skips=tuple((skip.source, skip.target) for skip in skips or ()),
        )
        counts = in_flight[rank]
        sizes: list[Any] = []
        for bound, mode in zip(bounds, modes, strict=True):
            stage_sizes = self._sizes(bound, mode)
            if skips is not None:
                stage_sizes[Held.INPUT] = self._stage_costs.boundary_bytes(bound[0])
            sizes += [stage_sizes[held] for held in Held]
        for skip in skips or ():
            skip_sizes = {
                Held.INPUT: skip.bytes,
                Held.OUTPUT_GRAD: skip.cotangent_bytes,
                Held.SENT_OUTPUT: skip.bytes,
                Held.SENT_INPUT_GRAD: skip.cotangent_bytes,
            }
            sizes += [skip_sizes.get(held, 0.0) for held in Held]
        flat_counts = counts.reshape(len(counts), -1)
        return np.tensordot(flat_counts, np.array(sizes, float), 1).max(axis=0)

    def _sizes(self, bound: Bounds, mode: str) -> dict[Held, Any]:
        """The bytes of each `Held` of a stage, for one micro-batch."""
        begin, end = bound
        costs = self._stage_costs
        residuals = costs.residual_bytes
        sizes = {
            Held.RESIDUALS: residuals[mode][bound],
            Held.PENDING: residuals[costs.pending_mode(mode)][bound],
            Held.INPUT: residuals[FULL.name][bound],
            Held.OUTPUT_GRAD: costs.cotangent_bytes[end],
            Held.SENT_OUTPUT: costs.output_bytes[end],
            Held.SENT_INPUT_GRAD: costs.cotangent_bytes[begin],
        }
        if self._residuals_only:
            for held in set(Held) - {Held.RESIDUALS, Held.PENDING}:
                sizes[held] = np.zeros_like(sizes[held])
        return sizes
