"""How long a transfer between two devices takes, by measuring it."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from .._instructions import _transfer
from .._instructions._transfer import Device

# Transfers that wait for each other, as those of micro-batches do, and how often they
# are timed, the first time in vain.
_HOPS, _ROWS = 30, 5
# Large enough for its latency to be no matter, on a host or a fast link.
_BYTES = 1 << 24


class Link(NamedTuple):
    """What a transfer between two devices takes.

    Attributes:
      latency: seconds, whatever its size.
      bandwidth: bytes per second.
    """

    latency: float
    bandwidth: float


def link(one: Device, other: Device) -> Link:
    """Measures transfers between two devices: small ones both ways, a large one."""
    latency = max(_hop(one, other) - _hop(one, one), 0.0)
    (large,) = _transfer.put([np.zeros(_BYTES, np.uint8)], one)
    whole = _shortest(lambda: _transfer.put([large], other))
    seconds = whole - latency if whole > latency else whole
    return Link(latency, _BYTES / seconds)


def _hop(one: Device, other: Device) -> float:
    """Seconds of a small program and the transfer of its result, in a chain of them."""
    add = jax.jit(lambda x: x + 1)

    def back_and_forth() -> Any:
        x = _transfer.put([np.float32(0)], one)
        for i in range(_HOPS):
            x = _transfer.put([add(*x)], (other, one)[i % 2])
        return x

    return _shortest(back_and_forth) / _HOPS


def _shortest(run: Callable[[], Any]) -> float:
    times = []
    for _ in range(_ROWS):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return min(times[1:])
