"""Stages with several devices each: how many stages, of which layers, on how many."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ._net import Net, ReplicatedStage
from ._profile import Profile, speed_faults
from ._shortest import Shortest


@dataclass(frozen=True)
class Replicated:
    """Stages with several devices each, and what they would take.

    Attributes:
      stages: in order.
      seconds: in the steady state from one micro-batch to the next; or of a step.
      alone: what one device would take for the same.
      busy: what each stage computes on one micro-batch, its replicas side by side.
      num_devices: how many there are.
      objective: ``"steady"`` or ``"step"``.
    """

    stages: tuple[ReplicatedStage, ...]
    seconds: float
    alone: float
    busy: tuple[float, ...]
    num_devices: int
    objective: str

    def __str__(self) -> str:
        what = "a micro-batch" if self.objective == "steady" else "a step"
        used = sum(stage.replicas for stage in self.stages)
        faster = self.alone / self.seconds if self.seconds else 1.0
        lines = [
            f"{self.seconds:.6g} s {what} on {_devices(used)}, {faster:.3f} times as "
            f"fast as one"
        ]
        if used < self.num_devices:
            lines.append(
                f"{self.num_devices - used} of {self.num_devices} devices are left "
                f"idle: with them a step would take no less"
            )
        for i, (stage, busy) in enumerate(zip(self.stages, self.busy, strict=True)):
            lines.append(
                f"stage {i}: layers {stage.start} to {stage.end - 1}, "
                f"{_devices(stage.replicas)}, {busy:.6g} s"
            )
        return "\n".join(lines)


def replicate(
    profile: Profile,
    num_devices: int,
    *,
    bandwidth: float | None,
    num_microbatches: int | None = None,
    straight: bool = False,
    objective: str = "steady",
    transfers: bool = True,
) -> Replicated:
    """Cuts layers into stages and gives each a number of devices.

    Args:
      profile: of the layers, on one micro-batch.
      num_devices: how many there are.
      bandwidth: bytes per second between two of them; ``None``: nothing takes time.
      num_microbatches: of one step.
      straight: whether each stage has one device.
      objective: ``"steady"``: the time from one micro-batch to the next, replicas
        taking turns; gradients are exchanged for each and add to the time of a stage,
        and all devices are used. ``"step"``: the time of a synchronous step, replicas
        sharing each micro-batch: ``num_microbatches - 1`` times the slowest stage, all
        stages and transfers one after another, and what of the exchange of gradients
        is not hidden behind earlier stages that still compute.
      transfers: whether the transfers between stages take time.

    Returns:
      The stages with the least time; no others are better.

    Raises:
      ValueError: with every fault of the arguments.

    Example:
      >>> from jpipe.planning._profile import LayerProfile
      >>> layers = LayerProfile("a", 1.0, 3.0), LayerProfile("b", 1.0, 1.0)
      >>> print(replicate(Profile(layers), 3, bandwidth=None))
      2 s a micro-batch on 3 devices, 3.000 times as fast as one
      stage 0: layers 0 to 0, 2 devices, 2 s
      stage 1: layers 1 to 1, 1 device, 2 s

    References:
      Narayanan et al., `PipeDream <https://doi.org/10.1145/3341301.3359646>`_ (2019);
      Fan et al., `DAPPLE <https://arxiv.org/abs/2007.01045>`_ (2021).
    """
    faults = [*profile.faults(), *speed_faults(bandwidth, 0.0)]
    faults += _unfit(num_devices, num_microbatches, objective)
    count = len(profile.layers)
    if not faults and straight and objective == "steady" and num_devices > count:
        faults.append(
            f"num_devices={num_devices} is more than the {count} layers; straight=True "
            f"needs one for each"
        )
    if faults:
        raise ValueError(f"replicate cannot plan this: {'; '.join(faults)}")
    net = Net(profile, bandwidth or math.inf, transfers)
    most = 1 if straight else num_devices
    if objective == "steady":
        seconds, stages = _steady(net, num_devices, most)
        alone = net.total
    else:
        seconds, stages = Shortest(net, num_devices, most, num_microbatches or 1).best()
        alone = net.total * (num_microbatches or 1)
    busy = tuple(float(net.times[s.start, s.end]) / s.replicas for s in stages)
    return Replicated(stages, seconds, alone, busy, num_devices, objective)


def _devices(number: int) -> str:
    return f"{number} device{'s' * (number > 1)}"


def _unfit(num_devices: Any, num_microbatches: Any, objective: str) -> Iterator[str]:
    counts = {"num_devices": num_devices, "num_microbatches": num_microbatches}
    if num_microbatches is None:
        del counts["num_microbatches"]
        if objective == "step":
            yield "objective='step' needs num_microbatches="
    for name, number in counts.items():
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            yield f"{name}={number!r}; needs an int of at least 1"
    if objective not in ("steady", "step"):
        yield f"objective={objective!r}; needs 'steady' or 'step'"


def _steady(
    net: Net, num_devices: int, most: int
) -> tuple[float, tuple[ReplicatedStage, ...]]:
    """The least bottleneck: stages, with the exchange of gradients, and transfers."""
    best = {0: np.full(net.size, np.inf)}
    best[0][0] = 0.0
    came: dict[tuple[int, int], tuple[int, int]] = {}
    for used in range(1, num_devices + 1):
        best[used] = np.full(net.size, np.inf)
        for replicas in range(1, min(most, used) + 1):
            moved = net.sent / (net.bandwidth * replicas)
            ends = np.maximum(moved[:, None], moved[None, :])
            times = np.maximum(net.turns(replicas), ends)
            each = np.maximum(best[used - replicas][:, None], times)
            starts = each.argmin(axis=0)
            values = each[starts, np.arange(net.size)]
            for end in np.flatnonzero(values < best[used]):
                best[used][end] = values[end]
                came[used, int(end)] = int(starts[end]), replicas
    stages, used, end = [], num_devices, net.size - 1
    while end:
        start, replicas = came[used, end]
        stages.append(ReplicatedStage(start, end, replicas))
        used, end = used - replicas, start
    return float(best[num_devices][-1]), tuple(reversed(stages))
