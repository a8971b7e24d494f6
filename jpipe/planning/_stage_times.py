"""The time of one micro-batch in each stage that layers can make, forward and backward.

Entry [i, j] of a matrix is of the stage of layers i to j - 1; infinite if it has none:

    busy[i, j] = sum over its layers of F + B       2 F + B where F is computed again;
                                                    I + W for B as far as it is split
                 + (transfer[i] + transfer[j]) / 2  unless transfers overlap

    transfer[i]: the time of a cut before layer i, there and back; 0 where the stages at
    both sides are of one rank. Those of skip connections are left to the simulation.

Where transfers overlap, they pass between stages: `between` adds them up.

Times are counted in units, of which the whole model takes so many: sums and differences
of whole numbers below 2 ** 53 are exact, so that equal layers make equal stages
wherever they stand.
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..schedules import Schedule
from ..schedules._action import BACKWARD, WEIGHT
from ._layer_profile import Link
from ._mode_names import stores_only_inputs
from ._profile_record import Profile
from ._stage_costs import Cuts, Matrix, sum_stages

_UNITS_OF_MODEL = 2**46


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


class _BusyKey(NamedTuple):
    """All that the times of a stage depend on, besides its layers.

    Attributes:
      split_share: the share of its backwards that run in halves; ``None``: unknown.
      is_recomputed: True if its backward computes the forward again.
      crosses_before: True if the stage before it is on another rank.
      crosses_after: True if the stage after it is.
    """

    split_share: float | None
    is_recomputed: bool
    crosses_before: bool
    crosses_after: bool


class StageTimes:
    """Times of stages, in units.

    Args:
      profile: the layers.
      link: the transfers between two ranks.
      placement: the rank of each stage.
      split_shares: for each stage, the share of its backwards that run in halves;
        ``None``: unknown, and counted as the faster of none and all.
    """

    def __init__(
        self,
        profile: Profile,
        link: Link,
        *,
        placement: Sequence[int],
        split_shares: Sequence[float | None],
    ) -> None:
        self._layers = profile.layers
        self._link = link
        self._placement = placement
        self._split_shares = split_shares
        transfer_seconds = [
            link.seconds(layer.output_bytes) + link.seconds(layer.cotangent_bytes)
            for layer in self._layers[:-1]
        ]
        self._busy: dict[_BusyKey, Matrix] = {}
        self._transfer_seconds = np.pad(np.array(transfer_seconds, float), 1)

    @functools.cached_property
    def total_seconds(self) -> float:
        """Seconds of all layers, forward and backward twice, and of all transfers."""
        seconds = 0.0
        for layer in self._layers:
            seconds += 2 * layer.forward
            seconds += layer.backward_seconds(0.0) + layer.backward_seconds(1.0)
        return seconds + self._transfer_seconds.sum().item()

    @functools.cached_property
    def unit(self) -> float:
        """Seconds of a unit."""
        return max(self.total_seconds / _UNITS_OF_MODEL, math.ulp(0.0))

    def busy(self, stage: int, mode: str) -> Matrix:
        """The time for which a stage and its transfers keep its rank from others.

        The last stage computes its forward in its backward.

        Args:
          stage: the stage.
          mode: its remat mode.
        """
        is_last = stage == len(self._placement) - 1
        key = _BusyKey(
            split_share=self._split_shares[stage],
            is_recomputed=stores_only_inputs(mode) and not is_last,
            crosses_before=self._crosses(stage),
            crosses_after=self._crosses(stage + 1),
        )
        if key not in self._busy:
            self._busy[key] = self._compute_busy(key)
        return self._busy[key]

    def between(self, cuts: Cuts) -> Matrix:
        """The time that transfers of a micro-batch take between stages, in each cut."""
        crossing_stages = [
            stage for stage in range(1, len(self._placement)) if self._crosses(stage)
        ]
        return self.overlapped[cuts[:, crossing_stages]].sum(axis=1)

    @functools.cached_property
    def overlapped(self) -> Matrix:
        """The time between two ranks of a cut before each layer; 0 if none overlap."""
        seconds = self._transfer_seconds if self._link.overlap else 0.0
        return np.broadcast_to(self._count(seconds), len(self._layers) + 1)

    def backward(self, split_share: float | None) -> Matrix:
        """The time of the backward of each layer, of which a share runs in halves."""
        seconds = [layer.backward_seconds(split_share) for layer in self._layers]
        return self._count(seconds)

    def _crosses(self, stage: int) -> bool:
        """True if a stage begins on another rank than the one before it ends."""
        if not 0 < stage < len(self._placement):
            return False
        return self._placement[stage - 1] != self._placement[stage]

    def _count(self, seconds: Sequence[float] | Matrix | float) -> Matrix:
        """Whole units."""
        return np.rint(np.array(seconds) / self.unit)

    def _compute_busy(self, key: _BusyKey) -> Matrix:
        """The matrix of a key."""
        forward = self._count([layer.forward for layer in self._layers])
        if key.is_recomputed:
            forward = 2 * forward
        times = sum_stages(forward + self.backward(key.split_share), empty=np.inf)
        if not self._link.overlap:
            halves = self._count(self._transfer_seconds / 2)
            times += key.crosses_before * halves[:, None]
            times += key.crosses_after * halves[None, :]
        return times
