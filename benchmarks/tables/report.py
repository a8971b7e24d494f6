"""A result as a Markdown table: the published columns, ours beside them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jpipe

from .. import markdown, provenance
from ..experiment import Experiment
from ..published import Benchmark
from ..result import DTYPES, PREDICTED, Result
from .kinds import KINDS, Column, sharing_columns
from .view import EMPTY, View

LEGEND = (
    "Without a mark: measured. ᶜ compiled: bytes of the executables and of the "
    "simulated schedule; nothing ran. ᵖ predicted: the programs of the stages (of "
    "AmoebaNet and the Transformers: of the layers) were timed one after the other on "
    "one device, the rest is the simulator's."
)
_SHARING = (
    "**What partitioning costs on one device.** These rows have more stages than there "
    "were devices, so neighbouring stages share one: their throughput is not that of a "
    "device for each stage, and its ratio to the baseline's is no speed-up."
)


def whole(benchmark: Benchmark, result: Result, picture: Path | None = None) -> str:
    """A table with its title and what has to be known to read it.

    Args:
      benchmark: the published table.
      result: our cells.
      picture: the file of the picture that is shown below, if it is there.
    """
    lines = [f"### {benchmark.title}", "", table(benchmark, result), LEGEND]
    if benchmark.note:
        lines += ["", benchmark.note]
    if picture is not None and picture.exists():
        lines += ["", f"![{benchmark.name}]({picture.name})"]
    return "\n".join(lines) + "\n"


def table(benchmark: Benchmark, result: Result) -> str:
    """The command that makes a result, the table, and where the figures were made."""
    view = View(benchmark, result)
    parts = [f"`{_command(benchmark, result)}`"]
    if view.rows:
        parts.append(_grid(KINDS[benchmark.kind].columns, view.rows, view))
    if view.sharing:
        columns = sharing_columns(benchmark.rows[0].name)
        parts += [_SHARING, _grid(columns, view.sharing, view)]
    return "\n\n".join([*parts, *_where(benchmark, result)]) + "\n"


def _grid(columns: Sequence[Column], rows: Sequence[Experiment], view: View) -> str:
    """A Markdown table without the columns in which every row is empty."""
    filled = [[title, *(text(view, row) for row in rows)] for title, text in columns]
    filled = [column for column in filled if set(column[1:]) != {EMPTY}]
    head, *body = zip(*filled, strict=True)
    return markdown.table(head, body)


def _command(benchmark: Benchmark, result: Result) -> str:
    """The command that makes the rows of a table."""
    words = ["python -m benchmarks run", benchmark.name, *_options_of(result.variant)]
    is_default = not result.variant and result.scale == "full"
    if not result.variant or result.scale != "full":
        words += ["--scale", result.scale]
    names = benchmark.row_names(result.scale, bool(result.variant))
    ran = [name for name in names if name in result.rows]
    if 0 < len(ran) < len(names) and not is_default:
        words += [f"--experiment {name}" for name in ran]
    return " ".join(words)


def _options_of(variant: str) -> list[str]:
    """The options of `run` that make a variant.

    Example:
      >>> _options_of("measured-bfloat16-1f1b-min_cut")
      ['--measured', '--dtype bfloat16', '--schedule 1f1b', '--remat min_cut']
    """
    options = []
    for word in filter(None, variant.split("-")):
        if word in ("measured", "predict"):
            options.append(f"--{word}")
        elif word in DTYPES:
            options.append(f"--dtype {word}")
        elif word in jpipe.schedules.BY_NAME:
            options.append(f"--schedule {word}")
        else:
            options.append(f"--remat {word}")
    return options


def _where(benchmark: Benchmark, result: Result) -> list[str]:
    """The machine, versions and date that the rows were made with."""
    groups: dict[str, list[str]] = {}
    for name, where in result.provenance.items():
        line = provenance.line(where)
        took = (where.get("options") or {}).get("took")
        if result.variant and took:
            line += f"; {took}"
        if any(cell.kind == PREDICTED for cell in result.rows[name].values()):
            line += _source_of_predictions(benchmark.row(name), where)
        groups.setdefault(line, []).append(name)
    paragraphs = []
    if result.scale != "full":
        smaller = KINDS[benchmark.kind].smaller
        paragraphs.append(f"Ours at {result.scale} scale: {smaller}")
    if len(groups) == 1:
        return [*paragraphs, f"Made with {next(iter(groups))}."]
    for line, names in groups.items():
        paragraphs.append(f"{', '.join(names)}: made with {line}.")
    return paragraphs


def _source_of_predictions(row: Experiment, where: dict[str, Any]) -> str:
    _, _, device = where["devices"].partition(" ")
    options = where.get("options") or {}
    bandwidth = row.bandwidth or options.get("bandwidth")
    source = f"; predicted from stage times of one {device}, "
    source += f"transfers at {bandwidth} GB/s"
    if options.get("examples"):
        source += f", micro-batches timed with {options['examples']} examples"
    return source
