"""What the simulator predicts of each schedule, and what a step takes.

Run it with ``python -m benchmarks.schedules``. Two ranks, one core each: the blocks of
a Transformer, as many micro-batches as asked for. In every round each schedule is
profiled once, its costs are read off the profile, the simulator predicts the step from
them, and an ordinary step is timed. Medians over the rounds.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import optax

import jpipe

from . import markdown
from .allocator import KEEP_MEMORY
from .experiment import mean_square
from .models.block import Block
from .processes import restart_with, xla_flags
from .provenance import line, provenance

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
        self.gradient = self.pipe.value_and_grad(mean_square)
        self.measured: list[float] = []
        self.predicted: list[float] = []

    def once(self) -> None:
        """One round: a profile, a prediction, a step."""
        variables = self.state.variables
        profile = self.gradient.profile(variables, self.x, self.x)
        self.predicted.append(self.pipe.schedule.simulate(profile.costs).makespan)
        start = time.perf_counter()
        jax.block_until_ready(self.gradient(variables, self.x, self.x))
        self.measured.append(time.perf_counter() - start)


def main() -> None:
    """Prints a table for each way to rematerialize."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.schedules", description=__doc__
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--microbatches", type=int, default=8)
    options = parser.parse_args()
    # One thread per device, so that two ranks are two cores and nothing else competes.
    flags = xla_flags("--xla_cpu_multi_thread_eigen=false")
    restart_with(KEEP_MEMORY | flags, "benchmarks.schedules")
    jax.config.update("jax_num_cpu_devices", RANKS)
    print(line(provenance()))
    for remat in ("none", "full"):
        print("\n" + table(remat, options.microbatches, options.rounds))


def table(remat: str, microbatches: int, rounds: int) -> str:
    """Measured and predicted milliseconds of all that train, as Markdown."""
    names = [name for name in jpipe.schedules.BY_NAME if name != "forward_only"]
    sides = {name: Side(name, microbatches, remat) for name in names}
    for _ in range(1 + rounds):
        for side in sides.values():
            side.once()
    rows = []
    errors = []
    for name, side in sides.items():
        # The first round compiles and warms up.
        measured = statistics.median(side.measured[1:])
        predicted = statistics.median(side.predicted[1:])
        bubble = side.pipe.schedule.simulate(jpipe.schedules.Costs()).bubble_fraction
        errors.append(predicted / measured - 1)
        rows.append(
            [
                name,
                f"{side.pipe.num_stages}",
                f"{1e3 * measured:.1f}",
                f"{1e3 * predicted:.1f}",
                f"{errors[-1]:+.1%}",
                f"{bubble:.1%}",
            ]
        )
    head = [f'remat "{remat}"', "stages", "measured, ms", "predicted, ms", "error"]
    head.append("bubble")
    worst = max(errors, key=abs)
    told = f"Largest error of a prediction: {worst:+.1%}."
    return f"{markdown.table(head, rows)}\n\n{told}"


if __name__ == "__main__":
    main()
