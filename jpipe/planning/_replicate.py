"""Stages with several devices each: how many stages, of which layers, on how many."""

import math
from collections.abc import Sequence

import numpy as np

from ..schedules import Costs
from ._profile import Profile, speed_faults
from ._replicated import Replicated, ReplicatedStage, ring
from ._sums import Matrix, sums


def replicate(
    profile: Profile,
    num_devices: int,
    *,
    bandwidth: float | None = None,
) -> Replicated:
    """Cuts layers into stages and gives each a number of devices.

    As PipeDream's planner does: a stage that takes three times as long as others gets
    three devices, which run its micro-batches round-robin. The time from one
    micro-batch to the next is least, in the steady state; gradients are exchanged for
    each micro-batch and add to the time of a stage; all devices are used.

    Args:
      profile: of the layers, on one micro-batch; from `jpipe.profile`.
      num_devices: how many there are.
      bandwidth: bytes per second between two of them; ``None``: nothing takes time.

    Returns:
      The stages with the least time; no others are better. They are printed;
      `jpipe.draw.svg` draws it, with the timeline that its ``simulate`` returns;
      ``jpipe.pipeline(layers, M, plan=plan)`` runs it.

    Raises:
      ValueError: with every fault of the arguments.

    Example:
      >>> from jpipe.planning._profile import LayerProfile
      >>> layers = LayerProfile("a", 1.0, 3.0), LayerProfile("b", 1.0, 1.0)
      >>> print(replicate(Profile(layers), 3, bandwidth=None))
      2 s a micro-batch on 3 devices, 3.000 times as fast as one
      with one device per stage 4 s, 2.000 times as long
      stage  layers  devices
          0  0 to 0        2
          1  1 to 1        1

    References:
      Narayanan et al., `PipeDream <https://doi.org/10.1145/3341301.3359646>`_ (2019).
    """
    faults = [*profile.faults(), *speed_faults(bandwidth, 0.0)]
    if num_devices < 1:
        faults.append(f"num_devices={num_devices}; needs an int of at least 1")
    if faults:
        raise ValueError(f"replicate cannot plan this: {'; '.join(faults)}")
    chain = _Chain(profile, bandwidth or math.inf)
    seconds, stages = chain.cut(num_devices, num_devices)
    straight, _ = chain.cut(min(num_devices, len(profile.layers)), 1)
    return Replicated(stages, chain.costs(stages), seconds, straight)


class _Chain:
    """Layers whose stages may have several devices.

    Args:
      profile: of the layers.
      bandwidth: bytes per second.
    """

    def __init__(self, profile: Profile, bandwidth: float) -> None:
        self._layers, self._bandwidth = profile.layers, bandwidth
        layers = profile.layers
        self._times = sums([x.forward + x.backward for x in layers], np.inf)
        self._params = sums([x.param_bytes for x in layers])
        # Bytes that cross a cut before each layer, and those of their gradients.
        self._there, self._back = np.zeros((2, len(layers) + 1))
        for cut in range(1, len(layers)):
            behind = layers[cut - 1]
            crossing = {
                (skip.source, skip.name): (skip.bytes, skip.cotangent_bytes)
                for skip in profile.skips
                if skip.source < cut <= skip.target
                and not (skip.is_output and skip.source == cut - 1)
            }
            sizes = (behind.output_bytes, behind.cotangent_bytes), *crossing.values()
            self._there[cut], self._back[cut] = map(sum, zip(*sizes, strict=True))
        self._sent = self._there + self._back

    def _exchange(self, replicas: int) -> Matrix:
        """The time in which a ring of replicas adds up the gradients of a stage."""
        return ring(self._params, replicas, self._bandwidth)

    def cut(
        self, num_devices: int, most: int
    ) -> tuple[float, tuple[ReplicatedStage, ...]]:
        """The stages whose slowest, or slowest transfer, takes least per micro-batch.

        Args:
          num_devices: how many there are; all are used.
          most: how many a stage may have.

        Returns:
          That time, and the stages.
        """
        size = len(self._sent)
        best = {0: np.full(size, np.inf)}
        best[0][0] = 0.0
        came: dict[tuple[int, int], tuple[int, int]] = {}
        for used in range(1, num_devices + 1):
            best[used] = np.full(size, np.inf)
            for replicas in range(1, min(most, used) + 1):
                moved = self._sent / (self._bandwidth * replicas)
                ends = np.maximum(moved[:, None], moved[None, :])
                seconds = (self._times + 2 * self._exchange(replicas)) / replicas
                before = best[used - replicas][:, None]
                each = np.maximum(before, np.maximum(seconds, ends))
                starts = each.argmin(axis=0)
                values = each[starts, np.arange(size)]
                for end in np.flatnonzero(values < best[used]):
                    best[used][end] = values[end]
                    came[used, int(end)] = int(starts[end]), replicas
        stages, used, end = [], num_devices, size - 1
        while end:
            start, replicas = came[used, end]
            stages.append(ReplicatedStage(start, end, replicas))
            used, end = used - replicas, start
        return float(best[num_devices][-1]), tuple(reversed(stages))

    def costs(self, stages: Sequence[ReplicatedStage]) -> Costs:
        """What each stage takes on one device; its residuals are not known."""
        own = [self._layers[start:end] for start, end, _ in stages]
        rings = [self._exchange(r).item(start, end) for start, end, r in stages]
        return Costs(
            forward=tuple(float(sum(x.forward for x in layers)) for layers in own),
            backward=tuple(float(sum(x.backward for x in layers)) for layers in own),
            boundary_bytes=tuple(self._there.item(start) for start, *_ in stages),
            cotangent_bytes=tuple(self._back.item(start) for start, *_ in stages),
            bandwidth=self._bandwidth,
            exchange=tuple(rings),
            residual_bytes=0,
            pending_bytes=0,
            in_seconds=True,
        )
