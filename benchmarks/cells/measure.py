"""Cells that are measured: training steps on devices that are there."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

import jpipe

from ..experiment import Setting, random_key
from .compiled import Way


class Measurement(NamedTuple):
    """Training steps, timed.

    Attributes:
      compile_s: seconds of the first step, most of them compilation.
      seconds: of each step after it.
      examples: of a mini-batch.
    """

    compile_s: float
    seconds: tuple[float, ...]
    examples: int

    @property
    def throughput(self) -> float:
        """Examples per second, of the median step."""
        return self.examples / statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles of the throughput."""
        rates = sorted(self.examples / s for s in self.seconds)
        low, _, high = statistics.quantiles(rates, n=4, method="inclusive")
        return (high - low) / 2


def measure(
    setting: Setting,
    way: Way,
    devices: Sequence[Any],
    steps: int,
    tick: Callable[[], None] = lambda: None,
) -> Measurement:
    """Trains on random numbers, all devices waited for after each step.

    Args:
      setting: the model, its data and how it is cut.
      way: schedule and remat.
      devices: one for each stage.
      steps: how many are timed, at least two; one more comes before them.
      tick: called after each step.

    Returns:
      The times.
    """
    work = setting.work
    pipe = jpipe.pipeline(
        work.layers,
        setting.microbatches,
        balance=setting.balance,
        devices=list(devices)[: len(setting.balance)],
        schedule=way.schedule,
        remat=way.remat,
    )
    x, targets = work.arrays(setting.batch)
    x = jax.device_put(x, pipe.devices[0])
    targets = jax.device_put(targets, pipe.devices[-1])
    state: Any = pipe.init_train_state(random_key(), x, work.tx)
    step = pipe.train_step(work.loss, work.tx)
    seconds = []
    for _ in range(steps + 1):
        jax.block_until_ready((state, x, targets))
        start = time.perf_counter()
        state, metrics = step(state, x, targets)
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - start)
        tick()
    return Measurement(seconds[0], tuple(seconds[1:]), setting.batch)
