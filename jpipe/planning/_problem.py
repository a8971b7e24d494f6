"""The problem that a partition solves: what a cut is worth, and its best remat modes.

Modes are chosen rank by rank: those of the stages of a rank change its bytes and its
time alone. So the best ones for a cut are the fastest with which each rank keeps to its
limit, and with one stage on each rank a matrix of times is that of the best modes.
Times are those of `_stage_times`, bytes those of `_rank_bytes`: the limit of
`jpipe.partition` is one of residuals, that of a plan counts all.
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
from ..schedules._placement import group_by_rank
from ..schedules._simulate import TOO_LONG
from ._layer_profile import Link
from ._mode_names import stores_only_inputs
from ._profile_record import Profile, costs_of_stages
from ._rank_bytes import Bounds, ByteCounter
from ._stage_costs import Cuts, Matrix, StageCosts
from ._stage_times import StageTimes

# One number per cut, or of shape (ranks, cuts).
Numbers = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]


class RankModes(NamedTuple):
    """The best modes of the stages of one rank, in each of some cuts.

    Attributes:
      times: the time of one micro-batch, in units.
      num_bytes: the bytes that it holds.
      missing_bytes: the bytes beyond its limit, at least 0.
      choices: the indices of the modes in `PartitionProblem.mode_choices`.
    """

    times: Numbers
    num_bytes: Numbers
    missing_bytes: Numbers
    choices: Indices


@dataclass(frozen=True, eq=False)
class PartitionProblem:
    """Layers to cut into stages, and the objective.

    Attributes:
      profile: the layers.
      modes: for each stage, the remat modes that it may have; of those that are as fast
        the first is taken.
      link: the transfers between two ranks. Where they do not overlap, a transfer is a
        part of both stages, half of its time in each.
      objective: ``"max"`` or ``"step"``.
      schedule: the schedule of the stages; 1F1B if the user has none.
      split_shares: for each stage, the share of its backwards that run in halves;
        ``None``: unknown, and counted as the faster of none and all.
      num_microbatches: the number of micro-batches of a step.
      max_bytes: the limit of each rank; ``None``: no limit.
      residuals_only: True if neither arrays between stages count, nor the bytes that
        programs need besides.
      num_shards: the number of devices that share a micro-batch.

    Raises:
      ValueError: if its seconds are too many for a float.
    """

    profile: Profile
    modes: tuple[tuple[str, ...], ...]
    link: Link
    objective: str
    schedule: Schedule
    split_shares: tuple[float | None, ...]
    num_microbatches: int
    max_bytes: tuple[float, ...] | None
    residuals_only: bool = False
    num_shards: int = 1

    def __post_init__(self) -> None:
        if not math.isfinite(self.times.total_seconds * self.num_microbatches):
            raise ValueError(f"partition: {TOO_LONG}")

    @property
    def stage_costs(self) -> StageCosts:
        """The costs of every stage of the layers."""
        return costs_of_stages(self.profile)

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.profile.layers)

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.modes)

    @property
    def has_one_stage_per_rank(self) -> bool:
        """True if each rank has one stage."""
        return self.schedule.num_ranks == self.num_stages

    @functools.cached_property
    def rank_stages(self) -> list[tuple[int, ...]]:
        """The stages of each rank."""
        return group_by_rank(self.schedule.placement, self.schedule.num_ranks)

    def costs(self, ends: Sequence[int]) -> Costs:
        """Times and transfers of the stages between two ends each.

        The forward of a last stage that stores only its input is part of its backward.
        """
        modes = self.best_modes(ends)
        costs = self.stage_costs.times(ends, modes, self.link)
        if stores_only_inputs(modes[-1]):
            costs.forward[-1] = 0.0
        return costs

    @functools.cached_property
    def times(self) -> StageTimes:
        """The times of the stages."""
        return StageTimes(
            self.profile,
            self.link,
            placement=self.schedule.placement,
            split_shares=self.split_shares,
        )

    @functools.cached_property
    def _byte_counter(self) -> ByteCounter:
        return ByteCounter(
            self.stage_costs,
            self.schedule,
            num_shards=self.num_shards,
            residuals_only=self.residuals_only,
        )

    @functools.cached_property
    def fastest_times(self) -> list[Matrix]:
        """The times of each stage in the fastest of its modes, whatever it stores."""
        return [
            np.min([self.times.busy(stage, mode) for mode in modes], axis=0)
            for stage, modes in enumerate(self.modes)
        ]

    @functools.cached_property
    def mode_choices(self) -> list[list[tuple[str, ...]]]:
        """For each rank, the modes that its stages may have."""
        modes: list[Sequence[str]] = list(self.modes)
        if self.max_bytes is None:  # no other is better than the fastest
            modes = [sorted(names, key=stores_only_inputs)[:1] for names in modes]
        choices: list[list[tuple[str, ...]]] = []
        for stages in self.rank_stages:
            modes_of_stages = [modes[stage] for stage in stages]
            choices.append(list(itertools.product(*modes_of_stages)))
        return choices

    def solve_stages(self) -> list[RankModes]:
        """The best modes of each stage as matrices, with one stage on each rank."""
        num_ends = self.num_layers + 1
        begins, ends = np.indices((num_ends, num_ends))
        return [
            self._solve_rank(rank, [(begins, ends)]) for rank in self.schedule.placement
        ]

    def solve_cuts(self, cuts: Cuts) -> list[RankModes]:
        """The best modes of each rank in each of some cuts."""
        rank_modes = []
        for rank, stages in enumerate(self.rank_stages):
            if not stages:  # a schedule of the user's may leave a rank idle
                nothing = np.zeros(len(cuts))
                choices = np.zeros(len(cuts), np.intp)
                rank_modes.append(RankModes(nothing, nothing, nothing, choices))
                continue
            bounds = [(cuts[:, stage], cuts[:, stage + 1]) for stage in stages]
            rank_modes.append(self._solve_rank(rank, bounds))
        return rank_modes

    def best_modes(self, ends: Sequence[int]) -> tuple[str, ...]:
        """The best mode of each stage of one cut."""
        choices = [0] * len(self.rank_stages)
        if any(len(rank_choices) > 1 for rank_choices in self.mode_choices):
            of_ranks = self.solve_cuts(np.array([ends]))
            choices = [of_rank.choices.item() for of_rank in of_ranks]
        modes = [""] * self.num_stages
        for rank, stages in enumerate(self.rank_stages):
            rank_modes = self.mode_choices[rank][choices[rank]]
            for stage, mode in zip(stages, rank_modes, strict=True):
                modes[stage] = mode
        return tuple(modes)

    def slowest_stages(self, cuts: Cuts) -> Numbers:
        """The time of the slowest stage of each cut, in the fastest mode of each."""
        times = [
            matrix[cuts[:, stage], cuts[:, stage + 1]]
            for stage, matrix in enumerate(self.fastest_times)
        ]
        return np.max(times, axis=0)

    def _solve_rank(self, rank: int, bounds: Sequence[Bounds]) -> RankModes:
        """The fastest modes of a rank with which it keeps to its limit.

        Where there are none, those with which it needs least.

        Args:
          rank: the rank.
          bounds: one for each of its stages.
        """
        best: RankModes | None = None
        for index, modes in enumerate(self.mode_choices[rank]):
            other = self._evaluate_rank(rank, bounds, modes, index)
            if best is None:
                best = other
                continue
            is_better = (other.missing_bytes < best.missing_bytes) | (
                (other.missing_bytes == best.missing_bytes) & (other.times < best.times)
            )
            pairs = zip(other, best, strict=True)
            best = RankModes(*(np.where(is_better, new, old) for new, old in pairs))
        assert best is not None, "each stage has a mode"
        return best

    def _evaluate_rank(
        self, rank: int, bounds: Sequence[Bounds], modes: Sequence[str], index: int
    ) -> RankModes:
        """The times and bytes of a rank whose stages have these modes."""
        stages = self.rank_stages[rank]
        times = np.zeros(bounds[0][0].shape)
        for stage, bound, mode in zip(stages, bounds, modes, strict=True):
            times = times + self.times.busy(stage, mode)[bound]
        num_bytes = np.zeros(times.shape)
        missing_bytes = num_bytes
        if self.max_bytes is not None:
            num_bytes = self._byte_counter.count(rank, bounds, modes).total
            missing_bytes = np.maximum(num_bytes - self.max_bytes[rank], 0.0)
        choices = np.full(times.shape, index)
        return RankModes(times, num_bytes, missing_bytes, choices)
