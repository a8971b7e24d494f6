"""`jpipe.replicate`: stages with several devices each, which take turns.

The time from one micro-batch to the next is that of the slowest stage, or of the
slowest transfer. Of the layers before j on d devices the least such time is

    bottleneck[d, j] = min over i, r of max(bottleneck[d - r, i], stage(i, j, r)),

where the last stage has the layers i to j - 1 on r devices and ``stage(i, j, r)`` is
the longest of its computation with the exchange of gradients and of the transfers at
its two ends, each divided by r. For n layers this takes n ** 2 * d ** 2 operations.

References:
  Narayanan et al., `PipeDream <https://doi.org/10.1145/3341301.3359646>`_ (2019).
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..schedules._formats import format_count, format_table
from ._layer_profile import find_count_faults
from ._profile import Profile, check_profile, find_speed_faults
from ._sums import Matrix, sum_stages


@dataclass(frozen=True)
class Replicated:
    """Stages with several devices each, and the time of a micro-batch.

    Prints its stages, and the time beside that of one device and that of stages of one
    device each.

    Attributes:
      balance: the number of layers of each stage.
      replicas: the number of devices of each stage.
      seconds: the time from one micro-batch to the next, in the steady state. As
        PipeDream's planner counts: each replica exchanges gradients after each of its
        micro-batches, and an exchange counts twice; a transfer uses as many links as
        the stage with fewer devices has.
      unreplicated_seconds: the seconds of a micro-batch with one device per stage.
      single_device_seconds: the seconds of a micro-batch on one device.

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
        seconds = self.seconds
        num_devices = sum(self.replicas)
        speedup = self.single_device_seconds / seconds if seconds else 1.0
        lines = [
            f"{seconds:.6g} s a micro-batch on {format_count(num_devices, 'device')}, "
            f"{speedup:.3f} times as fast as one"
        ]
        if max(self.replicas) > 1 and seconds:
            lines.append(
                f"with one device per stage {self.unreplicated_seconds:.6g} s, "
                f"{self.unreplicated_seconds / seconds:.3f} times as long"
            )
        rows = [["stage", "layers", "devices"]]
        sizes = zip(self.balance, self.replicas, strict=True)
        for stage, (num_layers, replicas) in enumerate(sizes):
            rows.append([str(stage), str(num_layers), str(replicas)])
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
      profile: the layers on one micro-batch; from `jpipe.profile`.
      num_devices: the number of devices.
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
    faults = [*profile.faults(), *find_speed_faults(bandwidth, 0.0)]
    faults += find_count_faults("num_devices", num_devices)
    if faults:
        raise ValueError(f"replicate cannot plan this: {'; '.join(faults)}")
    if bandwidth is None:
        bandwidth = math.inf
    seconds, stages = _minimize_bottleneck(
        profile, bandwidth, num_devices=num_devices, max_replicas=num_devices
    )
    unreplicated_seconds, _ = _minimize_bottleneck(
        profile,
        bandwidth,
        num_devices=min(num_devices, len(profile.layers)),
        max_replicas=1,
    )
    balance, replicas = zip(*stages, strict=True)
    return Replicated(
        balance=balance,
        replicas=replicas,
        seconds=seconds,
        unreplicated_seconds=unreplicated_seconds,
        single_device_seconds=sum(x.forward + x.backward for x in profile.layers),
    )


def ring_seconds(
    num_bytes: Any, replicas: int, bandwidth: float, latency: float = 0.0
) -> Any:
    """The time in which a ring of devices adds up gradients of so many bytes."""
    hops = 2 * (replicas - 1)
    return hops * num_bytes / (bandwidth * replicas) + hops * latency


def _minimize_bottleneck(
    profile: Profile, bandwidth: float, *, num_devices: int, max_replicas: int
) -> tuple[float, list[tuple[int, int]]]:
    """Finds the stages with the least time from one micro-batch to the next.

    Args:
      profile: the layers.
      bandwidth: bytes per second between two devices.
      num_devices: the number of devices; all are used.
      max_replicas: the largest number of devices of a stage.

    Returns:
      That time, and for each stage the number of its layers and devices.
    """
    num_ends = len(profile.layers) + 1
    compute_seconds = sum_stages(
        [layer.forward + layer.backward for layer in profile.layers], empty=np.inf
    )
    param_bytes = sum_stages([layer.param_bytes for layer in profile.layers])
    crossing_bytes = _crossing_bytes(profile)

    # number of devices -> the least bottleneck of the layers before each end
    bottleneck = {0: np.full(num_ends, np.inf)}
    bottleneck[0][0] = 0.0
    # (number of devices, end) -> the begin and the devices of the last stage
    last_stage: dict[tuple[int, int], tuple[int, int]] = {}
    for devices in range(1, num_devices + 1):
        bottleneck[devices] = np.full(num_ends, np.inf)
        for replicas in range(1, min(max_replicas, devices) + 1):
            transfers = crossing_bytes / (bandwidth * replicas)
            transfer_seconds = np.maximum(transfers[:, None], transfers[None, :])
            # PipeDream counts the exchange twice.
            exchange_seconds = 2 * ring_seconds(param_bytes, replicas, bandwidth)
            stage_seconds = (compute_seconds + exchange_seconds) / replicas
            bottlenecks: Matrix = np.maximum(  # [begin, end]
                bottleneck[devices - replicas][:, None],
                np.maximum(stage_seconds, transfer_seconds),
            )
            begins = bottlenecks.argmin(axis=0)
            least = bottlenecks[begins, np.arange(num_ends)]
            for end in np.flatnonzero(least < bottleneck[devices]):
                bottleneck[devices][end] = least[end]
                last_stage[devices, int(end)] = int(begins[end]), replicas

    stages: list[tuple[int, int]] = []
    devices = num_devices
    end = num_ends - 1
    while end:
        begin, replicas = last_stage[devices, end]
        stages.append((end - begin, replicas))
        devices -= replicas
        end = begin
    return float(bottleneck[num_devices][-1]), stages[::-1]


def _crossing_bytes(profile: Profile) -> np.ndarray:
    """The bytes that cross a cut before each layer, there and back."""
    crossing_bytes = np.zeros(len(profile.layers) + 1)
    for cut, layer in enumerate(profile.layers[:-1], start=1):
        # (source, name) -> bytes: an array that several later layers read crosses once.
        skip_bytes: dict[tuple[int, str], int] = {}
        for skip in profile.skips:
            is_layer_output = skip.is_output and skip.source == cut - 1
            if skip.source < cut <= skip.target and not is_layer_output:
                key = skip.source, skip.name
                skip_bytes[key] = skip.bytes + skip.cotangent_bytes
        crossing_bytes[cut] = (
            layer.output_bytes + layer.cotangent_bytes + sum(skip_bytes.values())
        )
    return crossing_bytes
