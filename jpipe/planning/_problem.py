"""The problem that `jpipe.partition` solves: times and bytes of each possible stage.

Entry [i, j] of a matrix is of the stage of layers i to j - 1. Times are counted in
whole units (see `PartitionProblem.quantum`). A rank with the stages s holds

    bytes = max over moments of sum over s of in_flight[moment, s] * residuals[s][i, j]
            + sum over s of fixed[i, j]

where *fixed* is parameters, their sums of gradients, and state.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..schedules import Costs, Schedule
from ..schedules._action import FORWARD, INPUT, WEIGHT
from ._climb import Cuts
from ._mode_names import stores_only_inputs
from ._profile import Profile
from ._sums import Matrix, sum_stages

# One number per cut, or of shape (ranks, cuts).
Numbers = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

# Times are counted in units, of which the whole model takes so many: sums and
# differences of whole numbers below 2 ** 53 are exact, so that equal layers make equal
# stages wherever they stand.
_UNITS = 2**46


class InFlight(NamedTuple):
    """The micro-batches that one rank has in flight.

    Attributes:
      stages: the stages that it runs.
      counts: one row per moment: for each stage the micro-batches that wait for a
        backward, then for each those that wait for the weight gradient.
    """

    stages: tuple[int, ...]
    counts: Indices


@dataclass(frozen=True, eq=False)
class PartitionProblem:
    """Layers to cut into stages, and the objective.

    Attributes:
      profile: the layers.
      modes: the remat mode of each stage; see `Profile.costs`.
      bandwidth: bytes per second between two ranks; ``None``: transfers take no time
        but ``latency``.
      latency: seconds that a transfer takes whatever its size.
      objective: ``"max"``, ``"step"`` or ``"memory"``.
      schedule: the schedule of the stages; 1F1B if the user has none.
      num_microbatches: the number of micro-batches of a step.
      max_bytes: the limit of each rank; ``None``: no limit. For ``"memory"`` it is 0
        for all, so that the excess of a cut is what its fullest rank holds.
    """

    profile: Profile
    modes: tuple[str, ...]
    bandwidth: float | None
    latency: float
    objective: str
    schedule: Schedule
    num_microbatches: int
    max_bytes: tuple[float, ...] | None

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.profile.layers)

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.modes)

    @functools.cached_property
    def in_flight(self) -> list[InFlight]:
        """The micro-batches in flight on each rank, at all moments that differ."""
        ranks = range(self.schedule.num_ranks)
        return [_count_in_flight(self.schedule, rank) for rank in ranks]

    def costs(self, ends: Sequence[int]) -> Costs:
        """Times and transfers of the stages between two ends each.

        The forward of a last stage that stores only its input is part of its backward.
        """
        costs = self.profile.times(ends, self.modes, self.bandwidth, self.latency)
        if stores_only_inputs(self.modes[-1]):
            costs.forward[-1] = 0.0
        return costs

    @functools.cached_property
    def total_seconds(self) -> float:
        """Seconds of all layers, forward twice, and of all transfers."""
        seconds = sum(
            2 * layer.forward + layer.backward for layer in self.profile.layers
        )
        return seconds + self._transfer_seconds.sum().item()

    @functools.cached_property
    def quantum(self) -> float:
        """Seconds of the unit in which times are counted."""
        return max(self.total_seconds / _UNITS, math.ulp(0.0))

    @functools.cached_property
    def transfers(self) -> Numbers:
        """The time of the transfers, there and back, of a cut before each layer."""
        return np.rint(self._transfer_seconds / self.quantum)

    @functools.cached_property
    def times(self) -> tuple[Matrix, ...]:
        """The times of each stage; infinite where it would have no layer."""
        layers = self.profile.layers
        seconds = np.array([(layer.forward, layer.backward) for layer in layers])
        forward, backward = np.rint(seconds.T / self.quantum)
        stored = sum_stages(forward + backward, empty=np.inf)
        recomputed = stored
        if any(map(stores_only_inputs, self.modes[:-1])):
            recomputed = sum_stages(2 * forward + backward, empty=np.inf)
        times = [
            recomputed if stores_only_inputs(mode) else stored
            for mode in self.modes[:-1]
        ]
        return *times, stored  # the last stage computes its forward in its backward

    def loads(self, cuts: Cuts) -> Numbers:
        """The time of one micro-batch on each rank, in units: ``[ranks, cuts]``."""
        loads = np.zeros((self.schedule.num_ranks, len(cuts)))
        for stage, rank in enumerate(self.schedule.placement):
            loads[rank] += self.times[stage][cuts[:, stage], cuts[:, stage + 1]]
        return loads

    def latencies(self, cuts: Cuts) -> Numbers:
        """The time of all stages of a cut one after another, transfers between."""
        ranks = itertools.pairwise(self.schedule.placement)
        crossing_stages = [
            stage
            for stage, (previous_rank, rank) in enumerate(ranks, start=1)
            if previous_rank != rank
        ]
        transfer_times = self.transfers[cuts[:, crossing_stages]].sum(axis=1)
        return self.loads(cuts).sum(axis=0) + transfer_times

    def rank_bytes(self, cuts: Cuts) -> Numbers:
        """The bytes of each rank: ``[ranks, cuts]``."""
        rows = []
        for rank in self.in_flight:
            bounds = [(cuts[:, stage], cuts[:, stage + 1]) for stage in rank.stages]
            rows.append(self._rank_bytes(rank, bounds))
        return np.array(rows)

    def excess(self, cuts: Cuts) -> Numbers:
        """The bytes by which the fullest rank exceeds its limit; negative with room."""
        if self.max_bytes is None:
            return np.zeros(len(cuts))
        limits = np.array(self.max_bytes)[:, None]
        return (self.rank_bytes(cuts) - limits).max(axis=0)

    def stage_excess(self) -> list[Matrix]:
        """The bytes by which each stage exceeds its limit, with one for each rank."""
        assert self.max_bytes is not None
        num_ends = self.num_layers + 1
        begins, ends = np.indices((num_ends, num_ends))
        excess = [np.empty(0)] * self.num_stages
        for rank, limit in zip(self.in_flight, self.max_bytes, strict=True):
            excess[rank.stages[0]] = self._rank_bytes(rank, [(begins, ends)]) - limit
        return excess

    def _rank_bytes(
        self, rank: InFlight, bounds: Sequence[tuple[Indices, Indices]]
    ) -> Numbers:
        """The bytes of one rank, at the moment at which it holds most.

        Args:
          rank: the micro-batches that it has in flight.
          bounds: one per stage of it: where it begins and ends, in each of some cuts.
        """
        modes = [self.modes[stage] for stage in rank.stages]
        pending_modes = [self.profile.pending_mode(mode) for mode in modes]
        # In the order of the counts: before the backward, then between its halves.
        residuals = [
            self.profile.residuals_of[mode][bound]
            for mode, bound in zip(
                [*modes, *pending_modes], [*bounds, *bounds], strict=True
            )
        ]
        residual_bytes = np.tensordot(rank.counts, residuals, 1)  # one row per moment
        return residual_bytes.max(axis=0) + sum(
            self._fixed_bytes[bound] for bound in bounds
        )

    @functools.cached_property
    def _transfer_seconds(self) -> Numbers:
        bandwidth = self.bandwidth or math.inf
        seconds = [
            (layer.output_bytes + layer.cotangent_bytes) / bandwidth
            for layer in self.profile.layers[:-1]
        ]
        return np.pad(2 * self.latency + np.array(seconds, float), 1)

    @functools.cached_property
    def _fixed_bytes(self) -> Matrix:
        """Parameters, their sums of gradients, and other state of each stage.

        Infinite where a stage would have no layer.
        """
        fixed_bytes = 2 * self.profile.params_of + self.profile.state_of
        fixed_bytes[np.tril_indices(len(fixed_bytes))] = np.inf
        return fixed_bytes


def _count_in_flight(schedule: Schedule, rank: int) -> InFlight:
    """Counts the micro-batches that a rank has in flight after each of its actions."""
    stages = [stage for stage, owner in enumerate(schedule.placement) if owner == rank]
    row = schedule.rows[rank]
    # [moment, state, stage]: the change in the number of micro-batches that are stored
    # until a backward, or pending until the weight gradient.
    changes = np.zeros((len(row) + 1, 2, len(stages)), int)
    stored = changes[:, 0]
    pending = changes[:, 1]
    for moment, (op, stage, _) in enumerate(row, start=1):
        index = stages.index(stage)
        if op == FORWARD:
            stored[moment, index] = 1
        elif op == WEIGHT:
            pending[moment, index] = -1
        else:
            stored[moment, index] = -1
        if op == INPUT:
            pending[moment, index] = 1
    counts = np.unique(changes.cumsum(axis=0), axis=0)
    return InFlight(tuple(stages), counts.reshape(len(counts), -1))
