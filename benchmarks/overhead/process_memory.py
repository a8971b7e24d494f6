"""What the memory of a process is made of, between steps and in a step.

Run it with ``python -m benchmarks.overhead.process_memory``; it takes about a minute.
The model is the Transformer of ``python -m benchmarks peers``, in two stages under 1F1B
with the default settings, beside one `jax.jit` of the same step. Each row is the memory
that the system says after garbage is collected and freed memory is given back.

malloc keeps one pool of memory for each thread that asks for some, and XLA has many
threads: with ``MALLOC_ARENA_MAX=1`` there is one pool. The difference of both columns
is what lies between blocks that are still in use.
"""

import argparse
import ctypes
import gc
import json
from typing import Any

import jax
import jax.numpy as jnp

from jpipe._instructions._memory import peak_bytes

from ..peers import ours
from ..peers.measure import forget_peak, resident
from ..peers.workload import Case
from ..provenance import line, provenance
from .processes import one_process

ONE_POOL = {"MALLOC_ARENA_MAX": "1"}
SIDES = ("plain", "jpipe")


class Ledger:
    """The memory of this process, noted from time to time, in MiB above the start."""

    def __init__(self) -> None:
        # Starts the runtime and the compiler.
        jax.block_until_ready(jax.jit(jax.grad(jnp.square))(1.0))
        self._start = self._now()
        self.rows: dict[str, float] = {}

    def note(self, name: str) -> None:
        """Notes the memory under a name, after freed memory is given back."""
        self.rows[name] = round(self._now() - self._start, 1)

    def note_peak(self, name: str) -> None:
        """Notes the most memory since `forget_peak`."""
        self.rows[name] = round(resident("VmHWM") / 2**20 - self._start, 1)

    def _now(self) -> float:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        return resident("VmRSS") / 2**20


def measure_plain() -> dict[str, float]:
    """The memory of the step in one `jax.jit`."""
    ledger = Ledger()
    _, step = ours.baseline(Case("transformer", "full", 8, "baseline", "default"))
    ledger.note("parameters, and what made them")
    step()
    step()
    ledger.note("after two steps")
    forget_peak()
    step()
    ledger.note_peak("at the peak of a step")
    jax.clear_caches()
    ledger.note("without the compiled step")
    return ledger.rows


def measure_jpipe() -> dict[str, float]:
    """The memory of the same step as a pipeline."""
    ledger = Ledger()
    training = ours.training(Case("transformer", "full", 8, "1f1b", "default"))
    ledger.note("parameters, and what made them")
    program = training.take.program(training.state, *training.batch)
    ledger.note("traces and the list of instructions")
    program.compile()
    ledger.note("compiled")
    training.step()
    training.step()
    ledger.note("after two steps")
    forget_peak()
    training.step()
    ledger.note_peak("at the peak of a step")
    jax.clear_caches()
    ledger.note("without the caches of JAX")
    arrays = sum(peak_bytes(program)) / 2**20
    temporaries = sum(
        executable.run.memory_analysis().temp_size_in_bytes
        for executable in program.executables
        if "backward" in executable.name
    )
    ledger.rows["arrays at the peak, counted"] = round(arrays, 1)
    ledger.rows["temporaries of both backwards"] = round(temporaries / 2**20, 1)
    return ledger.rows


def table(side: str) -> list[str]:
    """The rows of a side, measured in two processes, as Markdown."""
    words = ["--side", side]
    module = "benchmarks.overhead.process_memory"
    as_it_comes: dict[str, Any] = one_process(module, words)
    one_pool = one_process(module, words, ONE_POOL)
    lines = [
        f"| {side} | MiB | with one pool of malloc |",
        "| --- | --: | --: |",
    ]
    for name, mebibytes in as_it_comes.items():
        lines.append(f"| {name} | {mebibytes:.0f} | {one_pool[name]:.0f} |")
    return [*lines, ""]


def main() -> None:
    """Prints the tables of both sides, or the rows of one as JSON."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.overhead.process_memory", description=__doc__
    )
    parser.add_argument("--side", choices=SIDES, help="in this process, as JSON")
    options = parser.parse_args()
    if options.side == "plain":
        jax.config.update("jax_num_cpu_devices", 1)
        print(json.dumps(measure_plain()))
    elif options.side == "jpipe":
        jax.config.update("jax_num_cpu_devices", 2)
        print(json.dumps(measure_jpipe()))
    else:
        for side in SIDES:
            print("\n".join(table(side)))
        print(line(provenance()))


if __name__ == "__main__":
    main()
