"""What Python costs per action in one process and in two, on layers that are tiny.

Run it with ``python -m benchmarks.overhead.several``. Timed is the loop that has a
process's part of the list run, with no wait in it: calls, moves to its own devices, and
what it sends to the other process and asks of it. Where two processes share two cores,
their loops also wait for cores: the loop's own processor time leaves that out.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
from flax import linen as nn

import jpipe
from jpipe._arguments._objective import Objective

from .dispatch import NUMBER, STAGES, WIDTH, square

_WORD = "--one-of-several"


def loop_cost(rounds: int) -> dict[str, float]:
    """Microseconds of the loop of this process per action of its own.

    Args:
      rounds: how many steps are timed.
    """
    layers = [nn.Dense(WIDTH) for _ in range(STAGES)]
    pipe = jpipe.pipeline(layers, NUMBER, schedule="1f1b")
    x = jnp.ones((NUMBER, WIDTH))
    variables = pipe.init(jax.random.key(0), x)
    specialize = pipe._build_loss(Objective(square), None)
    gradient = specialize(variables, x, x, None, train=True)
    program, leaves = gradient.program, gradient.check_arguments(variables, (x, x))
    seconds, busy = [], []
    for _ in range(rounds + 1):
        start = time.perf_counter(), time.thread_time()
        results = program(leaves)
        seconds.append(time.perf_counter() - start[0])
        busy.append(time.thread_time() - start[1])
        jax.block_until_ready(results)
    own = 2 * NUMBER * STAGES / jax.process_count()
    return {
        "seconds": 1e6 * statistics.median(seconds[1:]) / own,
        "processor": 1e6 * statistics.median(busy[1:]) / own,
    }


def measured(processes: int, rounds: int) -> list[dict[str, float]]:
    """`loop_cost` of each of some fresh processes.

    Args:
      processes: how many; the four stages are shared out to them.
      rounds: how many steps each times.
    """
    command = [sys.executable, "-m", "jpipe", "launch", "--processes", str(processes)]
    command += ["-m", __spec__.name, _WORD, str(STAGES // processes)]
    command += [str(rounds)]
    lines = subprocess.check_output(command, text=True).splitlines()
    found = [line.partition("] ")[2] for line in lines]
    return [json.loads(line) for line in found if line.startswith("{")]


def one_of_several(devices: str, rounds: str) -> None:
    """Prints `loop_cost` of this process as JSON."""
    jax.config.update("jax_num_cpu_devices", int(devices))
    jpipe.distributed()
    print(json.dumps(loop_cost(int(rounds))))


def main() -> None:
    """Measures one process and two in turns; prints the medians."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.overhead.several", description=__doc__
    )
    parser.add_argument("rounds", type=int, nargs="?", default=48)
    parser.add_argument("--processes", type=int, default=5, help="fresh ones, of each")
    options = parser.parse_args()
    found: dict[int, list[dict[str, float]]] = {1: [], 2: []}
    for _ in range(options.processes):
        for count, rows in found.items():
            rows += measured(count, options.rounds)
    for name in ("seconds", "processor"):
        one, two = (
            statistics.median(row[name] for row in rows) for rows in found.values()
        )
        print(f"{name:10} {one:5.1f} us alone, {two:5.1f} us of two: {two / one:.2f}")


if __name__ == "__main__":
    if _WORD in sys.argv:
        one_of_several(*sys.argv[2:])
    else:
        main()
