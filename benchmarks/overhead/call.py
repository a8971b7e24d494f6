"""What one call of a compiled function is made of, on one device.

Run it with ``python -m benchmarks.overhead.call``; it takes a minute. An action of a
schedule is one call, so what a call costs is what many micro-batches cost. Each
question is a pair of programs, or a row of them, that differ in one thing alone:

    arguments   how many arrays are given, of which one is read
    reads       how many arrays are given and read: one by one, or packed into one
    outputs     how many arrays are returned
    donation    whether the arrays that are returned reuse those that are given
    kernels     how many operations one program runs, one after the other
    stages      two programs called in turn, or one program that does both
    callers     the same program by `jax.jit`, and by the executable compiled ahead

Two times are told of each: until the call returns, which is what Python waits, and, per
call, until the device is done with all of them, which is what the device waits.
"""

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..provenance import provenance

WIDTH = 128
ARGUMENTS = (1, 4, 16, 64, 256)
OUTPUTS = (1, 4, 16, 64)
DONATED = 16
KERNELS = (1, 4, 16, 64)

Arrays = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to call a program: what is timed.

    Attributes:
      name: the question and the answer to it, such as ``"arguments 16"``.
      call: takes the arrays, returns those of the next call.
      arrays: of the first call.
    """

    name: str
    call: Callable[[Arrays], Arrays]
    arrays: Arrays


def variants() -> list[Variant]:
    """All ways to call, each compiled and called once."""
    rows = [
        *_arguments(),
        *_reads(),
        *_outputs(),
        *_executables(),
        *_kernels(),
        *_stages(),
        *_callers(),
    ]
    for row in rows:
        # The arrays of a program that donates them are used up by its first call.
        copies = tuple(jnp.copy(array) for array in row.arrays)
        jax.block_until_ready(row.call(copies))
    return rows


def measure(rows: Sequence[Variant], calls: int, rounds: int) -> dict[str, Any]:
    """Microseconds of a call of each variant.

    Args:
      rows: the variants, timed in turns.
      calls: how many calls are issued at once.
      rounds: how many times; the median of them is told.

    Returns:
      For each name ``"returned_us"``, until a call returns, and ``"done_us"``, until
      the device is done, both divided by the number of calls.
    """
    returned: dict[str, list[float]] = {row.name: [] for row in rows}
    done: dict[str, list[float]] = {row.name: [] for row in rows}
    for round_number in range(rounds + 1):
        for row in rows:
            arrays = tuple(jnp.copy(array) for array in row.arrays)
            jax.block_until_ready(arrays)
            start = time.perf_counter()
            for _ in range(calls):
                arrays = row.call(arrays)
            issued = time.perf_counter()
            jax.block_until_ready(arrays)
            end = time.perf_counter()
            if round_number == 0:
                continue
            returned[row.name].append((issued - start) / calls)
            done[row.name].append((end - start) / calls)
    return {
        row.name: {
            "returned_us": 1e6 * statistics.median(returned[row.name]),
            "done_us": 1e6 * statistics.median(done[row.name]),
        }
        for row in rows
    }


def _vectors(count: int) -> Arrays:
    return tuple(jnp.full(WIDTH, 1.0 + index) for index in range(count))


def _arguments() -> list[Variant]:
    """Arrays that are given and not read, beside the one that is."""

    def add_one(x: jax.Array, *unread: jax.Array) -> jax.Array:
        return x + 1

    rows = []
    for count in ARGUMENTS:
        program = jax.jit(add_one, keep_unused=True)
        unread = _vectors(count - 1)
        rows.append(
            Variant(
                name=f"arguments {count}",
                call=lambda arrays, program=program, unread=unread: (
                    program(*arrays, *unread),
                ),
                arrays=_vectors(1),
            )
        )
    return rows


def _reads() -> list[Variant]:
    """A stage's parameters, one by one and in one buffer; each of them is added."""

    def add_leaves(x: jax.Array, *leaves: jax.Array) -> jax.Array:
        for leaf in leaves:
            x = x + leaf
        return x

    def add_packed(x: jax.Array, packed: jax.Array) -> jax.Array:
        for leaf in jnp.split(packed, packed.size // WIDTH):
            x = x + leaf
        return x

    rows = []
    for count in ARGUMENTS:
        leaves = _vectors(count)
        for name, function, parameters in (
            ("one by one", add_leaves, leaves),
            ("packed", add_packed, (jnp.concatenate(leaves),)),
        ):
            program = jax.jit(function)
            rows.append(
                Variant(
                    name=f"reads {count} {name}",
                    call=lambda arrays, program=program, parameters=parameters: (
                        program(*arrays, *parameters),
                    ),
                    arrays=_vectors(1),
                )
            )
    return rows


def _outputs() -> list[Variant]:
    """One array is given, many are returned, the first of them is given again."""
    rows = []
    for count in OUTPUTS:

        def spread(x: jax.Array, count: int = count) -> Arrays:
            return tuple(x + index for index in range(1, count + 1))

        program = jax.jit(spread)
        rows.append(
            Variant(
                name=f"outputs {count}",
                call=lambda arrays, program=program: program(arrays[0]),
                arrays=_vectors(1),
            )
        )
    return rows


def _executables() -> list[Variant]:
    """Sums of gradients: as many arrays come back as go in."""

    def add_one(*arrays: jax.Array) -> Arrays:
        return tuple(array + 1 for array in arrays)

    kept = jax.jit(add_one)
    donated = jax.jit(add_one, donate_argnums=range(DONATED))
    return [
        Variant(
            name=f"donation {DONATED} {name}",
            call=lambda arrays, program=program: program(*arrays),
            arrays=_vectors(DONATED),
        )
        for name, program in (("kept", kept), ("donated", donated))
    ]


def _kernels() -> list[Variant]:
    """Products, one after the other: none of them becomes a part of another."""
    weights = jnp.eye(WIDTH)
    rows = []
    for count in KERNELS:

        def multiply(x: jax.Array, w: jax.Array, count: int = count) -> jax.Array:
            for _ in range(count):
                x = x @ w
            return x

        program = jax.jit(multiply)
        rows.append(
            Variant(
                name=f"kernels {count}",
                call=lambda arrays, program=program: (program(*arrays, weights),),
                arrays=(jnp.ones((WIDTH, WIDTH)),),
            )
        )
    return rows


def _stages() -> list[Variant]:
    """Two stages of one device: two calls, or one."""
    weights = jnp.eye(WIDTH)

    def stage(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w)

    def both(x: jax.Array, w: jax.Array) -> jax.Array:
        return stage(stage(x, w), w)

    one = jax.jit(stage)
    two = jax.jit(both)
    arrays = (jnp.ones((WIDTH, WIDTH)),)
    return [
        Variant(
            name="stages two calls",
            call=lambda arrays: (one(one(*arrays, weights), weights),),
            arrays=arrays,
        ),
        Variant(
            name="stages one call",
            call=lambda arrays: (two(*arrays, weights),),
            arrays=arrays,
        ),
    ]


def _callers() -> list[Variant]:
    """The same executable, found by `jax.jit` in its cache or called as it is."""

    def add_one(x: jax.Array) -> jax.Array:
        return x + 1

    program = jax.jit(add_one)
    arrays = _vectors(1)
    compiled = program.lower(*arrays).compile()
    return [
        Variant(
            name="callers jit",
            call=lambda arrays: (program(*arrays),),
            arrays=arrays,
        ),
        Variant(
            name="callers compiled",
            call=lambda arrays: (compiled(*arrays),),
            arrays=arrays,
        ),
    ]


def main() -> None:
    """Prints the microseconds of each variant as JSON."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.overhead.call", description=__doc__
    )
    parser.add_argument("--calls", type=int, default=500, help="issued at once")
    parser.add_argument("--rounds", type=int, default=9, help="medians of so many")
    options = parser.parse_args()
    begin = time.perf_counter()
    rows = measure(variants(), calls=options.calls, rounds=options.rounds)
    seconds = time.perf_counter() - begin
    result = {"provenance": provenance(), "calls": rows, "seconds": seconds}
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
