"""What Python costs per action, on layers so small that there is nothing else.

Run it with ``python -m benchmarks.overhead.dispatch``; the command of this folder runs
it in several processes, since processes differ by more than what is measured.
"""

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.sharding import PartitionSpec as P

import jpipe
from jpipe import _compat
from jpipe._instructions import _transfer
from jpipe._instructions._program import Program
from jpipe._instructions._sharding import Sharding, StageMesh

from ..experiment import mean_square
from ..steps import interleaved, train_steps

WIDTH, STAGES, NUMBER = 8, 4, 32
# How many arrays a move has, and how many moves are timed at once.
MOVED, MOVES = (1, 2, 4), 200
ACTIONS = 2 * STAGES * NUMBER


def dispatch_cost(rounds: int, one_device: bool = False) -> dict[str, float]:
    """Microseconds of a step per action, on four stages of tiny layers, M = 32.

    The bare loop issues the same compiled calls and the same moves, on the arrays that
    the step issued them on, with nothing around them.

    Args:
      rounds: how many times each side is timed.
      one_device: whether all stages are on the first device.

    Returns:
      Microseconds per action of the schedule: of the whole step, of the executor's
      loop, of the bare calls and moves, of the difference of these two; and of the
      whole step if every move were a `jax.device_put`. And `move_costs`.
    """
    pipe = _pipe(one_device)
    x = jnp.ones((NUMBER, WIDTH))
    sides = {
        "step": train_steps(pipe, mean_square, optax.sgd(1e-3), x, x),
        "device_put": _step_by_device_put(x, one_device),
    }
    seconds = interleaved(sides, rounds)
    loop, bare = _loops(pipe, x, rounds)

    def micro(values: Sequence[float]) -> float:
        return 1e6 / ACTIONS * statistics.median(values)

    return {
        "step_us": micro(seconds["step"]),
        "loop_us": micro(loop),
        "bare_us": micro(bare),
        "python_us": micro([a - b for a, b in zip(loop, bare, strict=True)]),
        "device_put_step_us": micro(seconds["device_put"]),
        **move_costs(rounds),
    }


def move_costs(rounds: int) -> dict[str, float]:
    """Microseconds of a move of one, two and four arrays of eight numbers.

    Args:
      rounds: how many times each side is timed.

    Returns:
      By what moves where, ``"devices_1_us"`` for one, as an executor's loop moves it
      and, ``"devices_1_device_put_us"``, as `jax.device_put` does; ``"meshes"`` are of
      two devices each.
    """
    devices = jax.devices()[:STAGES]
    pairs = {"devices": devices[:2]}
    if len(devices) == STAGES:
        halves = np.array(devices).reshape(2, -1)
        pairs["meshes"] = [StageMesh.of(half, ["data"]) for half in halves]
    found = {}
    for name, (source, target) in pairs.items() if len(devices) > 1 else ():
        for count in MOVED:
            sides = _moves(source, target, count)
            for side, seconds in interleaved(sides, rounds).items():
                micro = 1e6 / MOVES * statistics.median(seconds)
                found[f"{name}_{count}{side}_us"] = micro
    return found


def _moves(source: Any, target: Any, count: int) -> dict[str, Callable[[], None]]:
    """Many moves of so many arrays by the loop and by `jax.device_put`."""
    how = (Sharding(spec=P("data")),) * count
    arrays = _transfer.put([np.ones(WIDTH)] * count, source, how)

    def side() -> Callable[[], None]:
        send = _transfer.make_sender(
            source=source,
            target=target,
            has_keys=False,
            shardings=how,
            source_shardings=how,
        )

        def run() -> None:
            made: Any = ()
            with _compat.explicit_transfers():
                for _ in range(MOVES):
                    made = send(*arrays)
            jax.block_until_ready(made)

        return run

    with mock.patch.object(_compat, "copier", return_value=None):
        device_put = side()
    return {"": side(), "_device_put": device_put}


def _pipe(one_device: bool) -> jpipe.Pipeline:
    devices = jax.devices()[:1] * STAGES if one_device else None
    layers = [nn.Dense(WIDTH) for _ in range(STAGES)]
    return jpipe.pipeline(layers, NUMBER, devices=devices)


def _step_by_device_put(x: jax.Array, one_device: bool) -> Callable[[], Any]:
    """A step as in a JAX without what jpipe's transfers use."""
    step = train_steps(_pipe(one_device), mean_square, optax.sgd(1e-3), x, x)
    with mock.patch.object(_compat, "copier", return_value=None):
        step()
    return step


def _loops(
    pipe: jpipe.Pipeline, x: jax.Array, rounds: int
) -> tuple[list[float], list[float]]:
    """Seconds of the executor's loop, and of its calls and moves alone."""
    variables = pipe.init(jax.random.key(0), x)
    program = pipe.value_and_grad(mean_square)._program(variables, x, x)
    leaves = jax.tree.leaves((variables, x, x))
    loop, bare = [], []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        results = program(leaves)
        loop.append(time.perf_counter() - start)
        jax.block_until_ready(results)
        bare.append(_bare(program, leaves))
    return loop[1:], bare[1:]


def _bare(program: Program, leaves: Sequence[Any]) -> float:
    """Seconds in the compiled calls and moves alone, in their order."""
    seconds = 0.0

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*leaves: Any) -> Any:
            nonlocal seconds
            start = time.perf_counter()
            result = call(*leaves)
            seconds += time.perf_counter() - start
            return result

        return run

    timed_instructions = [
        dataclasses.replace(instruction, run=timed(instruction.run))
        for instruction in program.local_instructions
    ]
    with mock.patch.object(program, "local_instructions", timed_instructions):
        jax.block_until_ready(program(leaves))
    return seconds


def main() -> None:
    """Prints `dispatch_cost` as JSON; on CPUs it is of four devices."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.overhead.dispatch", description=__doc__
    )
    parser.add_argument("rounds", type=int, nargs="?", default=16)
    parser.add_argument(
        "--one-device", action="store_true", help="all stages on the first device"
    )
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", STAGES)
    print(json.dumps(dispatch_cost(options.rounds, options.one_device)))


if __name__ == "__main__":
    main()
