"""What jpipe costs beside the arithmetic: throughput, Python per action, bytes held.

Run it with ``python -m benchmarks.overhead`` (about ten minutes on two cores). Times
are compared within one run, the two sides interleaved, medians of many.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

jax.config.update("jax_num_cpu_devices", 4)

import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
from flax import linen as nn  # noqa: E402

import jpipe  # noqa: E402
from jpipe import _execute, _memory, _transfer  # noqa: E402
from jpipe._objective import Objective  # noqa: E402

from . import one_stage  # noqa: E402
from .one_stage import Block  # noqa: E402
from .provenance import line, provenance  # noqa: E402

PyTree = Any


def interleaved(sides: dict[str, Callable[[], None]], rounds: int) -> dict[str, list]:
    """Seconds of each side, taken in turns; the first round warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        names = list(sides) if number % 2 else list(sides)[::-1]
        for name in names:
            start = time.perf_counter()
            sides[name]()
            if number:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def dispatch_cost(rounds: int, one_device: bool = False) -> dict[str, float]:
    """Microseconds of a step per action, on four stages of tiny layers, M = 32.

    The bare loop issues the same compiled calls and the same `jax.device_put`, on the
    arrays that the step issued them on, with nothing around them.

    Args:
      rounds: how many times each side is timed.
      one_device: whether all stages are on the first device.

    Returns:
      Microseconds per action of the schedule: of the whole step, of the executor's
      loop, of the bare calls, and the difference of the last two.
    """
    width, number = 8, 32
    layers = [nn.Dense(width) for _ in range(4)]
    devices = jax.devices()[:1] * 4 if one_device else None
    pipe = jpipe.pipeline(layers, number, devices=devices)
    x = jnp.ones((number, width))
    tx = optax.sgd(1e-3)
    state = pipe.init_train_state(jax.random.key(0), x, tx)

    def square(y: jax.Array, t: jax.Array) -> jax.Array:
        return jnp.mean((y - t) ** 2)

    step = pipe.train_step(square, tx)
    variables = pipe.place(state.variables)
    gradient = pipe._library.gradients(Objective(square))(variables, x, x, None, True)
    weights: list[Any] = [
        jax.tree.leaves(entry) for entry in pipe.init(jax.random.key(0), x)
    ]
    program = gradient.program
    box = {"state": state}

    def whole() -> None:
        box["state"], metrics = step(box["state"], x, x)
        jax.block_until_ready((box["state"], metrics))

    def fed() -> Any:
        live = program.feed(weights, [x], [x])
        jax.block_until_ready((live.x, live.extra, live.grads, live.tally))
        return live

    loop, bare = [], []
    for _ in range(rounds + 1):
        live = fed()
        start = time.perf_counter()
        _execute.execute(program.steps, live)
        loop.append(time.perf_counter() - start)
        jax.block_until_ready((live.grads, live.tally))
        bare.append(_bare_loop(program.steps, fed()))
    seconds = interleaved({"whole": whole}, rounds)["whole"]
    actions = 2 * 4 * number
    micro = 1e6 / actions
    loop_us = micro * statistics.median(loop[1:])
    bare_us = micro * statistics.median(bare[1:])
    return {
        "step_us": micro * statistics.median(seconds),
        "loop_us": loop_us,
        "bare_us": bare_us,
        "python_us": micro
        * statistics.median(a - b for a, b in zip(loop[1:], bare[1:], strict=True)),
    }


def _bare_loop(steps: Sequence[_execute.Step], live: _execute.Live) -> float:
    """Seconds in the compiled calls and moves alone, in the order of the steps."""
    seconds = 0.0

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            nonlocal seconds
            start = time.perf_counter()
            result = call(*args)
            seconds += time.perf_counter() - start
            return result

        return run

    wrapped = [
        step._replace(program=timed(step.program), send=timed(step.send))
        for step in steps
    ]
    _execute.execute(wrapped, live)
    jax.block_until_ready((live.grads, live.tally))
    return seconds


def held_bytes() -> list[dict[str, Any]]:
    """Bytes held between F and B per micro-batch, on a stage of one Block.

    Returns:
      For each remat: what the executor held at its peak, divided by the micro-batches
      in flight; the stage's input; the weights of the stage; what `jax.vjp` would
      return through `jax.jit` if nothing were done about it.
    """
    width, number = 128, 4
    layers = [Block(width, 4), Block(width, 4)]
    x = jnp.ones((2 * number, 64, width))
    rows = []
    for remat in ("full", "none"):
        pipe = jpipe.pipeline(layers, number, schedule="gpipe", remat=remat)
        variables = pipe.init(jax.random.key(0), x)

        def loss(y: jax.Array, t: jax.Array) -> jax.Array:
            return jnp.mean((y - t) ** 2)

        gradient = pipe._library.gradients(Objective(loss))(variables, x, x, None, True)
        costs = _memory.costs_of(gradient.program)
        part = x[:2]

        def naive(variables: PyTree, part: jax.Array, layer: nn.Module = layers[0]):
            return jax.vjp(layer.apply, variables, part)[1]

        pullback = jax.jit(naive)(
            _transfer.put_tree(variables[0], jax.devices()[0]), part
        )
        rows.append(
            {
                "remat": remat,
                "held": costs.residual_bytes[0][0],
                "input": part.nbytes,
                "weights": _memory.nbytes(variables[0]),
                "naive_vjp": _memory.nbytes(pullback),
            }
        )
    return rows


def first_gradient(rounds: int) -> dict[str, float]:
    """How a sum of gradients begins: zeros to add to, or a first backward that writes.

    Writing saves the zeros and one reading of them, and needs a second compiled
    backward beside the one that adds.

    Args:
      rounds: how many times each side is timed.

    Returns:
      Seconds to compile each, and milliseconds of eight backwards of one Block.
    """
    layer, number = Block(256, 8), 8
    x = jax.random.normal(jax.random.key(1), (2, 64, 256))
    params = layer.init(jax.random.key(0), x)

    def new(params: PyTree, x: jax.Array) -> PyTree:
        def mean_square(params: PyTree) -> jax.Array:
            y: Any = layer.apply(params, x)
            return jnp.mean(y**2)

        return jax.grad(mean_square)(params)

    def added(params: PyTree, x: jax.Array, sums: PyTree) -> PyTree:
        return jax.tree.map(jnp.add, sums, new(params, x))

    def zeros() -> PyTree:
        return jax.tree.map(jnp.zeros_like, params)

    def compiled(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        start = time.perf_counter()
        program = jax.jit(function, **options).lower(*args).compile()
        return program, time.perf_counter() - start

    write, write_s = compiled(new, params, x)
    add, add_s = compiled(added, params, x, params, donate_argnums=2)
    zero, zero_s = compiled(zeros)

    def run(start: Callable[[], PyTree], count: int) -> Callable[[], None]:
        def once() -> None:
            sums = start()
            for _ in range(count):
                sums = add(params, x, sums)
            jax.block_until_ready(sums)

        return once

    sides = {
        "zeros": run(zero, number),
        "write": run(lambda: write(params, x), number - 1),
    }
    seconds = interleaved(sides, rounds)
    return {
        "zeros_compile_s": add_s + zero_s,
        "write_compile_s": add_s + write_s,
        "zeros_ms": 1e3 * statistics.median(seconds["zeros"]),
        "write_ms": 1e3 * statistics.median(seconds["write"]),
    }


def one_stage_costs(rounds: int, processes: int) -> list[dict[str, Any]]:
    """`one_stage.in_processes` of both models, with each way of malloc."""
    return [
        {"model": model, "keeps": keeps}
        | one_stage.in_processes(model, processes, max(rounds // 2, 1), keeps)
        for keeps in (True, False)
        for model in ("transformer", "cnn")
    ]


def main() -> None:
    """Prints the tables, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=16, help="steps timed per side")
    parser.add_argument("--processes", type=int, default=5, help="of each model")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--part", action="append", choices=list(_TABLES), help="default: all"
    )
    options = parser.parse_args()
    parts = {
        "throughput": lambda: one_stage_costs(options.rounds, options.processes),
        "dispatch": lambda: dispatch_cost(options.rounds),
        "held": held_bytes,
        "first_gradient": lambda: first_gradient(options.rounds),
    }
    result: dict[str, Any] = {"provenance": provenance()}
    for name in options.part or parts:
        result[name] = parts[name]()
    print(json.dumps(result, indent=2) if options.json else tables(result))


def tables(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    made = [make(result[name]) for name, make in _TABLES.items() if name in result]
    return "\n\n".join([line(result["provenance"]), *made])


def _throughput_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| one stage, M = 8 | malloc | jpipe, ms | `lax.scan`, ms | unrolled, ms "
        "| page faults | the scan's | throughput by scan's | least to most "
        "| by unrolled's |",
        "| --- | --- | --: | --: | --: | --: | --: | --: | --: | --: |",
    ]
    for row in rows:
        lines.append(
            f"| {row['model']} | {'keeps' if row['keeps'] else 'default'} | "
            f"{row['jpipe_ms']:.0f} | {row['scan_ms']:.0f} | "
            f"{row['unrolled_ms']:.0f} | {row['jpipe_faults']:,.0f} | "
            f"{row['scan_faults']:,.0f} | **{row['by_scan']:.3f}** | "
            f"{row['by_scan_least']:.3f} to {row['by_scan_most']:.3f} | "
            f"{row['by_unrolled']:.3f} |"
        )
    return "\n".join(lines)


def _dispatch_table(cost: dict[str, float]) -> str:
    lines = [
        "| 4 stages of tiny layers, M = 32 | µs per action |",
        "| --- | --: |",
        f"| the whole step, to the last result | {cost['step_us']:.1f} |",
        f"| the executor's loop | {cost['loop_us']:.1f} |",
        f"| its compiled calls and moves alone | {cost['bare_us']:.1f} |",
        f"| Python beside them | {cost['python_us']:.1f} |",
    ]
    return "\n".join(lines)


def _held_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| remat | held per micro-batch | stage input | weights | plain `jit(vjp)` |",
        "| --- | --: | --: | --: | --: |",
    ]
    for row in rows:
        lines.append(
            f"| {row['remat']} | {row['held']:,} | {row['input']:,} | "
            f"{row['weights']:,} | {row['naive_vjp']:,} |"
        )
    return "\n".join(lines)


def _first_table(first: dict[str, float]) -> str:
    lines = [
        "| first micro-batch | compile, s | eight backwards, ms |",
        "| --- | --: | --: |",
        f"| adds to zeros | {first['zeros_compile_s']:.2f} | {first['zeros_ms']:.1f} |",
        f"| writes | {first['write_compile_s']:.2f} | {first['write_ms']:.1f} |",
    ]
    return "\n".join(lines)


_TABLES: dict[str, Callable[[Any], str]] = {
    "throughput": _throughput_table,
    "dispatch": _dispatch_table,
    "held": _held_table,
    "first_gradient": _first_table,
}


if __name__ == "__main__":
    main()
