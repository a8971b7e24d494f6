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

import jax

from jpipe._instructions._memory import peak_bytes

from ..markdown import table
from ..peers import ours
from ..peers.measure import forget_peak, resident
from ..peers.workload import Case
from ..processes import printed
from ..provenance import line, provenance

ONE_POOL = {"MALLOC_ARENA_MAX": "1"}
# name of a side -> its schedule in the comparison with peers
SIDES = {"plain": "baseline", "jpipe": "1f1b"}


class Ledger:
    """The memory of this process, noted from time to time, in MiB above the start."""

    def __init__(self) -> None:
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


def measure_plain(case: Case) -> dict[str, float]:
    """The memory of the step in one `jax.jit`."""
    ledger = Ledger()
    step = ours.baseline(case).step
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


def measure_jpipe(case: Case) -> dict[str, float]:
    """The memory of the same step as a pipeline."""
    ledger = Ledger()
    take, state = ours.train_step(case)
    batch = case.data()
    ledger.note("parameters, and what made them")
    program = take._program(state, *batch)
    ledger.note("traces and the list of instructions")
    program.compile()
    ledger.note("compiled")
    for _ in range(2):
        state, metrics = take(state, *batch)
        jax.block_until_ready((state, metrics))
    ledger.note("after two steps")
    forget_peak()
    state, metrics = take(state, *batch)
    jax.block_until_ready((state, metrics))
    ledger.note_peak("at the peak of a step")
    jax.clear_caches()
    ledger.note("without the caches of JAX")
    temporaries = sum(
        executable.run.memory_analysis().temp_size_in_bytes
        for executable in program.executables
        if "backward" in executable.name
    )
    ledger.rows["arrays at the peak, counted"] = sum(peak_bytes(program)) / 2**20
    ledger.rows["temporaries of both backwards"] = temporaries / 2**20
    return ledger.rows


def table_of(side: str) -> str:
    """The rows of a side, measured in two processes."""
    words = ["--side", side]
    module = "benchmarks.overhead.process_memory"
    as_it_comes = printed(module, words)
    one_pool = printed(module, words, ONE_POOL)
    rows = [
        [name, f"{mebibytes:.0f}", f"{one_pool[name]:.0f}"]
        for name, mebibytes in as_it_comes.items()
    ]
    head = [f"{side}, MiB above the start", "as it comes", "with one pool of malloc"]
    return table(head, rows)


def main() -> None:
    """Prints the tables of both sides, or the rows of one as JSON."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.overhead.process_memory", description=__doc__
    )
    parser.add_argument("--side", choices=SIDES, help="in this process, as JSON")
    options = parser.parse_args()
    if options.side is None:
        for side in SIDES:
            print(table_of(side), end="\n\n")
        print(line(provenance()))
        return
    case = Case("transformer", "full", 8, SIDES[options.side], "default")
    ours.warm_up(case)
    measure = {"plain": measure_plain, "jpipe": measure_jpipe}[options.side]
    print(json.dumps(measure(case)))


if __name__ == "__main__":
    main()
