"""What the site takes from the project: its address, its examples, rows of schedules.

The address is that of pyproject.toml. While nobody has filled it in, pages have no link
to the repository, and the first tutorial no button that opens its notebook there.

Each program of examples/ is a page, and their README the page above them.

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
from typing import Any

from jpipe.schedules import BY_NAME, ScheduleBuilder

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
ADDRESSES = tomllib.loads(PROJECT.read_text("utf-8"))["project"]["urls"]
HAS_ADDRESS = "OWNER" not in ADDRESSES["Repository"]
EXAMPLES = PROJECT.parent / "examples"
NOTEBOOK = "tutorials/first_pipeline"
BADGE = (
    "[![Open in Colab](../pictures/colab.svg)](https://colab.research.google.com/"
    "github/{repository}/blob/main/docs/{notebook}.ipynb)\n\n"
)

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
    """Completes two pages: the first tutorial, and that of the examples."""
    if page.file.src_uri == f"{NOTEBOOK}.md" and HAS_ADDRESS:
        repository = ADDRESSES["Repository"].removeprefix("https://github.com/")
        title, text = markdown.split("\n\n", 1)
        badge = BADGE.format(repository=repository, notebook=NOTEBOOK)
        return f"{title}\n\n{badge}{text}"
    if page.file.src_uri == "examples.md":
        return markdown + _list_examples()
    return markdown


def on_page_content(html: str, page: Any, files: Any, **_: Any) -> str:
    """Puts drawings into the page."""
    drawings = {file.url: file for file in files if file.src_uri.endswith(".svg")}

    def read_drawing(match: re.Match[str]) -> str:
        url = posixpath.normpath(posixpath.join(page.url, match["src"]))
        text = Path(drawings[url].abs_src_path).read_text("utf-8")
        label = f'aria-label="{match["alt"]}"'
        text = re.sub(r'aria-label="[^"]*"', lambda _: label, text, count=1)
        return text.replace("<svg ", '<svg class="drawing" data-search-exclude ', 1)

    return re.sub(
        r'<img alt="(?P<alt>[^"]*)" src="(?P<src>[^":]*\.svg)" ?/>', read_drawing, html
    )


def _list_examples() -> str:
    """The README of the examples, its links as those of a page of the site."""
    _, text = (EXAMPLES / "README.md").read_text("utf-8").split("\n", 1)
    text = re.sub(r"\]\((\w+)\.(py|sh)\)", r"](examples/\1.md)", text)
    return text.replace("](../docs/", "](")


def _write_example(path: Path) -> str:
    """The page of a program."""
    language = {".py": "python", ".sh": "bash"}[path.suffix]
    source = path.read_text("utf-8")
    title = f"# {path.name}\n\n`examples/{path.name}` in a clone."
    return f"{title}\n\n````{language}\n{source}````\n"


def on_files(files: Any, config: Any) -> Any:
    """Adds the generated files."""
    from mkdocs.structure.files import File  # which the test of the rows does not need

    for name, build in BY_NAME.items():
        content = json.dumps(tabulate(build), separators=(",", ":"))
        path = f"explorer/{name}.json"
        files.append(File.generated(config, path, content=content))
    for example in sorted([*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.sh")]):
        path = f"examples/{example.stem}.md"
        files.append(File.generated(config, path, content=_write_example(example)))
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
