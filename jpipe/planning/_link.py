"""Measures the latency and the bandwidth between two devices.

    latency   = seconds of a hop between two devices - seconds of a hop on one
    bandwidth = bytes of a large array / (seconds of its transfer - latency)

A hop is a small program and the transfer of its result, in a chain of them.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from .._instructions import _transfer
from .._instructions._transfer import Device

# The number of transfers that wait for each other, as those of micro-batches do.
_HOPS = 30
# The number of times that they are timed; the first one is not counted.
_REPEATS = 5
# Large enough for its latency to be no matter, on a host or a fast link.
_BYTES = 1 << 24


class Link(NamedTuple):
    """The speed of transfers between two devices.

    Attributes:
      latency: seconds, whatever its size.
      bandwidth: bytes per second.
    """

    latency: float
    bandwidth: float


def measure_link(source: Device, target: Device) -> Link:
    """Measures transfers between two devices: small ones both ways, a large one."""
    hop_seconds = _hop_seconds(source, target)
    latency = max(hop_seconds - _hop_seconds(source, source), 0.0)
    (large,) = _transfer.put([np.zeros(_BYTES, np.uint8)], source)
    seconds = _shortest_seconds(lambda: _transfer.put([large], target))
    if seconds > latency:
        seconds -= latency
    return Link(latency, _BYTES / seconds)


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
