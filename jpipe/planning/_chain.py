"""A chain of layers as matrices: entry (i, j) is of the stage of layers i to j - 1."""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..schedules import Costs
from ._climb import Cuts
from ._in_flight import InFlight
from ._profile import Profile

Matrix = npt.NDArray[np.float64]

# Times are counted in units, a power of two, of which the whole model takes less than
# two to the power of this: sums and differences of whole numbers below 2 ** 53 are
# exact, so that equal layers make equal stages wherever they stand.
_UNITS = 46


@dataclass(frozen=True, eq=False)
class Chain:
    """Layers that are to be cut.

    Attributes:
      profile: of the layers.
      modes: what each stage keeps; see `Profile.costs`.
      bandwidth: bytes per second between two ranks; ``None``: as many as there are.
      latency: seconds that a transfer takes whatever its size.
    """

    profile: Profile
    modes: tuple[str, ...]
    bandwidth: float | None = None
    latency: float = 0.0

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.profile.layers)

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.modes)

    @property
    def has_late_skips(self) -> bool:
        """Whether skip connections may take longer than what they pass."""
        return bool(self.profile.skips) and self.bandwidth is not None

    def costs(self, ends: Sequence[int]) -> Costs:
        """Times and transfers of the stages between two ends each.

        The forward of a last stage that keeps its input only is a part of its backward.
        """
        times = self.profile.times(ends, self.modes, self.bandwidth, self.latency)
        if self.modes[-1] == "full":
            times.forward[-1] = 0.0
        return times

    @functools.cached_property
    def total(self) -> float:
        """Seconds of all layers, forward twice, and of all transfers."""
        computed = sum(2 * x.forward + x.backward for x in self.profile.layers)
        return computed + sum(self._transfers)

    @functools.cached_property
    def unit(self) -> float:
        """Seconds in which times are counted."""
        return max(2.0 ** (math.frexp(self.total)[1] - _UNITS), math.ulp(0.0))

    @functools.cached_property
    def cuts(self) -> Matrix:
        """The time of the transfers, there and back, of a cut before each layer."""
        return np.rint(np.array(self._transfers) / self.unit)

    @functools.cached_property
    def times(self) -> tuple[Matrix, ...]:
        """The time of each stage; infinite where it would have no layer."""
        layers = self.profile.layers
        forward = self._whole(np.array([layer.forward for layer in layers]))
        backward = self._whole(np.array([layer.backward for layer in layers]))
        once = between(forward + backward)
        twice = between(2 * forward + backward) if "full" in self.modes[:-1] else once
        return tuple(
            twice if mode == "full" and stage < self.num_stages - 1 else once
            for stage, mode in enumerate(self.modes)
        )

    def stage_bytes(self, rank: InFlight) -> Matrix:
        """What a rank with one stage needs, for each stage that it may have."""
        (stage,), counts = rank
        mode = self.modes[stage]
        kept, pending = self._kept[mode], self._kept[self._pending[mode]]
        moments = [before * kept + after * pending for before, after in counts]
        return functools.reduce(np.maximum, moments) + self._static

    def rank_bytes(self, rank: InFlight, cuts: Cuts) -> npt.NDArray[np.float64]:
        """What a rank needs in each of some cuts."""
        stages = [(cuts[:, s], cuts[:, s + 1]) for s in rank.stages]
        modes = [self.modes[s] for s in rank.stages]
        modes += [self._pending[mode] for mode in modes]
        pairs = zip(modes, [*stages, *stages], strict=True)
        kept = [self._kept[mode][stage] for mode, stage in pairs]
        # (moments, stages) @ (stages, cuts)
        each = np.array(rank.counts, float) @ np.reshape(kept, (-1, len(cuts)))
        return each.max(axis=0) + sum(self._static[stage] for stage in stages)

    @functools.cached_property
    def _pending(self) -> dict[str, str]:
        """What stages keep between the halves of a backward, by their modes."""
        return {mode: self.profile.pending_mode(mode) for mode in set(self.modes)}

    def _whole(self, seconds: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return np.rint(seconds / self.unit)

    @functools.cached_property
    def _transfers(self) -> list[float]:
        seconds = [0.0] * (self.num_layers + 1)
        for i, layer in enumerate(self.profile.layers[:-1]):
            size = layer.output_bytes + layer.cotangent_bytes
            moved = size / self.bandwidth if self.bandwidth else 0.0
            seconds[i + 1] = 2 * self.latency + moved
        return seconds

    @functools.cached_property
    def _static(self) -> Matrix:
        """Parameters, their sums of gradients, and other state of each stage."""
        layers = self.profile.layers
        own = [2 * layer.param_bytes + layer.state_bytes for layer in layers]
        total = between(np.array(own, float))
        for group in self.profile.ties:
            owner, *others = sorted(set(group))
            for before, tied in itertools.pairwise([owner, *others]):
                # Stages that begin behind the owner and have this one first of them.
                copies = 2 * layers[owner].param_bytes
                total[before + 1 : tied + 1, tied + 1 :] += copies
        return total

    @functools.cached_property
    def _kept(self) -> dict[str, Matrix]:
        """What each stage keeps of a micro-batch, by mode."""
        modes = {*self.modes, *self._pending.values()}
        return {mode: self._kept_by(mode) for mode in modes}

    def _kept_by(self, mode: str) -> Matrix:
        layers, skips = self.profile.layers, self.profile.skips
        if mode != "full":
            kept = [layer.kept_bytes[mode] for layer in layers]
            return between(np.array(kept, float), none=0.0)
        given = [self.profile.boundary_bytes(i) for i in range(self.num_layers)]
        kept = np.triu(
            np.outer([*map(float, given), 0.0], np.ones(self.num_layers + 1)), 1
        )
        readers: dict[tuple[int, str, int, bool], list[int]] = {}
        for skip in skips:
            key = skip.source, skip.name, skip.bytes, skip.is_output
            readers.setdefault(key, []).append(skip.target)
        for (source, _, size, is_output), targets in readers.items():
            # Of several readers in a stage the first brings it.
            first = source + 1 + is_output
            for before, target in itertools.pairwise([first - 1, *sorted(targets)]):
                kept[max(first, before + 1) : target + 1, target + 1 :] += size
        return kept


def between(numbers: npt.NDArray[np.float64], none: float = np.inf) -> Matrix:
    """Sums of numbers i to j - 1, and something else where there are none."""
    ends = np.concatenate([[0.0], np.cumsum(numbers)])
    sums = ends[None, :] - ends[:, None]
    sums[np.tril_indices(len(ends))] = none
    return sums
