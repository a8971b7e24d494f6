"""What the site takes from the project: its address, its examples, rows of schedules.

The address is that of pyproject.toml. While nobody has filled it in, pages have no link
to the repository, and the first tutorial no button that opens its notebook there.

Each program of examples/ is a page, with what it printed when record_examples.py ran
it, and their README the page above them. So are the benchmarks and their results.

Drawings of jpipe stand in the text of a page, not in files of their own: so a mouse
that rests on a box shows its action, and site.css has their colours for dark pages.

For "Try a schedule" there is a file ``explorer/NAME.json`` for each schedule. It maps
``"RANKSxMICROBATCHES"`` to ``{"rows": ...}``, its rows joined by ``/``, or to
``{"error": ...}``, the reason why there are none.
"""

import json
import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from jpipe.schedules import BY_NAME, ScheduleBuilder

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
ADDRESSES = tomllib.loads(PROJECT.read_text("utf-8"))["project"]["urls"]
HAS_ADDRESS = "OWNER" not in ADDRESSES["Repository"]
EXAMPLES = PROJECT.parent / "examples"
BENCHMARKS = PROJECT.parent / "benchmarks"
NOTEBOOK = "tutorials/first_pipeline"
BADGE = (
    "[![Open in Colab](../pictures/colab.svg)](https://colab.research.google.com/"
    "github/{repository}/blob/main/docs/{notebook}.ipynb)\n\n"
)


class ExampleRow(NamedTuple):
    """A row of the table of examples."""

    shows: str
    command: str
    seconds: str


RANKS = (2, 3, 4, 6, 8)
MICROBATCHES = (2, 4, 6, 8, 12, 16, 24, 32)


def on_config(config: Any) -> Any:
    """Sets the address of the site, and that of its source."""
    if HAS_ADDRESS:
        config.site_url = ADDRESSES["Documentation"]
        config.repo_url = ADDRESSES["Repository"]
        config.edit_uri = "edit/main/docs/"
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Completes pages: the first tutorial, and the README of two folders."""
    if page.file.src_uri == f"{NOTEBOOK}.md" and HAS_ADDRESS:
        repository = ADDRESSES["Repository"].removeprefix("https://github.com/")
        title, text = markdown.split("\n\n", 1)
        badge = BADGE.format(repository=repository, notebook=NOTEBOOK)
        return f"{title}\n\n{badge}{text}"
    if page.file.src_uri == "examples.md":
        text = re.sub(r"\]\((\w+)\.(py|sh)\)", r"](examples/\1.md)", _read(EXAMPLES))
        return markdown + text
    if page.file.src_uri == "benchmarks.md":
        text = _read(BENCHMARKS).replace("](results/", "](benchmarks/results/")
        return markdown + text
    return markdown


def on_page_content(html: str, page: Any, files: Any, **_: Any) -> str:
    """Puts drawings into the page, and keeps options of commands in one line."""
    drawings = {file.url: file for file in files if file.src_uri.endswith(".svg")}

    def read_drawing(match: re.Match[str]) -> str:
        url = posixpath.normpath(posixpath.join(page.url, match["src"]))
        text = Path(drawings[url].abs_src_path).read_text("utf-8")
        label = f'aria-label="{match["alt"]}"'
        text = re.sub(r'aria-label="[^"]*"', lambda _: label, text, count=1)
        return text.replace("<svg ", '<svg class="drawing" data-search-exclude ', 1)

    image = r'<img alt="(?P<alt>[^"]*)" src="(?P<src>[^":]*\.svg)" ?/>'
    html = re.sub(image, read_drawing, html)
    option = r'<span class="option">\g<0></span>'
    return re.sub(
        "(?<=<code>)[^<]*(?=</code>)",
        lambda code: re.sub(r"(?<!\S)--\w\S*", option, code[0]),
        html,
    )


def _read(folder: Path) -> str:
    """The README of a folder without its title, its links as those of the site."""
    _, text = (folder / "README.md").read_text("utf-8").split("\n", 1)
    return text.replace("](../docs/", "](")


def _read_table() -> dict[str, ExampleRow]:
    """The name of each example -> its row in the table of the README."""
    table = (EXAMPLES / "README.md").read_text("utf-8")
    rows = re.findall(
        r"^\| \[(\S+)\]\(.*?\) \| (.*) \| `(.*)` \| (.*) \|$", table, re.M
    )
    return {name: ExampleRow(*columns) for name, *columns in rows}


def _write_example(path: Path, row: ExampleRow | None) -> str:
    """The page of a program: what it shows, how it is started, what it prints.

    Args:
      path: the program.
      row: its row in the table of the README; ``None`` if others import it.
    """
    parts = [f"# {path.name}"]
    if row is None:
        parts.append(f"`examples/{path.name}` in a clone, which other examples import.")
    else:
        shows = row.shows.replace("](../docs/", "](../")
        parts.append(f"{shows[0].upper()}{shows[1:]}. Started in the root of a clone:")
        parts.append(f"    {row.command}")
        if row.seconds.isdigit():
            parts.append(f"It takes {row.seconds} seconds of processor time.")
    output = EXAMPLES / "outputs" / f"{path.stem}.txt"
    if output.exists():
        printed = output.read_text("utf-8").rstrip()
        parts += ["## What it prints", f"````text\n{printed}\n````"]

    language = {".py": "python", ".sh": "bash"}[path.suffix]
    source = path.read_text("utf-8")
    parts += ["## The program", f"````{language}\n{source}````"]
    return "\n\n".join(parts) + "\n"


def _write_result(path: Path) -> str:
    """The page of results, which the search leaves out: most of it is numbers."""
    text = path.read_text("utf-8").replace("](../../docs/", "](../../")
    title = "" if text.startswith("# ") else f"# {path.stem}\n\n"
    return f"---\nhide: [navigation]\nsearch: {{exclude: true}}\n---\n{title}{text}"


def on_files(files: Any, config: Any) -> Any:
    """Adds the generated files."""
    from mkdocs.structure.files import File  # which the test of the rows does not need

    for name, build in BY_NAME.items():
        content = json.dumps(tabulate(build), separators=(",", ":"))
        path = f"explorer/{name}.json"
        files.append(File.generated(config, path, content=content))
    rows = _read_table()
    for example in sorted([*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.sh")]):
        path = f"examples/{example.stem}.md"
        content = _write_example(example, rows.get(example.name))
        files.append(File.generated(config, path, content=content))
    for result in sorted((BENCHMARKS / "results").iterdir()):
        path = f"benchmarks/results/{result.name}"
        if result.suffix == ".md":
            content = _write_result(result)
            files.append(File.generated(config, path, content=content))
        else:
            files.append(File.generated(config, path, abs_src_path=str(result)))
    return files


def tabulate(build: ScheduleBuilder) -> dict[str, dict[str, str]]:
    """The rows of one schedule for all sizes."""
    table = {}
    for ranks in RANKS:
        for microbatches in MICROBATCHES:
            table[f"{ranks}x{microbatches}"] = _entry(build, ranks, microbatches)
    return table


def _entry(build: ScheduleBuilder, ranks: int, microbatches: int) -> dict[str, str]:
    try:
        schedule = build(ranks, microbatches)
    except ValueError as error:
        return {"error": str(error)}
    rows = [" ".join(map(str, row)) for row in schedule.rows]
    return {"rows": "/".join(rows)}
