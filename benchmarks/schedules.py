"""What the simulator predicts of each schedule, and what a step takes.

Run it with ``python -m benchmarks.schedules``. Two ranks, one core each: the blocks of
a Transformer, as many micro-batches as asked for. In every round each schedule is
profiled once, its costs are read off the profile, the simulator predicts the step from
them, and an ordinary step is timed. Medians over the rounds.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

# One thread per device, so that two ranks are two cores and nothing else competes.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"
)

import jax

jax.config.update("jax_num_cpu_devices", 2)

import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402

import jpipe  # noqa: E402

from .allocator import KEEP_MEMORY  # noqa: E402
from .models.block import Block  # noqa: E402
from .provenance import line, provenance  # noqa: E402

RANKS, BLOCKS, WIDTH, TIME = 2, 8, 128, 64


class Side:
    """One schedule, ready to be timed.

    Args:
      name: of the schedule.
      microbatches: the number of micro-batches, four sequences each.
      remat: what the stages keep.
    """

    def __init__(self, name: str, microbatches: int, remat: str) -> None:
        build = jpipe.schedules.BY_NAME[name]
        stages = build(RANKS, microbatches).num_stages
        self.pipe = jpipe.pipeline(
            [Block(WIDTH, 4) for _ in range(BLOCKS)],
            microbatches,
            balance=[BLOCKS // stages] * stages,
            schedule=build,
            remat=remat,
        )
        self.x = jax.random.normal(
            jax.random.key(1), (4 * microbatches, TIME, WIDTH), jnp.float32
        )
        tx = optax.identity()
        self.state = self.pipe.init_train_state(jax.random.key(0), self.x, tx)
        self.gradient = self.pipe.value_and_grad(square)
        self.measured: list[float] = []
        self.predicted: list[float] = []

    def once(self) -> None:
        """One round: a profile, a prediction, a step."""
        profile = self.pipe.profile_step(self.state, (self.x, self.x), square)
        self.predicted.append(self.pipe.schedule.simulate(profile.costs).makespan)
        variables = self.state.variables
        start = time.perf_counter()
        jax.block_until_ready(self.gradient(variables, self.x, self.x))
        self.measured.append(time.perf_counter() - start)


def square(y: jax.Array, t: jax.Array) -> jax.Array:
    """A mean over examples."""
    return jnp.mean((y - t) ** 2)


def main() -> None:
    """Prints a table for each way to rematerialize."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.schedules", description=__doc__
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--microbatches", type=int, default=8)
    options = parser.parse_args()
    if not KEEP_MEMORY.items() <= os.environ.items():
        # Read when a process starts: so start again.
        command = [sys.executable, "-m", "benchmarks.schedules", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | KEEP_MEMORY)
    print(line(provenance()))
    for remat in ("none", "full"):
        print("\n" + table(remat, options.microbatches, options.rounds))


def table(remat: str, microbatches: int, rounds: int) -> str:
    """Measured and predicted milliseconds of all that train, as Markdown."""
    names = [name for name in jpipe.schedules.BY_NAME if name != "forward_only"]
    sides = {name: Side(name, microbatches, remat) for name in names}
    for number in range(rounds + 1):
        for side in sides.values():
            side.once()
            if not number:  # compiled and warmed up
                side.measured.clear()
                side.predicted.clear()
    lines = [
        f'| remat "{remat}" | stages | measured, ms | predicted, ms | error | bubble |',
        "| --- | --: | --: | --: | --: | --: |",
    ]
    errors = []
    median: Callable[[Any], float] = statistics.median
    for name, side in sides.items():
        measured, predicted = median(side.measured), median(side.predicted)
        errors.append(predicted / measured - 1)
        bubble = side.pipe.schedule.simulate(jpipe.schedules.Costs()).bubble_fraction
        lines.append(
            f"| {name} | {side.pipe.num_stages} | {1e3 * measured:.1f} | "
            f"{1e3 * predicted:.1f} | {errors[-1]:+.1%} | {bubble:.1%} |"
        )
    worst = max(errors, key=abs)
    lines.append(f"\nLargest error of a prediction: {worst:+.1%}.")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
