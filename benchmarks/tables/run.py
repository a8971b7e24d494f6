"""Rows of a table, run one after the other; each is kept as soon as it is there.

measured.rows    rows that were compiled for the devices there are   }  (name, job)
foretold.rows    rows that are compiled or predicted                 }
|
job() -> cells  ->  JSON, Markdown and picture of a result
"""

import gc
from collections.abc import Sequence
from pathlib import Path

import jax

from ..provenance import provenance
from ..published import BY_NAME, Benchmark
from ..result import GIB, Cell, Result
from . import foretold, measured
from .options import Options
from .plot import plot
from .report import whole


def run(benchmark: Benchmark, names: Sequence[str], options: Options) -> list[str]:
    """Runs rows of a table; saves each as it comes, and prints the table.

    Args:
      benchmark: the table.
      names: of its rows.
      options: how.

    Returns:
      The rows that failed, with the reason.
    """
    source = measured if options.measured else foretold
    # Read once: a result that is saved may be part of what is checked out.
    where = provenance() | {"options": options.described}
    failed = []
    result = None
    try:
        took, jobs = source.rows(benchmark, names, options)
    except Exception as error:
        return [f"{benchmark.name}: {', '.join(names)}: {advice(error)}"]
    if took:
        print(f"{benchmark.name}: {took}", flush=True)
        where["options"]["took"] = took
    for name, fill_cells in jobs:
        gc.collect()  # the arrays of the row before
        try:
            cells = fill_cells()
        except Exception as error:  # the others may still run
            failed.append(f"{benchmark.name}: {name}: {advice(error)}")
            print(f"  {name}: {error!r}"[:400], flush=True)
            continue
        row = Result(
            benchmark.name, options.scale, {name: where}, {name: cells}, options.variant
        )
        result, path = row.keep(options.folder)
        render(result, path)
        print(f"  {name}: {_figures(cells)}", flush=True)
    if result is not None:
        print(whole(benchmark, result))
    return failed


def render(result: Result, path: Path) -> None:
    """Writes the Markdown and the picture of a result beside its JSON."""
    benchmark = BY_NAME[result.benchmark]
    picture = path.with_suffix(".png")
    plot(benchmark, result, picture)
    path.with_suffix(".md").write_text(whole(benchmark, result, picture))


def advice(error: Exception) -> str:
    """An error; of too little memory what there was and what to type."""
    if "RESOURCE_EXHAUSTED" not in str(error):
        return repr(error)
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    size = f" of {limit / GIB:.0f} GiB" if limit else ""
    return (
        f"RESOURCE_EXHAUSTED: it needs more than this device{size} has. If programs "
        "were compiled just now, type the same again: XLA's search takes more memory "
        "than steps, and what it compiled is kept. Else add --dtype bfloat16, or "
        "--schedule 1f1b --remat full, or --predict, or choose smaller rows by "
        "--experiment"
    )


def _figures(cells: dict[str, Cell]) -> str:
    figures = []
    for column, cell in cells.items():
        unit = "" if cell.unit == column else cell.unit
        figures.append(f"{column} {cell.value:,.5g} {unit}".rstrip())
    return ", ".join(figures)
