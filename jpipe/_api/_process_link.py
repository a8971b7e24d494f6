"""The speed of transfers between two processes, measured as a pipeline has them.

A chain of small stages takes longer if each is in another process than the one before
it, by a transfer for each:

    inside     stage 0 -> stage 1 -> stage 2      all on the first device
    between    stage 0 => stage 1 => stage 2      on both devices in turns

    transfer  = (between - inside) / number of transfers
    latency   = transfer of a few bytes
    bandwidth = bytes / (transfer of many - latency)

Its first and last stage are on the first device: the clock of its process sees all.
"""

import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from .._instructions._transfer import Device
from ..planning._layer_profile import MeasuredLink
from ..schedules import Schedule
from ._transform import pipeline

# An even number of transfers: the chain ends where it begins.
_NUM_TRANSFERS = 10
_REPEATS = 7
_FEW_BYTES = 4
_MANY_BYTES = 1 << 22


def measure_process_link(source: Device, target: Device) -> MeasuredLink | None:
    """Measures transfers between devices of two processes; all processes call this.

    Returns:
      The link, in the process of ``source``; ``None`` in the others.
    """
    latency = _transfer_seconds(source, target, _FEW_BYTES)
    seconds = _transfer_seconds(source, target, _MANY_BYTES) - latency
    if jax.process_index() != source.process_index:
        return None
    latency = max(latency, 0.0)
    bandwidth = _MANY_BYTES / seconds if seconds > 0 else float("inf")
    return MeasuredLink(latency, bandwidth, str(source), str(target))


def _transfer_seconds(source: Device, target: Device, num_bytes: int) -> float:
    """The seconds of a transfer; of no meaning but in the process of ``source``."""
    x = jnp.zeros((1, num_bytes // 4), jnp.float32)
    cells = [f"{stage}F0" for stage in range(_NUM_TRANSFERS + 1)]
    between = _chain_seconds(x, [cells[::2], cells[1::2]], [source, target])
    inside = 0.0
    if jax.process_index() == source.process_index:
        inside = _chain_seconds(x, [cells], [source])
    return (between - inside) / _NUM_TRANSFERS


def _chain_seconds(
    x: jax.Array, rows: Sequence[Sequence[str]], devices: Sequence[Device]
) -> float:
    """The seconds of a chain of stages, the shortest of a few.

    Args:
      x: its input.
      rows: the cells of its schedule, for each rank.
      devices: the device of each rank.
    """
    num_stages = sum(map(len, rows))
    pipe = pipeline(
        [lambda x: x + 1] * num_stages,
        1,
        balance=[1] * num_stages,
        schedule=Schedule.from_text("\n".join(map(" ".join, rows))),
        devices=devices,
    )
    variables = pipe.init(jax.random.key(0), x)
    seconds: list[float] = []
    for _ in range(_REPEATS + 1):
        begin = time.perf_counter()
        jax.block_until_ready(pipe.apply(variables, x))
        seconds.append(time.perf_counter() - begin)
    return min(seconds[1:])  # the first one compiles
