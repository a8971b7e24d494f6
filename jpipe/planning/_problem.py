"""The problem that a partition solves: times and bytes of each possible stage.

Entry [i, j] of a matrix is of the stage of layers i to j - 1. Times are counted in
whole units (see `PartitionProblem.quantum`). A rank with the stages s holds

    bytes = max over moments of sum over s, h of count[moment, s, h] * size[s, h][i, j]
            + sum over s of fixed[i, j]

where h is what it holds of a micro-batch (`_in_flight`), such as residuals by the remat
mode of the stage, and *fixed* is parameters, their sums of gradients, and state. A
forecast of a step counts all h, and the workspace of the largest program; the limit of
`jpipe.partition` is one of residuals.

Modes are chosen rank by rank: those of the stages of a rank change its bytes and its
time alone. So the best ones for a cut are the fastest with which each rank keeps to its
limit, and with one stage on each rank a matrix of times is that of the best modes.
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .._partition._remat_mode import FULL
from ..schedules import Costs, Schedule
from ..schedules._action import BACKWARD, WEIGHT
from ..schedules._simulate import TOO_LONG
from ._climb import Cuts
from ._fused import find_fused_microbatches
from ._in_flight import Counts, Held, count_in_flight, list_stages
from ._layer_profile import Link
from ._mode_names import stores_only_inputs
from ._profile_record import Profile, costs_of_stages
from ._stage_costs import StageCosts
from ._sums import Matrix, sum_stages

# One number per cut, or of shape (ranks, cuts).
Numbers = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]
# Where a stage begins and ends, in each of some cuts.
Bounds = tuple[Indices, Indices]

# Times are counted in units, of which the whole model takes so many: sums and
# differences of whole numbers below 2 ** 53 are exact, so that equal layers make equal
# stages wherever they stand.
_UNITS = 2**46


def count_split_shares(schedule: Schedule) -> tuple[float, ...]:
    """For each stage, the share of its backwards that run in halves."""
    actions = itertools.chain.from_iterable(schedule.rows)
    counts = Counter((action.op, action.stage) for action in actions)
    shares: list[float] = []
    for stage in range(schedule.num_stages):
        num_split = counts[WEIGHT, stage]
        num_backwards = num_split + counts[BACKWARD, stage]
        shares.append(num_split / max(num_backwards, 1))
    return tuple(shares)


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
      workspace: the bytes that the largest program of each stage needs besides, as in a
        forecast; ``None``: neither these count, nor arrays between stages.
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
    workspace: Matrix | None = None
    num_shards: int = 1

    def __post_init__(self) -> None:
        if not math.isfinite(self.total_seconds * self.num_microbatches):
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
        return list_stages(self.schedule.placement, self.schedule.num_ranks)

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
    def total_seconds(self) -> float:
        """Seconds of all layers, forward and backward twice, and of all transfers."""
        seconds = 0.0
        for layer in self.profile.layers:
            seconds += 2 * layer.forward
            seconds += layer.backward_seconds(0.0) + layer.backward_seconds(1.0)
        return seconds + self._transfer_seconds.sum().item()

    @functools.cached_property
    def quantum(self) -> float:
        """Seconds of the unit in which times are counted."""
        return max(self.total_seconds / _UNITS, math.ulp(0.0))

    @functools.cached_property
    def transfers(self) -> Numbers:
        """The time between the two stages of a cut before each layer, there and back.

        It is 0 where transfers are parts of the stages.
        """
        if not self.link.overlap:
            return np.zeros(self.num_layers + 1)
        return np.rint(self._transfer_seconds / self.quantum)

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
        solutions = []
        for rank, stages in enumerate(self.rank_stages):
            if not stages:  # a schedule of the user's may leave a rank idle
                nothing = np.zeros(len(cuts))
                choices = np.zeros(len(cuts), np.intp)
                solutions.append(RankModes(nothing, nothing, nothing, choices))
                continue
            bounds = [(cuts[:, stage], cuts[:, stage + 1]) for stage in stages]
            solutions.append(self._solve_rank(rank, bounds))
        return solutions

    def best_modes(self, ends: Sequence[int]) -> tuple[str, ...]:
        """The best mode of each stage of one cut."""
        choices = [0] * len(self.rank_stages)
        if any(len(rank_choices) > 1 for rank_choices in self.mode_choices):
            solutions = self.solve_cuts(np.array([ends]))
            choices = [solution.choices.item() for solution in solutions]
        modes = [""] * self.num_stages
        for rank, stages in enumerate(self.rank_stages):
            rank_modes = self.mode_choices[rank][choices[rank]]
            for stage, mode in zip(stages, rank_modes, strict=True):
                modes[stage] = mode
        return tuple(modes)

    def transfer_times(self, cuts: Cuts) -> Numbers:
        """The time between stages of one micro-batch, in each cut."""
        ranks = itertools.pairwise(self.schedule.placement)
        crossing_stages = [
            stage
            for stage, (previous_rank, rank) in enumerate(ranks, start=1)
            if previous_rank != rank
        ]
        return self.transfers[cuts[:, crossing_stages]].sum(axis=1)

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
            solution = self._solve_rank_in_modes(rank, bounds, modes, index)
            if best is None:
                best = solution
                continue
            is_better = (solution.missing_bytes < best.missing_bytes) | (
                (solution.missing_bytes == best.missing_bytes)
                & (solution.times < best.times)
            )
            pairs = zip(solution, best, strict=True)
            best = RankModes(*(np.where(is_better, new, old) for new, old in pairs))
        assert best is not None, "each stage has a mode"
        return best

    def _solve_rank_in_modes(
        self, rank: int, bounds: Sequence[Bounds], modes: Sequence[str], index: int
    ) -> RankModes:
        """The only solution for a rank whose stages have these modes."""
        stages = self.rank_stages[rank]
        times = np.zeros(bounds[0][0].shape)
        for stage, bound, mode in zip(stages, bounds, modes, strict=True):
            times = times + self._stage_times(stage, mode)[bound]
            times += self._time_of_transfers(stage)[bound]
        num_bytes = np.zeros(times.shape)
        missing_bytes = num_bytes
        if self.max_bytes is not None:
            num_bytes = self._rank_bytes(rank, bounds, modes)
            missing_bytes = np.maximum(num_bytes - self.max_bytes[rank], 0.0)
        choices = np.full(times.shape, index)
        return RankModes(times, num_bytes, missing_bytes, choices)

    def _stage_times(self, stage: int, mode: str) -> Matrix:
        """The times of a stage; infinite where it would have no layer.

        The last stage computes its forward in its backward.
        """
        is_recomputed = stores_only_inputs(mode) and stage < self.num_stages - 1
        return self._times[is_recomputed, self.split_shares[stage]]

    def _time_of_transfers(self, stage: int) -> Matrix:
        """The time for which transfers keep a stage from computing, there and back.

        Those of skip connections are left to the simulation.
        """
        before, after = self._changes_rank[stage : stage + 2]
        return self._transfer_halves[before, after]

    @functools.cached_property
    def _changes_rank(self) -> list[int]:
        """For the begin of each stage and the end: 1 if ranks differ there, else 0."""
        ranks = self.schedule.placement
        inner = [int(previous != rank) for previous, rank in itertools.pairwise(ranks)]
        return [0, *inner, 0]

    @functools.cached_property
    def _transfer_halves(self) -> Matrix:
        """Half of the times of the transfers at the ends of each stage.

        The indices are: 1 if the one at its begin counts, 1 if the one at its end does,
        begin, end.
        """
        seconds = 0.0 if self.link.overlap else self._transfer_seconds / 2
        halves = np.broadcast_to(np.rint(seconds / self.quantum), self.num_layers + 1)
        has_half = np.array([0.0, 1.0])
        before = has_half[:, None, None, None] * halves[:, None]
        after = has_half[None, :, None, None] * halves[None, :]
        return before + after

    @functools.cached_property
    def fastest_times(self) -> list[Matrix]:
        """The times of each stage in the fastest of its modes, whatever it stores."""
        fastest: list[Matrix] = []
        for stage, modes in enumerate(self.modes):
            times = [self._stage_times(stage, mode) for mode in modes]
            fastest.append(np.min(times, axis=0) + self._time_of_transfers(stage))
        return fastest

    @functools.cached_property
    def backward_times(self) -> dict[float | None, Numbers]:
        """Share of backwards that run in halves -> times of those of all layers."""
        times: dict[float | None, Numbers] = {}
        for share in set(self.split_shares):
            seconds = [layer.backward_seconds(share) for layer in self.profile.layers]
            times[share] = np.rint(np.array(seconds) / self.quantum)
        return times

    @functools.cached_property
    def _times(self) -> dict[tuple[bool, float | None], Matrix]:
        """The times of each stage, infinite where it would have no layer.

        The keys are: True if its backward computes the forward again, and the share of
        its backwards that run in halves.
        """
        seconds = [layer.forward for layer in self.profile.layers]
        forward = np.rint(np.array(seconds) / self.quantum)
        times: dict[tuple[bool, float | None], Matrix] = {}
        for share, backward in self.backward_times.items():
            times[False, share] = sum_stages(forward + backward, empty=np.inf)
            times[True, share] = sum_stages(2 * forward + backward, empty=np.inf)
        return times

    @functools.cached_property
    def _in_flight(self) -> list[Counts]:
        """The arrays that each rank holds, at all moments that matter."""
        if self.workspace is not None:
            return count_in_flight(self.schedule, self._fused_microbatches)
        in_flight = count_in_flight(self.schedule)
        for counts in in_flight:
            counts[:, :, Held.INPUT :] = 0
        return in_flight

    def _rank_bytes(
        self, rank: int, bounds: Sequence[Bounds], modes: Sequence[str]
    ) -> Numbers:
        """The bytes of one rank, at the moment at which it holds most."""
        sizes = []
        for bound, mode in zip(bounds, modes, strict=True):
            sizes += self._held_sizes(bound, mode)
        counts = self._in_flight[rank]
        counts = counts.reshape(len(counts), -1)
        held_bytes = np.tensordot(counts, sizes, 1).max(axis=0)
        fixed_bytes = sum(self._fixed_bytes[bound] for bound in bounds)
        if self.workspace is None:
            return held_bytes + fixed_bytes

        workspaces = []
        stages = self.rank_stages[rank]
        for stage, bound, mode in zip(stages, bounds, modes, strict=True):
            workspace = self.workspace[bound]
            is_fused = stage == self.num_stages - 1 and self._fused_microbatches
            if stores_only_inputs(mode) or is_fused:
                # One program runs forward and backward: it holds the residuals itself.
                costs = self.stage_costs
                residuals = costs.residual_bytes[costs.pending_mode(mode)]
                workspace = workspace + residuals[bound]
            workspaces.append(workspace)
        total_bytes = held_bytes + np.max(workspaces, axis=0)
        if self.num_shards > 1:
            # At the end, the gradients that shards exchange stand beside their sums.
            exchanged = [self.stage_costs.param_bytes[bound] for bound in bounds]
            total_bytes = np.maximum(total_bytes, np.max(exchanged, axis=0))
        return total_bytes + fixed_bytes

    def _held_sizes(self, bound: Bounds, mode: str) -> list[Numbers]:
        """The bytes of each `Held` of a stage, for one micro-batch."""
        begins, ends = bound
        costs = self.stage_costs
        sizes = {
            Held.RESIDUALS: costs.residual_bytes[mode][bound],
            Held.PENDING: costs.residual_bytes[costs.pending_mode(mode)][bound],
            Held.INPUT: costs.residual_bytes[FULL.name][bound],
            Held.OUTPUT_GRAD: self._cotangent_bytes[ends],
            Held.SENT_OUTPUT: self._output_bytes[ends],
            Held.SENT_INPUT_GRAD: self._cotangent_bytes[begins],
        }
        return [sizes[held] for held in Held]

    @functools.cached_property
    def _fused_microbatches(self) -> set[int]:
        return find_fused_microbatches(self.schedule)

    @functools.cached_property
    def _output_bytes(self) -> Numbers:
        """The bytes that cross a cut before each layer."""
        return np.array([0, *(layer.output_bytes for layer in self.profile.layers)])

    @functools.cached_property
    def _cotangent_bytes(self) -> Numbers:
        """The bytes that cross a cut before each layer on the way back."""
        return np.array([0, *(layer.cotangent_bytes for layer in self.profile.layers)])

    @functools.cached_property
    def _transfer_seconds(self) -> Numbers:
        seconds = [
            self.link.seconds(layer.output_bytes)
            + self.link.seconds(layer.cotangent_bytes)
            for layer in self.profile.layers[:-1]
        ]
        return np.pad(np.array(seconds, float), 1)

    @functools.cached_property
    def _fixed_bytes(self) -> Matrix:
        """Parameters, their sums of gradients, and other state of each stage.

        Infinite where a stage would have no layer.
        """
        fixed_bytes = 2 * self.stage_costs.param_bytes + self.stage_costs.state_bytes
        fixed_bytes[np.tril_indices(len(fixed_bytes))] = np.inf
        return fixed_bytes
