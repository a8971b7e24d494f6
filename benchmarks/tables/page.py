"""The summary of the published tables on the page, from the results that are kept."""

from pathlib import Path
from typing import NamedTuple

from ..experiment import Experiment
from ..provenance import DIRTY
from ..published import BY_NAME, Benchmark
from ..result import FOLDER, MEASURED, Result
from .report import (
    as_published,
    published_speed_up,
    rows_sharing,
    shown,
    shown_speed_up,
)

PAGE = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"


class Headline(NamedTuple):
    """What the summary compares in tables of a kind.

    Attributes:
      compared: its name and unit.
      published: the published figure.
      columns: cell of ours -> the settings that it is of, where they are not those that
        were published.
    """

    compared: str
    published: str
    columns: dict[str, str]


_HEADLINES = {
    "speed": Headline(
        "speed-up",
        "",
        {"samples/s": "", "predicted samples/s": "", "1f1b samples/s": "1F1B "},
    ),
    "timeline": Headline(
        "busy, %",
        "utilization, %",
        {"utilization": "", "utilization (1f1b)": "1F1B "},
    ),
    "memory": Headline(
        "all, GiB",
        "memory, GiB",
        {"memory": "", "memory (1f1b)": "1F1B ", "memory (default)": "default "},
    ),
    "largest": Headline("parameters", "parameters", {"parameters": ""}),
    "accuracy": Headline("error, %", "error, %", {"error": ""}),
}


def written(page: str, folder: Path = FOLDER) -> str:
    """The page with a summary of what is kept in place of the one that it has."""
    assert page.find(BEGIN) < page.find(END) != -1, "the page has lost its marks"
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    lines = [
        "| table | row | compared | published | jpipe, measured | jpipe, ᵖ or ᶜ |",
        "| --- | --- | --- | --: | --: | --: |",
    ]
    for benchmark in BY_NAME.values():
        lines += summary(benchmark, folder)
    return "\n".join([f"{before}{BEGIN}", "", *lines, "", f"{END}{after}"])


def summary(benchmark: Benchmark, folder: Path) -> list[str]:
    """The lines of rows that were measured, and of the largest of each group."""
    results = _kept(benchmark, folder)
    headline = _HEADLINES[benchmark.kind]
    largest = {row.group: row for row in benchmark.rows if not row.only_measured}
    title = benchmark.name
    if results:
        title = f"[{title}](results/{results[0].stem}.md)"
    lines = []
    for row in benchmark.rows:
        measured: list[str] = []
        foretold: list[str] = []
        for result in results:
            if result.scale != "full" or row in rows_sharing(benchmark, result):
                continue
            for column, settings in headline.columns.items():
                cell = result.rows.get(row.name, {}).get(column)
                if cell is None:
                    continue
                if cell.kind == MEASURED:
                    figure = _measured_figure(benchmark, result, row, column)
                    measured.append(f"{settings}{figure}")
                else:
                    figure = _figure(benchmark, result, row, column)
                    foretold.append(f"{settings}{figure}")
        if not measured and row not in largest.values():
            continue
        words = [
            title,
            row.name,
            headline.compared,
            _published_figure(benchmark, row),
            "; ".join(measured) or "-",
            "; ".join(foretold) or "-",
        ]
        lines.append(f"| {' | '.join(words)} |")
    return lines


def _kept(benchmark: Benchmark, folder: Path) -> list[Result]:
    """The results of a table, those of full scale and without a variant first."""
    paths = [
        path
        for scale in ("full", "small")
        for path in sorted(
            folder.glob(f"{benchmark.name}-{scale}*.json"), key=lambda path: path.stem
        )
    ]
    for path in paths:
        for name, where in Result.load(path).provenance.items():
            if (where["commit"] or "").endswith(DIRTY):
                raise SystemExit(
                    f"{path.name}: {name} was made with files that no commit has; "
                    f"run it again from a commit, or delete it"
                )
    return [Result.load(path) for path in paths]


def _published_figure(benchmark: Benchmark, row: Experiment) -> str:
    if benchmark.kind == "speed":
        speed_up = published_speed_up(benchmark, row)
        return "-" if speed_up is None else f"{speed_up:.3f}"
    figure = row.published.get(_HEADLINES[benchmark.kind].published)
    if figure is not None:
        return as_published(figure)
    model = row.published.get("model, GiB")
    activations = row.published.get("activations, GiB")
    if model is None or activations is None:
        return "-"
    return f"{model + activations:.2f}"


def _figure(benchmark: Benchmark, result: Result, row: Experiment, column: str) -> str:
    if benchmark.kind == "speed":
        return shown_speed_up(benchmark, result, row, column)
    return shown(result.rows[row.name][column])


def _measured_figure(
    benchmark: Benchmark, result: Result, row: Experiment, column: str
) -> str:
    """A figure with the device and the day, which lead to the table of its run."""
    figure = _figure(benchmark, result, row, column)
    if benchmark.kind == "speed":
        rate = f"{shown(result.rows[row.name][column])} samples/s"
        figure = rate if figure == "-" else f"{figure} ({rate})"
    where = result.provenance[row.name]
    _, _, device = where["devices"].partition(" ")
    _, _, options = result.variant.partition("-")
    run = [device, options.replace("-", " "), where["date"]]
    return f"{figure}, [{', '.join(filter(None, run))}](results/{result.stem}.md)"
