"""Writes the first tutorial as a notebook, which opens in Colab: `make notebook`.

Each block of Python on the page becomes a cell of code, the text between two blocks a
cell of Markdown, whose links lead into the site.
"""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent / "tutorials" / "first_pipeline.md"
NOTEBOOK = PAGE.with_suffix(".ipynb")
PROJECT = Path(__file__).parents[1] / "pyproject.toml"
ADDRESSES = tomllib.loads(PROJECT.read_text("utf-8"))["project"]["urls"]
SITE = ADDRESSES["Documentation"]
INSTALL = f'!pip install --quiet "jpipe @ git+{ADDRESSES["Repository"]}"\n'
CODE = re.compile(r"```python\n(.*?)```\n", re.DOTALL)
WARNING = re.compile(r'!!! \w+ "(.*)"\n((?: {4}.*\n)+)')
LINK = re.compile(r"\]\(([\w./]+)\.md(#[\w-]+)?\)")


def read_cells(page: str) -> list[tuple[str, str]]:
    """The cells of a page in order: their type, ``"markdown"`` or ``"code"``, and text.

    Args:
      page: the text of a page in Markdown.
    """
    text = WARNING.sub(_quote_warning, page)
    text = LINK.sub(_link_to_site, text)
    # What the pattern splits at has odd indices.
    pieces = CODE.split(text)
    cells = [
        ("code" if number % 2 else "markdown", piece.strip("\n"))
        for number, piece in enumerate(pieces)
    ]
    head, *rest = [cell for cell in cells if cell[1]]
    return [head, ("code", INSTALL.strip()), *rest]


def write_notebook(page: str) -> str:
    """The notebook of a page, as the JSON of Jupyter."""
    cells = [
        _write_cell(number, cell_type, text)
        for number, (cell_type, text) in enumerate(read_cells(page))
    ]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook = {
        "cells": cells,
        "metadata": {"kernelspec": kernel},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(notebook, indent=1) + "\n"


def _write_cell(number: int, cell_type: str, text: str) -> dict[str, Any]:
    cell = {
        "cell_type": cell_type,
        "id": f"cell-{number}",
        "metadata": {},
        "source": text.splitlines(keepends=True),
    }
    if cell_type == "code":
        cell |= {"execution_count": None, "outputs": []}
    return cell


def _quote_warning(match: re.Match[str]) -> str:
    title, lines = match.groups()
    return f"> **{title}.** " + re.sub(r"\n {4}", "\n> ", lines.strip()) + "\n"


def _link_to_site(match: re.Match[str]) -> str:
    path, part = match.groups()
    folder = "" if path.startswith("../") else "tutorials/"
    return f"]({SITE}/{folder}{path.removeprefix('../')}/{part or ''})"


if __name__ == "__main__":
    NOTEBOOK.write_text(write_notebook(PAGE.read_text("utf-8")), "utf-8")
