"""Stages with several devices each: how many stages, of which layers, on how many."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..schedules import Costs
from ..schedules._simulate import TOO_LONG
from ._net import Net, ReplicatedStage
from ._profile import Profile, speed_faults
from ._replicated import STEADY, STEP, Replicated, costs_of
from ._shortest import Shortest


def replicate(
    profile: Profile,
    num_devices: int,
    *,
    bandwidth: float | None = None,
    num_microbatches: int | None = None,
    straight: bool = False,
    objective: str = STEADY,
    transfers: bool = True,
) -> Replicated:
    """Cuts layers into stages and gives each a number of devices.

    As PipeDream's planner does: a stage that takes three times as long as others gets
    three devices, which take turns. What comes out is a plan, to be printed, drawn and
    simulated; ``jpipe.pipeline(layers, M, plan=plan)`` runs one of the steady state.

    Args:
      profile: of the layers, on one micro-batch; from `jpipe.profile`.
      num_devices: how many there are.
      bandwidth: bytes per second between two of them; ``None``: nothing takes time.
      num_microbatches: of one step; ``"step"`` needs it.
      straight: whether each stage has one device.
      objective: ``"steady"``: the time from one micro-batch to the next, replicas
        taking turns; gradients are exchanged for each and add to the time of a stage,
        and all devices are used. ``"step"``: the time of a synchronous step, replicas
        sharing each micro-batch: ``num_microbatches - 1`` times the slowest stage, all
        stages and transfers one after another, and what of the exchange of gradients
        is not hidden behind earlier stages that still compute.
      transfers: whether the transfers between stages take time.

    Returns:
      The stages with the least time; no others are better. Printed, it says why;
      `jpipe.draw.svg` draws it, with the timeline that its ``simulate`` returns.

    Raises:
      ValueError: with every fault of the arguments.

    Example:
      >>> from jpipe.planning._profile import LayerProfile
      >>> layers = LayerProfile("a", 1.0, 3.0), LayerProfile("b", 1.0, 1.0)
      >>> print(replicate(Profile(layers), 3, bandwidth=None))
      2 s a micro-batch on 3 devices, 3.000 times as fast as one
      with one device per stage 4 s, 2.000 times as long
      stage 0 holds it up, 0 s of it exchange of gradients
      a step of 8 micro-batches, simulated: 20 s, 0 s of it exchange
      stage  layers  devices  computes  exchange  transfers
          0  0 to 0        2       2 s       0 s
          1  1 to 1        1       2 s       0 s        0 s

    References:
      Narayanan et al., `PipeDream <https://doi.org/10.1145/3341301.3359646>`_ (2019);
      Fan et al., `DAPPLE <https://arxiv.org/abs/2007.01045>`_ (2021).
    """
    faults = _profile_faults(profile)
    faults += speed_faults(bandwidth, 0.0)
    faults += _unfit(num_devices, num_microbatches, objective)
    count = 0 if faults else len(profile.layers)
    if not faults and straight and objective == STEADY and num_devices > count:
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

    def best(devices: int, most: int) -> tuple[float, tuple[ReplicatedStage, ...]]:
        if objective == STEADY:
            return _steady(net, devices, most)
        return Shortest(net, devices, most, num_microbatches or 1).best()

    single, stages = best(min(num_devices, count), 1)
    if not straight:
        _, stages = best(num_devices, num_devices)
    costs = _costs(profile, net, stages)
    own = stages, costs, num_devices, objective, single, num_microbatches
    return Replicated(*own, one_each=straight)


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


def _profile_faults(profile: Any) -> list[str]:
    if not isinstance(profile, Profile):
        kind = type(profile).__name__
        return [f"profile is a {kind}; needs what jpipe.profile returns"]
    return profile.faults()


def _unfit(num_devices: Any, num_microbatches: Any, objective: str) -> Iterator[str]:
    counts = {"num_devices": num_devices, "num_microbatches": num_microbatches}
    if num_microbatches is None:
        del counts["num_microbatches"]
        if objective == STEP:
            yield "objective='step' needs num_microbatches="
    for name, number in counts.items():
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            yield f"{name}={number!r}; needs an int of at least 1"
    if objective not in (STEADY, STEP):
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
