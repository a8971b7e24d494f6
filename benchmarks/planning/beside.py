"""What a device of the machine is worth while another one works, by model.

The gradient of a whole model is timed on one device, and then on two at once: a plan
predicts the former, since layers are profiled alone. Run it with
``python -m benchmarks.planning --beside``.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

import jpipe

from .sweep import MICROBATCHES, square

ROUNDS = 40


def alone_by_beside(layers: list[Any], x: jax.Array) -> float:
    """The seconds of a micro-batch alone by those of two side by side, in turns."""
    x = x[: len(x) // MICROBATCHES]
    one, other = (_gradient(layers, x, device) for device in jax.devices()[:2])
    ratios = [_seconds(one) / _seconds(lambda: (one(), other())) for _ in range(ROUNDS)]
    return statistics.median(ratios)


def _gradient(layers: list[Any], x: jax.Array, device: Any) -> Callable[[], Any]:
    pipe = jpipe.pipeline(layers, 1, balance=[len(layers)], devices=[device])
    variables = pipe.init(jax.random.key(0), x)
    find = pipe.value_and_grad(square, has_state=True)
    jax.block_until_ready(find(variables, x, ()))
    return lambda: find(variables, x, ())


def _seconds(run: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - begin
