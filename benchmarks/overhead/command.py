"""What jpipe costs beside the arithmetic: throughput, Python per action, bytes held.

Run it with ``python -m benchmarks.overhead`` (about an hour on two cores; ``--part``
chooses). Times are compared within one run, the sides interleaved, medians of many.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jpipe

from ..allocator import KEEP_MEMORY, LARGE_PAGES
from ..cells.stages import Calls, gradient_of
from ..experiment import mean_square
from ..markdown import table
from ..models.block import Block
from ..processes import medians, printed
from ..provenance import line, provenance
from . import by_hand, dispatch, first_step, one_stage

PyTree = Any
Figures = dict[str, Any]
_KEEPS = KEEP_MEMORY | LARGE_PAGES


class Part(NamedTuple):
    """One of the measurements.

    Attributes:
      measure: ``(rounds, processes) -> figures``, the steps timed per side and the
        processes of each side.
      shown: the figures as Markdown.
    """

    measure: Callable[[int, int], Any]
    shown: Callable[[Any], str]


def main() -> None:
    """Prints the tables, or JSON."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.overhead", description=__doc__
    )
    parser.add_argument("--rounds", type=int, default=16, help="steps timed per side")
    parser.add_argument("--processes", type=int, default=5, help="of each side")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--part", action="append", choices=list(PARTS), help="default: all"
    )
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 4)
    result: Figures = {"provenance": provenance()}
    for name in options.part or PARTS:
        result[name] = PARTS[name].measure(options.rounds, options.processes)
    if options.json:
        return print(json.dumps(result, indent=2))
    shown = [part.shown(result[name]) for name, part in PARTS.items() if name in result]
    print("\n\n".join([line(result["provenance"]), *shown]))


def one_stage_costs(rounds: int, processes: int) -> list[Figures]:
    """`one_stage.throughput` of every model, by cores and by what malloc keeps."""
    rows = []
    for one_core, variables in ((True, _KEEPS), (False, _KEEPS), (False, {})):
        for model in one_stage.MODELS:
            words = [model, f"{rounds}", *["--one-core"] * one_core]
            row = {"model": model, "one_core": one_core, "keeps": bool(variables)}
            module = "benchmarks.overhead.one_stage"
            rows.append(row | medians(module, words, processes, "by_scan", variables))
    return rows


def _throughput_table(rows: list[Figures]) -> str:
    head = ["one stage, M = 8", "cores", "malloc", "jpipe, ms", "`lax.scan`, ms"]
    head += ["unrolled, ms", "page faults", "the scan's", "cores busy", "the scan's"]
    head += ["throughput by scan's", "least to most", "by unrolled's"]
    cells = [
        [
            row["model"],
            "one" if row["one_core"] else "all",
            "keeps" if row["keeps"] else "default",
            f"{row['jpipe_ms']:.0f}",
            f"{row['scan_ms']:.0f}",
            f"{row['unrolled_ms']:.0f}",
            f"{row['jpipe_faults']:,.0f}",
            f"{row['scan_faults']:,.0f}",
            f"{row['jpipe_busy']:.2f}",
            f"{row['scan_busy']:.2f}",
            f"**{row['by_scan']:.3f}**",
            f"{row['by_scan_least']:.3f} to {row['by_scan_most']:.3f}",
            f"{row['by_unrolled']:.3f}",
        ]
        for row in rows
    ]
    return table(head, cells, left=3)


def calls_costs(rounds: int, processes: int) -> Figures:
    """`one_stage.throughput` of the Transformer against calls written by hand."""
    words = ["transformer", f"{rounds}", "--against", *by_hand.STEPS]
    module = "benchmarks.overhead.one_stage"
    return medians(module, words, processes, "by_scan", _KEEPS)


def _calls_table(cost: Figures) -> str:
    names = {
        "jpipe": "jpipe",
        "scan": "`lax.scan`",
        "unrolled": "the scan, unrolled",
        "calls": "a call per micro-batch, by hand",
        "calls_in_loop": "the same, each in a loop that turns once",
    }
    rows = [
        [
            name,
            f"{cost[f'{key}_ms']:.0f}",
            f"{cost[f'{key}_busy']:.2f}",
            f"{cost[f'by_{key}']:.3f}" if f"by_{key}" in cost else "",
        ]
        for key, name in names.items()
    ]
    head = ["transformer, all cores", "ms", "cores busy", "jpipe's throughput by it"]
    return table(head, rows)


def dispatch_costs(rounds: int, processes: int) -> Figures:
    """`dispatch.dispatch_cost` of four CPU devices."""
    return medians("benchmarks.overhead.dispatch", [f"{rounds}"], processes, "step_us")


def _dispatch_table(cost: dict[str, float]) -> str:
    spread = f"{cost['step_us_least']:.1f} to {cost['step_us_most']:.1f}"
    by_device_put = "the whole step if every move were a `jax.device_put`"
    rows = [
        ["the whole step, to the last result", f"**{cost['step_us']:.1f}**"],
        ["least to most of any process", spread],
        ["the executor's loop", f"{cost['loop_us']:.1f}"],
        ["its compiled calls and moves alone", f"{cost['bare_us']:.1f}"],
        ["Python beside them", f"{cost['python_us']:.1f}"],
        [by_device_put, f"{cost['device_put_step_us']:.1f}"],
    ]
    moves = []
    for name, told in (("devices", "a device to another"), ("meshes", "two to two")):
        for side, by in (("", ""), ("_device_put", ", by `jax.device_put`")):
            figures = [cost[f"{name}_{count}{side}_us"] for count in dispatch.MOVED]
            moves.append([told + by, *(f"{figure:.1f}" for figure in figures)])
    whole = table(["4 stages of tiny layers, M = 32", "µs per action"], rows)
    head = ["a move of tiny arrays, µs", "one", "two", "four"]
    return f"{whole}\n\n{table(head, moves)}"


def held_bytes(*_: int) -> list[Figures]:
    """Bytes held between F and B per micro-batch, on a stage of one Block.

    Returns:
      For each remat: what the executor held at its peak, divided by the micro-batches
      in flight; the stage's input; the weights of the stage; what `jax.vjp` would
      return through `jax.jit` if nothing were done about it.
    """
    width, number = 128, 4
    layers = [Block(width, 4), Block(width, 4)]
    x = jnp.ones((2 * number, 64, width))
    part = x[:2]
    rows = []
    for remat in ("full", "none"):
        pipe = jpipe.pipeline(layers, number, schedule="gpipe", remat=remat)
        params = pipe.init(jax.random.key(0), x)[0]
        spec = jax.eval_shape(lambda: x)
        costs = Calls(gradient_of(pipe, mean_square, spec, spec)).costs

        def naive(params: PyTree, part: jax.Array) -> Any:
            return jax.vjp(layers[0].apply, params, part)[1]

        rows.append(
            {
                "remat": remat,
                "held": costs.residual_bytes[0][0],
                "input": part.nbytes,
                "weights": _nbytes(params),
                "naive_vjp": _nbytes(jax.jit(naive)(params, part)),
            }
        )
    return rows


def _nbytes(tree: PyTree) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def _held_table(rows: list[Figures]) -> str:
    head = ["remat", "held per micro-batch", "stage input", "weights"]
    head.append("plain `jit(vjp)`")
    names = ("held", "input", "weights", "naive_vjp")
    cells = [[row["remat"], *(f"{row[name]:,}" for name in names)] for row in rows]
    return table(head, cells)


def first_step_costs(
    _: int, processes: int, *, from_init: bool = False
) -> list[Figures]:
    """`first_step.first_step` of every model, the sides in turns."""
    sides = list(first_step.SIDES)
    options = list[str]()
    if from_init:
        sides.remove("hand")
        options.append("--from-init")
    rows = []
    for model in first_step.MODELS:
        runs = [
            {
                side: printed("benchmarks.overhead.first_step", [model, side, *options])
                for side in sides
            }
            for _ in range(processes)
        ]
        row: Figures = {"model": model}
        for name in ("cpu_s", "wall_s"):
            row[name] = statistics.median(run["plain"][name] for run in runs)
            for side in sides:
                ratios = [run[side][name] / run["plain"][name] for run in runs]
                row[f"{side}_{name}"] = statistics.median(ratios)
        rows.append(row)
    return rows


def _first_step_table(rows: list[Figures], title: str) -> str:
    sides = [side for side in first_step.SIDES if f"{side}_cpu_s" in rows[0]]
    sides.remove("plain")
    names = ["by hand, 2" if side == "hand" else f"jpipe, {side}" for side in sides]
    head = [f"{title} by plain `jit`'s", "plain, CPU s (clock)"]
    head += [f"{name}: CPU (clock)" for name in names]
    cells = [
        [
            row["model"],
            f"{row['cpu_s']:.1f} ({row['wall_s']:.1f})",
            *(
                f"{row[f'{side}_cpu_s']:.2f} ({row[f'{side}_wall_s']:.2f})"
                for side in sides
            ),
        ]
        for row in rows
    ]
    return table(head, cells)


PARTS = {
    "throughput": Part(one_stage_costs, _throughput_table),
    "calls": Part(calls_costs, _calls_table),
    "dispatch": Part(dispatch_costs, _dispatch_table),
    "held": Part(held_bytes, _held_table),
    "first-step": Part(
        first_step_costs, partial(_first_step_table, title="first step")
    ),
    "from-init": Part(
        partial(first_step_costs, from_init=True),
        partial(_first_step_table, title="variables, an evaluation and a first step"),
    ),
}
