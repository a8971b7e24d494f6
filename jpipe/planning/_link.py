"""Measures the latency and the bandwidth between two devices.

    latency   = seconds of a hop between two devices - seconds of a hop on one
    bandwidth = bytes of a large array / (seconds of its transfer - latency)

A hop is a small program and the transfer of its result, in a chain of them.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from .._instructions import _transfer
from .._instructions._transfer import Device
from ._layer_profile import MeasuredLink

# The number of transfers that wait for each other, as those of micro-batches do.
_HOPS = 30
# The number of times that they are timed; the first one is not counted.
_REPEATS = 5
# Large enough for its latency to be no matter, on a host or a fast link.
_BYTES = 1 << 24


def measure_neighbor_link(device: Device) -> MeasuredLink | None:
    """Measures transfers to another device of this process; ``None`` if it has none."""
    devices = jax.local_devices(backend=device.platform)
    neighbor = next((other for other in devices if other != device), None)
    return None if neighbor is None else measure_link(device, neighbor)


def measure_link(source: Device, target: Device) -> MeasuredLink:
    """Measures transfers between two devices: small ones both ways, a large one."""
    hop_seconds = _hop_seconds(source, target)
    latency = max(hop_seconds - _hop_seconds(source, source), 0.0)
    (large,) = _transfer.put([np.zeros(_BYTES, np.uint8)], source)
    seconds = _shortest_seconds(lambda: _transfer.put([large], target))
    if seconds > latency:
        seconds -= latency
    return MeasuredLink(latency, _BYTES / seconds, str(source), str(target))


def _hop_seconds(source: Device, target: Device) -> float:
    """The seconds of a hop to and fro between two devices, or on one."""
    add = jax.jit(lambda x: x + 1)

    def run_hops() -> Any:
        x = _transfer.put([np.float32(0)], source)
        for i in range(_HOPS):
            device = source if i % 2 else target
            x = _transfer.put([add(*x)], device)
        return x

    return _shortest_seconds(run_hops) / _HOPS


def _shortest_seconds(run: Callable[[], Any]) -> float:
    times: list[float] = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return min(times[1:])
