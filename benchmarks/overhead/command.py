"""What jpipe costs beside the arithmetic: throughput, Python per action, bytes held.

Run it with ``python -m benchmarks.overhead`` (about an hour on two cores; ``--part``
chooses). Times are compared within one run, the sides interleaved, medians of many.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

import jpipe

from .. import allocator
from ..cells.stages import Calls, gradient_of
from ..models.block import Block
from ..provenance import line, provenance
from . import by_hand, dispatch, first_step, one_stage
from .dispatch import square
from .processes import medians, one_process

PyTree = Any


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
        spec = jax.eval_shape(lambda: x)
        costs = Calls(gradient_of(pipe, square, spec, spec)).costs
        part = x[:2]

        def naive(variables: PyTree, part: jax.Array, layer: nn.Module = layers[0]):
            return jax.vjp(layer.apply, variables, part)[1]

        pullback = jax.jit(naive)(variables[0], part)
        rows.append(
            {
                "remat": remat,
                "held": costs.residual_bytes[0][0],
                "input": part.nbytes,
                "weights": _nbytes(variables[0]),
                "naive_vjp": _nbytes(pullback),
            }
        )
    return rows


def _nbytes(tree: PyTree) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def one_stage_costs(rounds: int, processes: int) -> list[dict[str, Any]]:
    """`one_stage.throughput` of every model, by cores and by what malloc keeps."""
    kept = allocator.KEEP_MEMORY | allocator.LARGE_PAGES
    return [
        {"model": model, "one_core": one_core, "keeps": bool(variables)}
        | medians(
            "benchmarks.overhead.one_stage",
            [model, f"{rounds}", *["--one-core"] * one_core],
            processes,
            "by_scan",
            variables,
        )
        for one_core, variables in ((True, kept), (False, kept), (False, {}))
        for model in one_stage.MODELS
    ]


def calls_costs(rounds: int, processes: int) -> dict[str, Any]:
    """`one_stage.throughput` of the Transformer against calls written by hand."""
    return medians(
        "benchmarks.overhead.one_stage",
        ["transformer", f"{rounds}", "--against", *by_hand.STEPS],
        processes,
        "by_scan",
        allocator.KEEP_MEMORY | allocator.LARGE_PAGES,
    )


def dispatch_costs(rounds: int, processes: int) -> dict[str, Any]:
    """`dispatch.dispatch_cost` of four CPU devices."""
    return medians("benchmarks.overhead.dispatch", [f"{rounds}"], processes, "step_us")


def first_step_costs(processes: int) -> list[dict[str, Any]]:
    """`first_step.first_step` of every model, the sides in turns."""
    rows = []
    for model in first_step.MODELS:
        runs = [
            {
                side: one_process("benchmarks.overhead.first_step", [model, side])
                for side in first_step.SIDES
            }
            for _ in range(processes)
        ]
        row: dict[str, Any] = {"model": model}
        for name in ("cpu_s", "wall_s"):
            row[name] = statistics.median(run["plain"][name] for run in runs)
            for side in first_step.SIDES:
                by = (run[side][name] / run["plain"][name] for run in runs)
                row[f"{side}_{name}"] = statistics.median(by)
        rows.append(row)
    return rows


def main() -> None:
    """Prints the tables, or JSON."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.overhead", description=__doc__
    )
    parser.add_argument("--rounds", type=int, default=16, help="steps timed per side")
    parser.add_argument("--processes", type=int, default=5, help="of each side")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--part", action="append", choices=list(_TABLES), help="default: all"
    )
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 4)
    parts = {
        "throughput": lambda: one_stage_costs(options.rounds, options.processes),
        "calls": lambda: calls_costs(options.rounds, options.processes),
        "dispatch": lambda: dispatch_costs(options.rounds, options.processes),
        "held": held_bytes,
        "first-step": lambda: first_step_costs(options.processes),
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
        "| one stage, M = 8 | cores | malloc | jpipe, ms | `lax.scan`, ms "
        "| unrolled, ms "
        "| page faults | the scan's | cores busy | the scan's "
        "| throughput by scan's | least to most | by unrolled's |",
        f"| --- | --- | --- |{' --: |' * 10}",
    ]
    for row in rows:
        lines.append(
            f"| {row['model']} | {'one' if row['one_core'] else 'all'} | "
            f"{'keeps' if row['keeps'] else 'default'} | "
            f"{row['jpipe_ms']:.0f} | {row['scan_ms']:.0f} | "
            f"{row['unrolled_ms']:.0f} | {row['jpipe_faults']:,.0f} | "
            f"{row['scan_faults']:,.0f} | {row['jpipe_busy']:.2f} | "
            f"{row['scan_busy']:.2f} | **{row['by_scan']:.3f}** | "
            f"{row['by_scan_least']:.3f} to {row['by_scan_most']:.3f} | "
            f"{row['by_unrolled']:.3f} |"
        )
    return "\n".join(lines)


def _calls_table(cost: dict[str, Any]) -> str:
    names = {
        "jpipe": "jpipe",
        "scan": "`lax.scan`",
        "unrolled": "the scan, unrolled",
        "calls": "a call per micro-batch, by hand",
        "calls_in_loop": "the same, each in a loop that turns once",
    }
    lines = [
        "| transformer, all cores | ms | cores busy | jpipe's throughput by it |",
        "| --- | --: | --: | --: |",
    ]
    for key, name in names.items():
        by = f"{cost[f'by_{key}']:.3f}" if f"by_{key}" in cost else ""
        lines.append(
            f"| {name} | {cost[f'{key}_ms']:.0f} | {cost[f'{key}_busy']:.2f} | {by} |"
        )
    return "\n".join(lines)


def _dispatch_table(cost: dict[str, float]) -> str:
    lines = [
        "| 4 stages of tiny layers, M = 32 | µs per action |",
        "| --- | --: |",
        f"| the whole step, to the last result | **{cost['step_us']:.1f}** |",
        f"| least to most of any process | {cost['step_us_least']:.1f} to "
        f"{cost['step_us_most']:.1f} |",
        f"| the executor's loop | {cost['loop_us']:.1f} |",
        f"| its compiled calls and moves alone | {cost['bare_us']:.1f} |",
        f"| Python beside them | {cost['python_us']:.1f} |",
        f"| the whole step if every move were a `jax.device_put` | "
        f"{cost['device_put_step_us']:.1f} |",
        "",
        "| a move of tiny arrays, µs | one | two | four |",
        "| --- | --: | --: | --: |",
    ]
    for name, told in (("devices", "a device to another"), ("meshes", "two to two")):
        for side, by in (("", ""), ("_device_put", ", by `jax.device_put`")):
            figures = (cost[f"{name}_{count}{side}_us"] for count in dispatch.MOVED)
            listed = " | ".join(f"{figure:.1f}" for figure in figures)
            lines.append(f"| {told}{by} | {listed} |")
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


def _first_step_table(rows: list[dict[str, Any]]) -> str:
    pipelined = list(first_step.SIDES)[1:]
    names = ["by hand, 2", *(f"jpipe, {side}" for side in pipelined[1:])]
    heads = [f"{name}: CPU (clock)" for name in names]
    lines = [
        f"| first step by plain `jit`'s | plain, CPU s (clock) | {' | '.join(heads)} |",
        f"| --- |{' --: |' * (1 + len(heads))}",
    ]
    for row in rows:
        cells = [
            f"{row[f'{side}_cpu_s']:.2f} ({row[f'{side}_wall_s']:.2f})"
            for side in pipelined
        ]
        plain = f"{row['cpu_s']:.1f} ({row['wall_s']:.1f})"
        lines.append(f"| {row['model']} | {plain} | {' | '.join(cells)} |")
    return "\n".join(lines)


_TABLES: dict[str, Callable[[Any], str]] = {
    "throughput": _throughput_table,
    "calls": _calls_table,
    "dispatch": _dispatch_table,
    "held": _held_table,
    "first-step": _first_step_table,
}
