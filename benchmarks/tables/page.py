"""The summary of the published tables on the page, from the results that are kept."""

from pathlib import Path

from .. import markdown
from ..experiment import Experiment
from ..provenance import DIRTY
from ..published import BY_NAME, Benchmark
from ..result import FOLDER, MEASURED, Result
from .kinds import KINDS
from .view import EMPTY, View, as_published, shown

PAGE = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"
HEAD = ("table", "row", "compared", "published", "jpipe, measured", "jpipe, ᵖ or ᶜ")


def written(page: str, folder: Path = FOLDER) -> str:
    """The page with a summary of what is kept in place of the one that it has."""
    assert page.find(BEGIN) < page.find(END) != -1, "the page has lost its marks"
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    rows = []
    for benchmark in BY_NAME.values():
        rows += summary(benchmark, folder)
    table = markdown.table(HEAD, rows, left=3)
    return "\n".join([f"{before}{BEGIN}", "", table, "", f"{END}{after}"])


def summary(benchmark: Benchmark, folder: Path) -> list[list[str]]:
    """The lines of rows that were measured, and of the largest of each group."""
    results = _kept(benchmark, folder)
    views = [View(benchmark, result) for result in results if result.scale == "full"]
    largest = {row.group: row for row in benchmark.rows if not row.only_measured}
    title = benchmark.name
    if results:
        title = f"[{title}](results/{results[0].stem}.md)"
    lines = []
    for row in benchmark.rows:
        measured, foretold = _figures(views, row)
        if measured or row in largest.values():
            lines.append(
                [
                    title,
                    row.name,
                    KINDS[benchmark.kind].compared,
                    _published_figure(benchmark, row),
                    "; ".join(measured) or EMPTY,
                    "; ".join(foretold) or EMPTY,
                ]
            )
    return lines


def _figures(views: list[View], row: Experiment) -> tuple[list[str], list[str]]:
    """What was measured of a row, and what was compiled or predicted."""
    measured: list[str] = []
    foretold: list[str] = []
    for view in views:
        if row in view.sharing:
            continue
        for column, settings in KINDS[view.benchmark.kind].ours.items():
            cell = view.cells(row).get(column)
            if cell is None:
                continue
            figure = settings + _figure(view, row, column)
            if cell.kind == MEASURED:
                measured.append(figure + _source(view.result, row))
            else:
                foretold.append(figure)
    return measured, foretold


def _kept(benchmark: Benchmark, folder: Path) -> list[Result]:
    """The results of a table, those of full scale and without a variant first."""
    results = []
    for scale in ("full", "small"):
        paths = folder.glob(f"{benchmark.name}-{scale}*.json")
        for path in sorted(paths, key=lambda path: path.stem):
            result = Result.load(path)
            results.append(result)
            for name, where in result.provenance.items():
                if (where["commit"] or "").endswith(DIRTY):
                    raise SystemExit(
                        f"{path.name}: {name} was made with files that no commit has; "
                        f"run it again from a commit, or delete it"
                    )
    return results


def _published_figure(benchmark: Benchmark, row: Experiment) -> str:
    figure = KINDS[benchmark.kind].published(benchmark, row)
    if figure is None:
        return EMPTY
    # Sums and ratios of published figures have more digits than these.
    if benchmark.kind == "speed":
        return f"{figure:.3f}"
    return as_published(round(figure, 2))


def _figure(view: View, row: Experiment, column: str) -> str:
    """Our figure; of a speed-up that was measured with the throughput."""
    cell = view.cells(row)[column]
    if view.benchmark.kind != "speed":
        return shown(cell)
    figure = shown(view.speed_up(row, column), digits=3)
    if cell.kind != MEASURED:
        return figure
    rate = f"{shown(cell)} samples/s"
    return rate if figure == EMPTY else f"{figure} ({rate})"


def _source(result: Result, row: Experiment) -> str:
    """The device and the day, which lead to the table of the run."""
    where = result.provenance[row.name]
    _, _, device = where["devices"].partition(" ")
    _, _, options = result.variant.partition("-")
    run = [device, options.replace("-", " "), where["date"]]
    return f", [{', '.join(filter(None, run))}](results/{result.stem}.md)"
