"""Many stages, many micro-batches, several devices per stage: what grows, and how.

Run it with ``python -m benchmarks.overhead.wide``. Nothing is trained: schedules are on
paper, and steps are lowered to their lists of instructions on devices made of one CPU.
Each size is a process of its own, since memory is asked for once.
"""

import argparse
import json
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.sharding import PartitionSpec as P

import jpipe
from jpipe.schedules import Schedule, one_f_one_b

from ..experiment import mean_square
from ..markdown import table
from ..peers.measure import resident
from ..processes import printed

WIDTH = 8
# How a compiled program calls what its devices exchange.
_KINDS = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute"
# Stages, devices of each, micro-batches.
SIZES = ((8, 1, 128), (8, 8, 128), (64, 1, 128), (64, 8, 128), (64, 8, 1024))


def on_paper(num_ranks: int, num_microbatches: int) -> dict[str, float]:
    """Seconds that a schedule takes to be built, checked, simulated, written, read."""
    found = {}

    def timed(name: str, run: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = run()
        found[name] = time.perf_counter() - start
        return result

    schedule = timed("built", lambda: one_f_one_b(num_ranks, num_microbatches))
    timed("validated", schedule.validate)
    timed("simulated", schedule.simulate)
    text = timed("written", schedule.to_text)
    timed("read", lambda: Schedule.from_text(text))
    return found


def lowered(stages: int, devices: int, microbatches: int) -> dict[str, float]:
    """What it takes to write down a step of tiny stages; nothing is compiled."""
    jax.config.update("jax_num_cpu_devices", stages * devices)
    before = resident("VmHWM")
    pipe = jpipe.pipeline(
        [nn.Dense(WIDTH) for _ in range(stages)],
        microbatches,
        mesh=jax.make_mesh((stages, devices), ("stage", "data")),
    )
    x = jnp.ones((microbatches * devices, WIDTH))
    tx = optax.sgd(0.1)
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    start = time.perf_counter()
    program = pipe.train_step(mean_square, tx)._program(state, x, x)
    return {
        "seconds": time.perf_counter() - start,
        "instructions": len(program.instructions),
        "programs": len(program.executables),
        "MiB": (resident("VmHWM") - before) / 2**20,
    }


def dispatched(stages: int, microbatches: int) -> dict[str, float]:
    """Microseconds of an action: in compiled calls and in moves, and of all of it.

    What is left is the loop. Each is the median over five mini-batches.
    """
    devices = 8
    jax.config.update("jax_num_cpu_devices", devices)
    pipe = jpipe.pipeline(
        [nn.Dense(WIDTH) for _ in range(stages)],
        microbatches,
        devices=[jax.devices()[i % devices] for i in range(stages)],
    )
    x = jnp.ones((microbatches, WIDTH))
    variables = pipe.init(jax.random.key(0), x)
    program = pipe.value_and_grad(mean_square)._program(variables, x, x)
    leaves = jax.tree.leaves((variables, x, x))
    rounds: list[dict[str, float]] = []
    for _ in range(5):
        slots, clock = program.initial_slots(leaves), time.perf_counter
        inside, start = [0.0, 0.0], clock()
        for instruction in program.instructions:
            given = instruction.take(slots)
            before = clock()
            slots[instruction.result_slots] = instruction.run(*given)
            inside[instruction.is_move] += clock() - before
            del given
            for slot in instruction.frees:
                slots[slot] = None
        whole = clock() - start
        jax.block_until_ready([x for x in slots if x is not None])
        rounds.append({"calls": inside[0], "moves": inside[1], "all": whole})
    actions = 2 * stages * microbatches
    return {
        name: statistics.median(each[name] for each in rounds) / actions * 1e6
        for name in rounds[0]
    }


def exchanges(gather: str | None, microbatches: int) -> Counter[tuple[str, str]]:
    """How often a step of two stages on two devices each runs each collective.

    Args:
      gather: of sharded weights; ``None``: they are whole on each device.
      microbatches: of a mini-batch.

    Returns:
      The number by the program that runs it and its name.
    """

    def rule(path: Any, spec: Any) -> P | None:
        return P(None, "data") if gather and spec.ndim == 2 else None

    layers = [nn.Dense(WIDTH), jnp.tanh, nn.Dense(WIDTH), nn.Dense(WIDTH)]
    mesh = jax.make_mesh((2, 2), ("stage", "data"), devices=jax.devices()[:4])
    pipe = jpipe.pipeline(
        layers,
        microbatches,
        balance=[2, 2],
        mesh=mesh,
        sharding=rule,
        gather=gather or "step",
    )
    x, tx = jnp.ones((4 * microbatches, WIDTH)), optax.adam(0.1)
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    program = pipe.train_step(mean_square, tx)._program(state, x, x)
    program.compile()
    found: Counter[tuple[str, str]] = Counter()
    for instruction in program.instructions:
        function, run = instruction.function, instruction.run
        if function is None:
            continue
        ops = re.findall(rf" ({_KINDS})(?:-start)?\(", run.as_text())
        found.update((function.name, op) for op in ops)
    return found


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", help=argparse.SUPPRESS)
    parser.add_argument("--dispatch", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.size:
        return print(json.dumps(lowered(*map(int, options.size.split(",")))))
    if options.dispatch:
        return print(json.dumps(dispatched(*map(int, options.dispatch.split(",")))))
    print(_paper_table())
    print(f"\n{_lowered_table()}")
    print(f"\n{_dispatched_table()}")
    jax.config.update("jax_num_cpu_devices", 4)
    print(f"\n{_exchanges_table()}")


def _paper_table() -> str:
    rows = []
    for ranks, count in ((8, 128), (64, 128), (64, 1024)):
        seconds = [f"{second:.2f} s" for second in on_paper(ranks, count).values()]
        rows.append([f"p = {ranks}, M = {count}", f"{2 * ranks * count:,}", *seconds])
    head = ["1F1B", "actions", "built", "validated", "simulated", "written", "read"]
    return table(head, rows)


def _lowered_table() -> str:
    rows = []
    for stages, devices, count in SIZES:
        row = _printed("--size", stages, devices, count)
        rows.append(
            [
                f"{stages} x {devices}, {count}",
                f"{row['instructions']:,}",
                f"{row['programs']}",
                f"{row['seconds']:.1f} s",
                f"{row['MiB']:.0f} MiB",
            ]
        )
    head = ["stages x devices, M", "instructions", "programs", "lowered in", "memory"]
    return table(head, rows)


def _dispatched_table() -> str:
    rows = []
    for stages, count in ((8, 512), (64, 64), (64, 512)):
        figures = _printed("--dispatch", stages, count).values()
        cells = [f"{figure:.1f} us" for figure in figures]
        rows.append([f"{stages} stages, M = {count}", *cells])
    return table(
        ["an action of tiny stages on 8 devices", "calls", "moves", "all"], rows
    )


def _exchanges_table() -> str:
    names = {None: "whole", "step": "cut, gathered once", "microbatch": "for each use"}
    rows = []
    for gather, name in names.items():
        for count in (4, 8):
            counts = sorted(exchanges(gather, count).items())
            cells = [f"{where}: {number} {op}" for (where, op), number in counts]
            rows.append([name, f"{count}", "; ".join(cells)])
    return table(["weights", "M", "in a step"], rows)


def _printed(option: str, *numbers: int) -> dict[str, float]:
    """One of these in a process of its own."""
    return printed("benchmarks.overhead.wide", [option, ",".join(map(str, numbers))])


if __name__ == "__main__":
    main()
