"""Training steps, taken and timed in turns."""

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

import jpipe

PyTree = Any


def train_steps(
    pipe: jpipe.Pipeline,
    loss: Callable[[PyTree, PyTree], jax.Array],
    tx: optax.GradientTransformation,
    x: PyTree,
    targets: PyTree,
) -> Callable[[], jpipe.TrainState]:
    """A function that takes one step of a pipeline on one mini-batch and waits for it.

    Args:
      pipe: the pipeline.
      loss: the loss function.
      tx: the optimizer.
      x: the input of the mini-batch.
      targets: its targets.

    Returns:
      ``() -> state``, the state after the step.
    """
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    step = pipe.train_step(loss, tx)

    def take() -> jpipe.TrainState:
        nonlocal state
        state, metrics = step(state, x, targets)
        jax.block_until_ready((state, metrics))
        return state

    return take


def interleaved(
    sides: Mapping[str, Callable[[], Any]], rounds: int, warm_up: int = 1
) -> dict[str, list[float]]:
    """Seconds of each side, taken in turns, every second round backwards.

    Args:
      sides: functions that wait for what they start.
      rounds: how many count.
      warm_up: rounds before these, in which sides compile.
    """

    def time_call(side: Callable[[], Any]) -> float:
        start = time.perf_counter()
        side()
        return time.perf_counter() - start

    timed = {name: functools.partial(time_call, side) for name, side in sides.items()}
    return take_turns(timed, rounds, warm_up)


def take_turns(
    sides: Mapping[str, Callable[[], float]], rounds: int, warm_up: int = 1
) -> dict[str, list[float]]:
    """The numbers of each side, taken in turns, every second round backwards.

    What slows the machine for a while slows all sides of a round.

    Args:
      sides: functions that return a number.
      rounds: how many count.
      warm_up: rounds before these.
    """
    numbers: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(warm_up + rounds):
        for name in list(sides)[:: 1 if turn % 2 else -1]:
            number = sides[name]()
            if turn >= warm_up:
                numbers[name].append(number)
    return numbers
