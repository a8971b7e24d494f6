"""A result as a Markdown table: the published columns, ours beside them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jpipe

from .. import provenance
from ..experiment import Experiment
from ..published import Benchmark
from ..result import DTYPES, PREDICTED, Cell, Result
from .rows import row_names

_EMPTY = "-"
# How a cell is marked: measured ones are not.
_MARKS = {"measured": "", "compiled": " ᶜ", "predicted": " ᵖ"}
LEGEND = (
    "Without a mark: measured. ᶜ compiled: bytes of the executables and of the "
    "simulated schedule; nothing ran. ᵖ predicted: the programs of the stages (of "
    "AmoebaNet and the Transformers: of the layers) were timed one after the other on "
    "one device, the rest is the simulator's."
)
Cells = dict[str, Cell]
Column = tuple[str, Callable[[Experiment, Cells], str]]


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
    """The Markdown of a result.

    Args:
      benchmark: the published table.
      result: our cells.

    Returns:
      The command, the table, and where the figures were made.
    """
    shown_rows = rows_shown(benchmark, result)
    shared_rows = rows_sharing(benchmark, result)
    lines = [f"`{_command(benchmark, result)}`", ""]
    columns = _COLUMNS[benchmark.kind](benchmark, result)
    if shown_rows:
        lines += [*_grid(columns, shown_rows, result), ""]
    if shared_rows:
        lines += [_SHARING, ""]
        lines += [*_grid(_sharing(benchmark, result), shared_rows, result), ""]
    made = "\n\n".join(_where(benchmark, result))
    return "\n".join([*lines, made]).rstrip() + "\n"


def _grid(
    columns: Sequence[Column], rows: Sequence[Experiment], result: Result
) -> list[str]:
    """The lines of a Markdown table without columns in which every row is empty."""
    filled = [
        [name, *(make(row, result.rows.get(row.name, {})) for row in rows)]
        for name, make in columns
    ]
    if result.rows:  # else the empty columns show what could be there
        filled = [column for column in filled if set(column[1:]) != {_EMPTY}]
    head, *body = zip(*filled, strict=True)
    return [
        "| " + " | ".join(head) + " |",
        "| --- |" + " --: |" * (len(head) - 1),
        *("| " + " | ".join(cells) + " |" for cells in body),
    ]


def _command(benchmark: Benchmark, result: Result) -> str:
    """The command that makes the rows of a table."""
    words = ["python -m benchmarks run", benchmark.name, *_options_of(result.variant)]
    if not result.variant or result.scale != "full":
        words += ["--scale", result.scale]
    names = row_names(benchmark, result.scale, bool(result.variant))
    ran = [name for name in names if name in result.rows]
    if 0 < len(ran) < len(names) and (result.variant or result.scale != "full"):
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


def shares_devices(cells: Cells) -> bool:
    """Whether a row was measured with several stages on one device."""
    detail = cells["compiling"].detail if "compiling" in cells else {}
    stages = len(detail.get("layers per stage", ()))
    return "devices" in detail and stages > detail["devices"]


def rows_sharing(benchmark: Benchmark, result: Result) -> list[Experiment]:
    """The rows whose throughput is not that of a device for each stage."""
    return [
        row for row in benchmark.rows if shares_devices(result.rows.get(row.name, {}))
    ]


def rows_shown(benchmark: Benchmark, result: Result) -> list[Experiment]:
    """The published rows, and after them those that are only ours.

    At other scales than the published one, and where it is measured, its rows are only
    what ours are compared with: those that were not run are left out. Rows of
    `rows_sharing` stand in a table of their own.
    """
    full = result.scale == "full" or benchmark.kind == "accuracy"
    shown = full and not result.variant
    rows = [
        row
        for row in benchmark.rows
        if row.name in result.rows or (shown and not row.only_measured)
        if not shares_devices(result.rows.get(row.name, {}))
    ]
    names = {row.name for row in benchmark.rows}
    return rows + [
        Experiment(name, (1,), 1, 1) for name in result.rows if name not in names
    ]


def _where(benchmark: Benchmark, result: Result) -> list[str]:
    """Of which machine, versions and date the rows are."""
    lines: list[str] = []
    groups: dict[str, list[str]] = {}
    for name, where in result.provenance.items():
        line = provenance.line(where)
        took = (where.get("options") or {}).get("took")
        if result.variant and took:
            line += f"; {took}"
        if any(cell.kind == PREDICTED for cell in result.rows[name].values()):
            line += _source_of_predictions(benchmark.row(name), where)
        groups.setdefault(line, []).append(name)
    if result.scale != "full":
        smaller = _SMALLER.get(benchmark.kind, _NARROWER)
        lines.append(f"Ours at {result.scale} scale: {smaller}")
    if len(groups) == 1:
        return [*lines, f"Made with {next(iter(groups))}."]
    made = [f"{', '.join(names)}: made with {line}." for line, names in groups.items()]
    return lines + made


def _source_of_predictions(row: Experiment, where: dict[str, Any]) -> str:
    """What the predictions of a row were made from."""
    _, _, device = where["devices"].partition(" ")
    options = where.get("options") or {}
    bandwidth = row.bandwidth or options.get("bandwidth")
    told = f"; predicted from stage times of one {device}, "
    told += f"transfers at {bandwidth} GB/s"
    if options.get("examples"):
        told += f", micro-batches timed with {options['examples']} examples"
    return told


def number(value: float) -> str:
    """Three significant digits, all of an integer."""
    if value == int(value) and abs(value) >= 1:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) < 0.1:
        return f"{value:.3g}"
    return f"{value:.{3 - len(str(int(abs(value)))) + (abs(value) < 1)}f}"


def as_published(value: float) -> str:
    """A figure with the digits that it was published with."""
    for unit, size in (("B", 1e9), ("M", 1e6)):
        if value >= size:
            return f"{value / size:g} {unit}"
    return f"{value:g}"


def shown(cell: Cell | None) -> str:
    """A cell with its mark; a dash for none."""
    if cell is None:
        return _EMPTY
    spread = f" ± {number(cell.spread)}" if cell.spread else ""
    return f"{number(cell.value)}{spread}{_MARKS[cell.kind]}"


def _published(name: str) -> Callable[[Experiment, Cells], str]:
    def make(row: Experiment, cells: Cells) -> str:
        value = row.published.get(name)
        return _EMPTY if value is None else as_published(value)

    return make


def _ours(name: str) -> Callable[[Experiment, Cells], str]:
    return lambda row, cells: shown(cells.get(name))


def _first(benchmark: Benchmark, row: Experiment) -> Experiment:
    """The row by which the speed-ups of its group are divided."""
    return next(other for other in benchmark.rows if other.group == row.group)


def published_speed_up(benchmark: Benchmark, row: Experiment) -> float | None:
    """Recomputed from the published throughput; else as published."""
    first = _first(benchmark, row)
    if "samples/s" in row.published:
        return row.published["samples/s"] / first.published["samples/s"]
    return row.published.get("speed-up of GPipe")


def speed_up(
    benchmark: Benchmark, result: Result, row: Experiment, column: str
) -> Cell | None:
    """Our throughput by that of the first row, filled in the same way."""
    cell = result.rows.get(row.name, {}).get(column)
    first = _first(benchmark, row).name
    # Other schedules and cuts as well are divided by what the table divides by.
    predicted = cell is not None and cell.kind == PREDICTED
    base = "predicted samples/s" if predicted else "samples/s"
    by = result.rows.get(first, {}).get(base)
    if cell is None or by is None or not _same_machine(result, row.name, first):
        return None
    return Cell(cell.value / by.value, cell.kind, "")


def shown_speed_up(
    benchmark: Benchmark, result: Result, row: Experiment, column: str
) -> str:
    """A speed-up of ours with its mark; a dash for none."""
    cell = speed_up(benchmark, result, row, column)
    return f"{cell.value:.3f}{_MARKS[cell.kind]}" if cell else _EMPTY


def _same_machine(result: Result, *names: str) -> bool:
    """Whether figures may be divided by each other."""
    keys = ("devices", "processor", "cores", "jax")
    found = [[result.provenance[name].get(key) for key in keys] for name in names]
    return found[0] == found[-1]


def prediction_error(cells: Cells) -> float | None:
    """By how much a prediction is too high, where both were made."""
    made, found = cells.get("predicted samples/s"), cells.get("samples/s")
    return made.value / found.value - 1 if made and found else None


_NARROWER = (
    "fewer filters or narrower layers, smaller images or shorter sequences; published "
    "at full size."
)
_SMALLER = {
    "accuracy": "a thin ResNet on the digits of scikit-learn, 360 of 1797 held back, "
    "means and standard deviations over seeds. One device normalizes the whole "
    "mini-batch, pipelines each micro-batch of 16 images; with as many micro-batches "
    "one device has the parameters of the pipeline, as the last row says."
}
_NAME: Column = ("experiment", lambda row, cells: row.name)


def _cut(result: Result) -> Column:
    """Micro-batches and the examples in each, of ours."""

    def make(row: Experiment, cells: Cells) -> str:
        if not cells:
            return _EMPTY
        if result.scale == "full" and not result.variant:
            return f"{row.microbatches} x {round(row.batch / row.microbatches)}"
        details = [cell.detail for cell in cells.values()]
        told = [detail for detail in details if "micro-batches" in detail][:1]
        cut = [f"{d['micro-batches']} x {d['examples in each']}" for d in told]
        return cut[0] if cut else _EMPTY

    return "jpipe, M x examples", make


def _devices(row: Experiment, cells: Cells) -> str:
    detail = cells["compiling"].detail if "compiling" in cells else {}
    stages = len(detail.get("layers per stage", ()))
    return f"{stages} on {detail['devices']}" if "devices" in detail else _EMPTY


_SHARING = (
    "**What partitioning costs on one device.** These rows have more stages than there "
    "were devices, so neighbouring stages share one: their throughput is not that of a "
    "device for each stage, and its ratio to the baseline's is no speed-up."
)


def _sharing(benchmark: Benchmark, result: Result) -> Sequence[Column]:
    """The columns of rows in which stages share a device."""
    return [
        _NAME,
        _cut(result),
        ("stages on devices", _devices),
        ("jpipe, samples/s", _ours("samples/s")),
        (
            f"by {benchmark.rows[0].name}'s",
            lambda row, cells: shown_speed_up(benchmark, result, row, "samples/s"),
        ),
        ("all, GiB", _ours("memory")),
        ("compiling, s", _ours("compiling")),
    ]


def _speed(benchmark: Benchmark, result: Result) -> Sequence[Column]:
    def published(row: Experiment, cells: Cells) -> str:
        value = published_speed_up(benchmark, row)
        return _EMPTY if value is None else f"{value:.3f}"

    def ours(column: str) -> Callable[[Experiment, Cells], str]:
        return lambda row, cells: shown_speed_up(benchmark, result, row, column)

    def error(row: Experiment, cells: Cells) -> str:
        value = prediction_error(cells)
        return _EMPTY if value is None else f"{100 * value:+.1f} %"

    columns: list[Column] = [_NAME, _cut(result), ("stages on devices", _devices)]
    if any("samples/s" in row.published for row in benchmark.rows):
        columns += [
            ("torchgpipe, samples/s", _published("samples/s")),
            ("torchgpipe, speed-up", published),
        ]
    if any("speed-up of GPipe" in row.published for row in benchmark.rows):
        columns.append(("GPipe, speed-up", _published("speed-up of GPipe")))
    return [
        *columns,
        ("jpipe, samples/s", _ours("samples/s")),
        ("speed-up", ours("samples/s")),
        ("jpipe, samples/s", _ours("predicted samples/s")),
        ("speed-up", ours("predicted samples/s")),
        ("predicted by measured", error),
        ("with 1F1B, samples/s", _ours("1f1b samples/s")),
        ("speed-up", ours("1f1b samples/s")),
        ("compiling, s", _ours("compiling")),
    ]


def _memory(benchmark: Benchmark, result: Result) -> Sequence[Column]:
    names: dict[str, Any] = {
        name: None for row in benchmark.rows for name in row.published
    }
    ours = {
        "jpipe, parameters": "parameters",
        "model, GiB": "model",
        "activations, GiB": "activations",
        "all, GiB": "memory",
        "activations with 1F1B, GiB": "activations (1f1b)",
        "all with 1F1B, GiB": "memory (1f1b)",
        "activations with 1F1B and min_cut, GiB": "activations (default)",
        "all with 1F1B and min_cut, GiB": "memory (default)",
        "compiling, s": "compiling",
    }
    columns: list[Column] = [_NAME, _cut(result)]
    columns += [(f"published: {name}", _published(name)) for name in names]
    return columns + [(title, _ours(name)) for title, name in ours.items()]


def _timeline(benchmark: Benchmark, result: Result) -> Sequence[Column]:
    columns: list[Column] = [_NAME]
    for name, column in (
        ("samples/s", "samples/s"),
        ("utilization, %", "utilization"),
        ("memory, GiB", "memory"),
    ):
        columns += [
            (f"torchgpipe, {name}", _published(name)),
            (f"jpipe, {name}", _ours(column)),
            (f"with 1F1B, {name}", _ours(f"{column} (1f1b)")),
        ]
    return columns


def _largest(benchmark: Benchmark, result: Result) -> Sequence[Column]:
    columns: list[Column] = [_NAME]
    for name in ("size", "parameters", "model, GB", "activations, GB"):
        ours = name.replace("GB", "GiB")
        columns += [
            (f"GPipe, {name}", _published(name)),
            (f"jpipe, {ours}", _ours(ours.partition(",")[0])),
        ]
    return columns


def _accuracy(benchmark: Benchmark, result: Result) -> Sequence[Column]:
    def published(row: Experiment, cells: Cells) -> str:
        value = row.published.get("error, %")
        if value is None:
            return _EMPTY
        return f"{value:.2f} ± {row.published['spread of the error, %']:.2f}"

    return [
        ("experiment", lambda row, cells: row.name),
        ("published, error in %", published),
        ("published, samples/s", _published("samples/s")),
        ("jpipe, error in %", _ours("error")),
        ("jpipe, samples/s", _ours("throughput")),
        ("largest difference of a parameter", _ours("difference")),
    ]


_COLUMNS = {
    "speed": _speed,
    "memory": _memory,
    "timeline": _timeline,
    "largest": _largest,
    "accuracy": _accuracy,
}
