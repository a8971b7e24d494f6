"""Stages with several devices each: how many stages, of which layers, on how many."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..schedules._formats import format_count, format_table
from ._layer_profile import count_faults
from ._profile import Profile, check_profile, speed_faults
from ._sums import Matrix, sums


@dataclass(frozen=True)
class Replicated:
    """Stages with several devices each, and what they would take.

    Prints its stages, what one device would take, and what stages of one device each
    would.

    Attributes:
      balance: the number of layers of each stage.
      replicas: the number of devices of each stage.
      seconds: from one micro-batch to the next, in the steady state. As PipeDream's
        planner counts: each replica exchanges gradients after each of its
        micro-batches, and an exchange counts twice; a transfer uses as many links as
        the stage with fewer devices has.
      unreplicated_seconds: what ``seconds`` would be with one device per stage.
      single_device_seconds: what it would be on one device.

    Example:
      >>> import jpipe
      >>> from jpipe.planning._profile import LayerProfile, Profile
      >>> plan = jpipe.replicate(Profile((LayerProfile("a", 1.0, 2.0),)), 3)
      >>> plan.replicas, plan.seconds
      ((3,), 1.0)
    """

    balance: tuple[int, ...]
    replicas: tuple[int, ...]
    seconds: float
    unreplicated_seconds: float
    single_device_seconds: float

    def __str__(self) -> str:
        used, seconds = sum(self.replicas), self.seconds
        faster = self.single_device_seconds / seconds if seconds else 1.0
        lines = [
            f"{seconds:.6g} s a micro-batch on {format_count(used, 'device')}, "
            f"{faster:.3f} times as fast as one"
        ]
        if max(self.replicas) > 1 and seconds:
            lines.append(
                f"with one device per stage {self.unreplicated_seconds:.6g} s, "
                f"{self.unreplicated_seconds / seconds:.3f} times as long"
            )
        rows = [["stage", "layers", "devices"]]
        pairs = zip(self.balance, self.replicas, strict=True)
        rows += [[str(i), *map(str, own)] for i, own in enumerate(pairs)]
        return "\n".join([*lines, format_table(rows, left=())])


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
      The stages with the least time; no others are better. They are printed, and run by
      ``jpipe.pipeline(layers, M, balance=plan.balance, replicas=plan.replicas)``.

    Raises:
      ValueError: with every fault of the arguments.
      TypeError: if the profile is none.

    Example:
      >>> from jpipe.planning._profile import LayerProfile
      >>> layers = LayerProfile("a", 1.0, 3.0), LayerProfile("b", 1.0, 1.0)
      >>> print(replicate(Profile(layers), 3, bandwidth=None))
      2 s a micro-batch on 3 devices, 3.000 times as fast as one
      with one device per stage 4 s, 2.000 times as long
      stage  layers  devices
          0       1        2
          1       1        1

    References:
      Narayanan et al., `PipeDream <https://doi.org/10.1145/3341301.3359646>`_ (2019).
    """
    check_profile("replicate", profile)
    faults = [*profile.faults(), *speed_faults(bandwidth, 0.0)]
    if faults := [*faults, *count_faults("num_devices", num_devices)]:
        raise ValueError(f"replicate cannot plan this: {'; '.join(faults)}")
    speed = bandwidth or math.inf
    seconds, stages = _best(profile, speed, num_devices, num_devices)
    most_stages = min(num_devices, len(profile.layers))
    unreplicated_seconds, _ = _best(profile, speed, most_stages, 1)
    balance, replicas = zip(*stages, strict=True)
    return Replicated(
        balance=balance,
        replicas=replicas,
        seconds=seconds,
        unreplicated_seconds=unreplicated_seconds,
        single_device_seconds=sum(x.forward + x.backward for x in profile.layers),
    )


def ring(num_bytes: Any, replicas: int, bandwidth: float, latency: float = 0.0) -> Any:
    """The time in which a ring of devices adds up gradients of so many bytes."""
    hops = 2 * (replicas - 1)
    return hops * num_bytes / (bandwidth * replicas) + hops * latency


def _best(
    profile: Profile, bandwidth: float, num_devices: int, most: int
) -> tuple[float, list[tuple[int, int]]]:
    """The stages whose slowest, or slowest transfer, takes least per micro-batch.

    Args:
      profile: of the layers.
      bandwidth: bytes per second.
      num_devices: how many there are; all are used.
      most: how many a stage may have.

    Returns:
      That time, and of each stage how many layers and devices it has.
    """
    size = len(profile.layers) + 1
    times = sums([x.forward + x.backward for x in profile.layers], np.inf)
    params = sums([x.param_bytes for x in profile.layers])
    sent = _crossing(profile)
    best = {0: np.full(size, np.inf)}
    best[0][0] = 0.0
    came: dict[tuple[int, int], tuple[int, int]] = {}
    for used in range(1, num_devices + 1):
        best[used] = np.full(size, np.inf)
        for replicas in range(1, min(most, used) + 1):
            moved = sent / (bandwidth * replicas)
            ends = np.maximum(moved[:, None], moved[None, :])
            seconds = (times + 2 * ring(params, replicas, bandwidth)) / replicas
            before = best[used - replicas][:, None]
            each: Matrix = np.maximum(before, np.maximum(seconds, ends))
            starts = each.argmin(axis=0)
            values = each[starts, np.arange(size)]
            for end in np.flatnonzero(values < best[used]):
                best[used][end] = values[end]
                came[used, int(end)] = int(starts[end]), replicas
    stages, used, end = [], num_devices, size - 1
    while end:
        start, replicas = came[used, end]
        stages.append((end - start, replicas))
        used, end = used - replicas, start
    return float(best[num_devices][-1]), stages[::-1]


def _crossing(profile: Profile) -> np.ndarray:
    """The bytes that cross a cut before each layer, there and back."""
    sent = np.zeros(len(profile.layers) + 1)
    for cut, layer in enumerate(profile.layers[:-1], start=1):
        skips = {
            (skip.source, skip.name): skip.bytes + skip.cotangent_bytes
            for skip in profile.skips
            if skip.source < cut <= skip.target
            and not (skip.is_output and skip.source == cut - 1)
        }
        sent[cut] = layer.output_bytes + layer.cotangent_bytes + sum(skips.values())
    return sent
