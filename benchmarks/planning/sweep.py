"""A plan's step, measured against that of every cut and schedule.

Each way to run a model on two devices is measured some steps; then the fastest of them
and the plan are measured again in turns, since the least of many noisy figures is too
small.
"""

import itertools
import math
import statistics
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from rich.progress import Progress

import jpipe

PyTree = Any
MICROBATCHES = 8
SCHEDULES = "gpipe", "1f1b", "zb_h1"
# How many of the fastest meet the plan again, and how often.
BEST, ROUNDS = 3, 15


class Way(NamedTuple):
    """One way to run a model."""

    balance: tuple[int, ...]
    schedule: str


class Result(NamedTuple):
    """What came out for one model.

    Attributes:
      plan: how the plan runs it.
      best: the fastest way of all.
      ways: how many there were.
      ratio: the plan's step by that of the fastest, medians of rounds in turns.
      predicted: of the plan's step, in seconds.
      measured: likewise.
      even: the step of equal numbers of layers under 1F1B, by that of the fastest.
    """

    plan: Way
    best: Way
    ways: int
    ratio: float
    predicted: float
    measured: float
    even: float


def square(y: jax.Array, _: PyTree) -> jax.Array:
    """A loss of any output."""
    return jnp.mean(jnp.square(y))


def ways(num_layers: int) -> Iterator[Way]:
    """Every way: one stage, or two cut anywhere, under each schedule."""
    yield Way((num_layers,), "gpipe")
    for first, name in itertools.product(range(1, num_layers), SCHEDULES):
        yield Way((first, num_layers - first), name)


def planned(layers: list[Any], x: jax.Array, tx: Any) -> tuple[Way, float]:
    """The way of the plan, and what it predicts in seconds."""
    plan = jpipe.plan(
        layers,
        x,
        tx,
        num_devices=2,
        data=1,
        num_microbatches=MICROBATCHES,
        schedules=SCHEDULES,
        remat="min_cut",
        loss=square,
    )
    assert plan.forecast is not None
    name = plan.schedule.name if len(plan.balance) > 1 else "gpipe"
    return Way(tuple(plan.balance), name), plan.forecast.seconds


class Runner:
    """One way, ready to run steps."""

    def __init__(self, layers: list[Any], x: jax.Array, tx: Any, way: Way) -> None:
        pipe = jpipe.pipeline(
            layers, MICROBATCHES, balance=way.balance, schedule=way.schedule
        )
        self._x = x
        self._state = pipe.init_train_state(jax.random.key(0), x, tx)
        self._step = pipe.train_step(square, tx)
        self.seconds()

    def seconds(self) -> float:
        """Runs one step."""
        begin = time.perf_counter()
        self._state, metrics = self._step(self._state, self._x, ())
        jax.block_until_ready((self._state, metrics))
        return time.perf_counter() - begin


def sweep(name: str, layers: list[Any], x: jax.Array, progress: Progress) -> Result:
    """Measures all ways to run a model, and its plan."""
    tx = optax.sgd(1e-3)
    way, predicted = planned(layers, x, tx)
    every = list(ways(len(layers)))
    task = progress.add_task(name, total=len(every))
    found = {}
    for each in every:
        runner = Runner(layers, x, tx, each)
        found[each] = min(runner.seconds() for _ in range(5))
        progress.advance(task)
    fastest = sorted(found, key=lambda each: found[each])[:BEST]
    half = math.ceil(len(layers) / 2)
    even = Way((half, len(layers) - half), "1f1b")
    runners = {
        each: Runner(layers, x, tx, each)
        for each in dict.fromkeys([way, even, *fastest])
    }
    rows = [
        {each: runner.seconds() for each, runner in runners.items()}
        for _ in range(ROUNDS)
    ]
    medians = {each: statistics.median(row[each] for row in rows) for each in runners}
    best = min(fastest, key=lambda each: medians[each])

    def ratio(one: Way) -> float:
        return statistics.median(row[one] / row[best] for row in rows)

    return Result(
        way, best, len(every), ratio(way), predicted, medians[way], ratio(even)
    )
