"""What `jpipe.partition` cuts: layers as matrices, of each stage that there may be.

Entry (i, j) of a matrix is of the stage of layers i to j - 1.
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
from ._profile import Profile
from ._sums import Matrix, sums

# Of some cuts, one for each, or one for each rank and each of them.
Numbers = npt.NDArray[np.float64]

# Times are counted in units, of which the whole model takes so many: sums and
# differences of whole numbers below 2 ** 53 are exact, so that equal layers make equal
# stages wherever they stand.
_UNITS = 2**46


class InFlight(NamedTuple):
    """What one rank has in flight.

    Attributes:
      stages: those that it runs.
      counts: each a moment: of how many micro-batches each stage waits for a backward,
        then of how many each waits for the weight gradient.
    """

    stages: tuple[int, ...]
    counts: npt.NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class PartitionProblem:
    """What is to be cut, and what is sought.

    Attributes:
      profile: of the layers.
      modes: which residuals each stage stores; see `Profile.costs`.
      bandwidth: bytes per second between two ranks; ``None``: as many as there are.
      latency: seconds that a transfer takes whatever its size.
      objective: ``"max"``, ``"step"`` or ``"memory"``.
      schedule: what runs the stages; 1F1B if none was given.
      num_microbatches: of one step.
      max_bytes: of each rank; ``None``: no limit. For ``"memory"`` it is 0 for all, so
        that the excess of a cut is what its fullest rank holds.
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
        """What each rank has in flight, at all moments that differ."""
        return [_in_flight(self.schedule, r) for r in range(self.schedule.num_ranks)]

    def costs(self, ends: Sequence[int]) -> Costs:
        """Times and transfers of the stages between two ends each.

        The forward of a last stage that stores only its input is part of its backward.
        """
        times = self.profile.times(ends, self.modes, self.bandwidth, self.latency)
        if self.modes[-1] == "full":
            times.forward[-1] = 0.0
        return times

    @functools.cached_property
    def total(self) -> float:
        """Seconds of all layers, forward twice, and of all transfers."""
        computed = sum(2 * x.forward + x.backward for x in self.profile.layers)
        return computed + self._transfers.sum().item()

    @functools.cached_property
    def quantum(self) -> float:
        """Seconds in which times are counted."""
        return max(self.total / _UNITS, math.ulp(0.0))

    @functools.cached_property
    def transfers(self) -> Numbers:
        """The time of the transfers, there and back, of a cut before each layer."""
        return np.rint(self._transfers / self.quantum)

    @functools.cached_property
    def times(self) -> tuple[Matrix, ...]:
        """The time of each stage; infinite where it would have no layer."""
        seconds = np.array([(x.forward, x.backward) for x in self.profile.layers])
        forward, backward = np.rint(seconds.T / self.quantum)
        once = sums(forward + backward, np.inf)
        twice = once
        if "full" in self.modes[:-1]:
            twice = sums(2 * forward + backward, np.inf)
        return tuple(
            twice if mode == "full" and stage < self.num_stages - 1 else once
            for stage, mode in enumerate(self.modes)
        )

    def loads(self, cuts: Cuts) -> Numbers:
        """The time of one micro-batch on each rank, in units: ``[ranks, cuts]``."""
        each = np.zeros((self.schedule.num_ranks, len(cuts)))
        pairs = zip(self.schedule.placement, self.times, strict=True)
        for stage, (rank, matrix) in enumerate(pairs):
            each[rank] += matrix[cuts[:, stage], cuts[:, stage + 1]]
        return each

    def latencies(self, cuts: Cuts) -> Numbers:
        """The time of all stages of a cut one after another, transfers between."""
        pairs = enumerate(itertools.pairwise(self.schedule.placement), start=1)
        crossed = [stage for stage, (one, other) in pairs if one != other]
        moved = self.transfers[cuts[:, crossed]].sum(axis=1)
        return self.loads(cuts).sum(axis=0) + moved

    def needs(self, cuts: Cuts) -> Numbers:
        """The bytes of each rank: ``[ranks, cuts]``."""
        each = [
            self._rank_bytes(own, [(cuts[:, s], cuts[:, s + 1]) for s in own.stages])
            for own in self.in_flight
        ]
        return np.array(each)

    def excess(self, cuts: Cuts) -> Numbers:
        """The bytes by which the fullest rank exceeds its limit; negative with room."""
        if self.max_bytes is None:
            return np.zeros(len(cuts))
        return (self.needs(cuts) - np.array(self.max_bytes)[:, None]).max(axis=0)

    def excess_of_stages(self) -> list[Matrix]:
        """The same of each stage that there may be, with one for each rank."""
        assert self.max_bytes is not None
        size = self.num_layers + 1
        every = tuple(np.indices((size, size)))
        found = [np.empty(0)] * self.num_stages
        for rank, most in zip(self.in_flight, self.max_bytes, strict=True):
            found[rank.stages[0]] = self._rank_bytes(rank, [every]) - most
        return found

    def _rank_bytes(
        self, rank: InFlight, stages: Sequence[tuple[npt.NDArray[np.intp], ...]]
    ) -> Numbers:
        """What a rank needs whose stages begin and end there, in one cut or several."""
        modes = [self.modes[s] for s in rank.stages]
        modes += [*map(self.profile.pending_mode, modes)]
        pairs = zip(modes, [*stages, *stages], strict=True)
        residuals = [self.profile.residuals_of[mode][stage] for mode, stage in pairs]
        moments = np.tensordot(rank.counts, residuals, 1)
        return moments.max(axis=0) + sum(self._static[stage] for stage in stages)

    @functools.cached_property
    def _transfers(self) -> Numbers:
        layers, bandwidth = self.profile.layers[:-1], self.bandwidth or math.inf
        sizes = [x.output_bytes + x.cotangent_bytes for x in layers]
        moved = np.array([size / bandwidth for size in sizes], float)
        return np.pad(2 * self.latency + moved, 1)

    @functools.cached_property
    def _static(self) -> Matrix:
        """Parameters, their sums of gradients, and other state of each stage.

        Infinite where a stage would have no layer.
        """
        total = 2 * self.profile.params_of + self.profile.state_of
        total[np.tril_indices(len(total))] = np.inf
        return total


def _in_flight(schedule: Schedule, rank: int) -> InFlight:
    stages = [s for s, own in enumerate(schedule.placement) if own == rank]
    changes = np.zeros((len(schedule.rows[rank]) + 1, 2, len(stages)), int)
    for change, (op, stage, _) in zip(changes[1:], schedule.rows[rank], strict=True):
        change[int(op == WEIGHT), stages.index(stage)] += 1 if op == FORWARD else -1
        change[1, stages.index(stage)] += op == INPUT
    counts = np.unique(changes.cumsum(axis=0), axis=0)
    return InFlight(tuple(stages), counts.reshape(len(counts), -1))
