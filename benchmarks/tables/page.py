"""The tables of the page, written from the results that are kept."""

from pathlib import Path

from ..provenance import DIRTY
from ..published import BY_NAME, Benchmark
from ..result import FOLDER, Result
from .report import LEGEND, table

PAGE = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"


def written(page: str, folder: Path = FOLDER) -> str:
    """The page with the tables of what is kept in place of those that it has."""
    assert page.find(BEGIN) < page.find(END) != -1, "the page has lost its marks"
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    sections = [section(benchmark, folder) for benchmark in BY_NAME.values()]
    return "\n".join([f"{before}{BEGIN}", "", LEGEND, "", *sections, f"{END}{after}"])


def section(benchmark: Benchmark, folder: Path) -> str:
    """The table of every scale that was run, or the published columns alone."""
    lines = [f"### {benchmark.title}", ""]
    if benchmark.note:
        lines += [benchmark.note, ""]
    kept = [
        path
        for scale in ("full", "small")
        for path in sorted(folder.glob(f"{benchmark.name}-{scale}*.json"))
    ]
    for path in kept:
        result = Result.load(path)
        for name, where in result.provenance.items():
            if (where["commit"] or "").endswith(DIRTY):
                raise SystemExit(
                    f"{path.name}: {name} was made with files that no commit has; "
                    f"run it again from a commit, or delete it"
                )
        lines += [table(benchmark, result)]
        picture = path.with_suffix(".png")
        if picture.exists():
            lines += [f"![{benchmark.name}]({folder.name}/{picture.name})", ""]
    if not kept:
        lines += ["Ours was not run yet.", ""]
        lines += [table(benchmark, Result(benchmark.name, "full", {}, {}))]
    return "\n".join(lines)
