"""Stages with several devices each: how many stages, of which layers, on how many."""

import math

import numpy as np

from ..schedules import Costs
from ..schedules._simulate import TOO_LONG
from ._net import Net, ReplicatedStage
from ._profile import Profile, speed_faults
from ._replicated import Replicated, costs_of


def replicate(
    profile: Profile,
    num_devices: int,
    *,
    bandwidth: float | None = None,
    num_microbatches: int | None = None,
    straight: bool = False,
    transfers: bool = True,
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
      num_microbatches: of one step, which the plan then says.
      straight: whether each stage has one device.
      transfers: whether the transfers between stages take time.

    Returns:
      The stages with the least time; no others are better. Printed, it says why;
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
      slowest: stage 0, 0 s of it exchange of gradients
      stage  layers  devices  computes  exchange  transfers
          0  0 to 0        2       2 s       0 s
          1  1 to 1        1       2 s       0 s        0 s

    References:
      Narayanan et al., `PipeDream <https://doi.org/10.1145/3341301.3359646>`_ (2019).
    """
    faults = [*profile.faults(), *speed_faults(bandwidth, 0.0)]
    count = len(profile.layers)
    if num_devices < 1:
        faults.append(f"num_devices={num_devices}; needs an int of at least 1")
    elif straight and num_devices > count:
        faults.append(
            f"num_devices={num_devices} is more than the {count} layers; straight=True "
            f"needs one for each"
        )
    if faults:
        raise ValueError(f"replicate cannot plan this: {'; '.join(faults)}")
    with np.errstate(over="ignore", invalid="ignore"):
        net = Net(profile, bandwidth or math.inf, transfers)
        moved = (net.sent / net.bandwidth).sum() + net.exchange(num_devices)[0, -1]
        if not math.isfinite((net.total + 4 * moved) * (num_microbatches or 1)):
            raise ValueError(f"replicate cannot plan this: {TOO_LONG}")
    single, stages = _steady(net, min(num_devices, count), 1)
    if not straight:
        _, stages = _steady(net, num_devices, num_devices)
    return Replicated(stages, _costs(profile, net, stages), single, num_microbatches)


def _costs(profile: Profile, net: Net, stages: tuple[ReplicatedStage, ...]) -> Costs:
    """What each stage takes on one device."""
    own = [profile.layers[start:end] for start, end, _ in stages]
    return costs_of(
        forward=tuple(float(sum(x.forward for x in layers)) for layers in own),
        backward=tuple(float(sum(x.backward for x in layers)) for layers in own),
        boundary_bytes=tuple(net.there.item(start) for start, _, _ in stages),
        cotangent_bytes=tuple(net.back.item(start) for start, _, _ in stages),
        bandwidth=net.bandwidth,
        exchange=tuple(net.exchange(r).item(start, end) for start, end, r in stages),
    )


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
