"""The shortest step of stages with several devices, exactly."""

import functools
import itertools
import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from ._chain import Matrix
from ._net import Net, ReplicatedStage

Vector = npt.NDArray[np.float64]
Key = tuple[int, int, int]
# What is less by no more than this is rounding.
_SAME = 1 - 1e-12


class Shortest:
    """The least time of a synchronous step, exactly.

    With a limit of all stages' times, and one of what is exposed of all exchanges,
    what is left is a sum over stages and cuts, and made least stage by stage. Limits
    are tried as far as they can lead to a better plan than the best so far.
    """

    def __init__(self, net: Net, num_devices: int, most: int, count: int) -> None:
        self.net, self.num_devices, self.count = net, num_devices, count
        self.replicas = range(1, most + 1)
        self.times = {r: net.times / r for r in self.replicas}
        self.exchange = {r: net.exchange(r) for r in self.replicas}
        self.found: tuple[float, tuple[ReplicatedStage, ...]] = (math.inf, ())

    def best(self) -> tuple[float, tuple[ReplicatedStage, ...]]:
        """The time, and the stages."""
        count = self.count - 1
        least = self.passing(math.inf)
        finite = np.concatenate([t[np.isfinite(t)] for t in self.times.values()])
        most = (self.found[0] - least) / count if count else math.inf
        limits = np.unique(finite)
        # Slower stages than the last of these cannot be better.
        limits = limits[: np.searchsorted(limits, most / _SAME, "right")]
        # Between two limits, both left out, stages pass in no less than `least`.
        intervals = [(-1, len(limits), least)]
        while intervals:
            low, high, least = intervals.pop()
            if high - low < 2:
                continue
            if least + count * limits[low + 1] >= self.found[0] * _SAME:
                continue
            middle = (low + high) // 2
            limit = float(limits[middle])
            passing = self.passing(limit)
            if passing + count * limit < self.found[0] * _SAME:
                # A plan whose slowest stage is faster hides less behind it: that is
                # worse only if it has more stages than there are micro-batches.
                self.passing(limit, reached=True)
            intervals.append((middle, high, least))
            intervals.append((low, middle, passing))
        return self.found

    def passing(self, limit: float, reached: bool = False) -> float:
        """The least time of stages, transfers and what of exchanges is exposed.

        Args:
          limit: of the time of a stage.
          reached: whether the slowest stage has to take as long.
        """
        best, exposed = math.inf, math.inf
        while exposed:
            passing, stages = self._sum(limit, exposed, reached)
            if passing >= best:
                break
            exposed = self._exposed(stages, limit)
            self.found = min(self.found, (self.seconds(stages), stages))
            best = min(best, passing + exposed)
        return best

    def seconds(self, stages: tuple[ReplicatedStage, ...]) -> float:
        """The time of a step with some stages."""
        block = max(self.times[r].item(i, j) for i, j, r in stages)
        passing = sum(self.times[r].item(i, j) for i, j, r in stages)
        for (_, cut, one), (_, _, other) in itertools.pairwise(stages):
            passing += self.net.sent[cut] / (self.net.bandwidth * min(one, other))
        count = self.count - 1
        return float(passing + count * block + self._exposed(stages, block))

    def _exposed(self, stages: tuple[ReplicatedStage, ...], block: float) -> float:
        """What of exchanges is not hidden: stage i is ready i blocks before the end."""
        late = [
            self.exchange[r].item(i, j) - (k * block if k else 0.0)
            for k, (i, j, r) in enumerate(stages)
        ]
        return max(*late, 0.0)

    def _sum(
        self, limit: float, exposed: float, reached: bool
    ) -> tuple[float, tuple[ReplicatedStage, ...]]:
        """The least sum of stages and transfers, less exposed than a limit."""
        # By number of the last stage, devices used so far and those of that stage: by
        # where it ends; of plans without and with a stage that takes the limit.
        sums: dict[Key, Matrix] = {}
        for k in range(min(self.num_devices, self.net.size - 1)):
            for replicas in self.replicas:
                ways = self._ways(k, replicas, limit, exposed, reached)
                for used in range(k + replicas, self.num_devices + 1):
                    if (before := self._before(sums, k, used, replicas)) is None:
                        continue
                    ends = np.full((2, self.net.size), np.inf)
                    for source, target, times in ways:
                        least = (before[source][:, None] + times).min(axis=0)
                        ends[target] = np.minimum(ends[target], least)
                    sums[k, used, replicas] = ends
        best, key = min((float(s[int(reached), -1]), key) for key, s in sums.items())
        if math.isinf(best):
            return best, ()
        stages, lane, end = [], int(reached), self.net.size - 1
        while end:
            k, used, replicas = key
            before = self._before(sums, k, used, replicas)
            assert before is not None
            ways = self._ways(k, replicas, limit, exposed, reached)
            each = [
                (before[source] + times[:, end], source)
                for source, target, times in ways
                if target == lane
            ]
            column, lane = min(each, key=lambda way: float(way[0].min()))
            start = int(column.argmin())
            stages.append(ReplicatedStage(start, end, replicas))
            if start:
                rest = k - 1, used - replicas
                key = min(
                    ((*rest, r) for r in self.replicas if (*rest, r) in sums),
                    key=lambda other: float(
                        sums[other][lane, start] + self._moved(other, replicas)[start]
                    ),
                )
            end = start
        return best, tuple(reversed(stages))

    def _ways(
        self, k: int, replicas: int, limit: float, exposed: float, reached: bool
    ) -> list[tuple[int, int, Matrix]]:
        """The times of stage k, from and to plans without and with the limit taken."""
        times = self.times[replicas]
        late = self.exchange[replicas] - (k * limit if k else 0.0)
        fits = (times <= limit) & ((late < exposed) | (late <= 0))
        times = np.where(fits, times, np.inf)
        if not reached:
            return [(0, 0, times)]
        slow = times == limit
        under, at = np.where(slow, np.inf, times), np.where(slow, times, np.inf)
        return [(0, 0, under), (0, 1, at), (1, 1, times)]

    def _before(
        self, sums: Mapping[Key, Matrix], k: int, used: int, replicas: int
    ) -> Matrix | None:
        """The least sums before stage k, the transfer to it included."""
        if not k:
            start = np.full((2, self.net.size), np.inf)
            start[0, 0] = 0.0
            return start
        rest = k - 1, used - replicas
        keys = [(*rest, r) for r in self.replicas if (*rest, r) in sums]
        each = [sums[key] + self._moved(key, replicas) for key in keys]
        return functools.reduce(np.minimum, each) if each else None

    def _moved(self, before: Key, replicas: int) -> Vector:
        """The time of transfers between two stages, by the cut."""
        return self.net.sent / (self.net.bandwidth * min(before[2], replicas))
