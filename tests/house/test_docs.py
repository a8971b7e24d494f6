"""What the documents show is run: README and the pages under `docs/`.

Docstrings are run by pytest itself.
"""

import ast
import doctest
import importlib
import json
import pkgutil
import re
import runpy

import pytest

import jpipe
from jpipe.__main__ import main

from ..programs import ROOT, accelerated, run
from .pages import Interpreter, read_blocks

DOCS = ROOT / "docs"
# The pages whose Python is one program, but for those with a test of their own.
OWN_TESTS = {
    *("libraries.md", "many_devices.md", "pipeline.md", "schedules.md"),
    *("tutorials/first_pipeline.md", "tutorials/two_hosts.md"),
}
PROGRAMS = sorted(
    {
        str(page.relative_to(DOCS))
        for page in DOCS.rglob("*.md")
        if "```python" in page.read_text()
    }
    - OWN_TESTS
)
# Libraries that some environments of the tests do not have, by page.
NEEDS = {"data_loading.md": "grain"}
MODULES = [m.name for m in pkgutil.walk_packages(jpipe.__path__, "jpipe.")]


@pytest.fixture(scope="module")
def interpreter():
    with Interpreter() as interpreter:
        yield interpreter


def test_some_docstrings_have_examples():
    finder = doctest.DocTestFinder()
    modules = map(importlib.import_module, MODULES)
    count = sum(len(t.examples) > 0 for m in modules for t in finder.find(m))
    assert count >= 5


def test_the_page_on_architecture_names_what_is_there():
    page = (ROOT / "docs" / "architecture.md").read_text()
    library = ROOT / "jpipe"
    there = [path.relative_to(library).with_suffix("") for path in library.rglob("*")]
    named = re.findall(r"`([\w/]*\b_\w+)/?(?:\.(\w+))?`", page)
    assert len(named) > 30
    for name, inside in named:
        found = [path for path in there if f"/{path}".endswith(f"/{name}")]
        assert found, name
        if inside:
            text = (library / found[0]).with_suffix(".py").read_text()
            assert re.search(rf"\b(def|class) {inside}\b", text), f"{name}.{inside}"


def test_links_between_pages_lead_somewhere():
    pages = [*ROOT.glob("*.md"), *DOCS.rglob("*.md")]
    assert len(pages) >= 45
    for page in pages:
        for path, part in re.findall(
            r"\]\(([\w./-]*)(?:#([\w-]+))?\)", page.read_text()
        ):
            target = page.parent / path if path else page
            assert target.exists(), f"{page.name}: {path}"
            if part:
                titles = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
                assert part in map(anchor, titles), f"{page.name}: {path}#{part}"


def anchor(title: str) -> str:
    """The name by which a link finds a title."""
    return re.sub(r"[^\w\s-]", "", title.lower()).strip().replace(" ", "-")


def test_the_menu_of_the_site_has_every_page():
    _, menu = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")
    listed = re.findall(r"([\w/]+\.md)$", menu, re.MULTILINE)
    assert sorted(listed) == sorted(
        str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")
    )


def test_every_public_name_is_on_a_page_of_the_reference():
    pages = "\n".join(page.read_text() for page in DOCS.glob("reference/*.md"))
    described = re.findall(r"^::: (.*)$", pages, re.MULTILINE)
    modules = {
        "jpipe": {*jpipe.__all__} - {"checkpoint", "draw", "schedules"},
        "jpipe.checkpoint": jpipe.checkpoint.__all__,
        "jpipe.draw": jpipe.draw.__all__,
        "jpipe.schedules": [n for n in vars(jpipe.schedules) if n[0] != "_"],
    }
    names = {f"{module}.{name}" for module, own in modules.items() for name in own}
    assert len(names) >= 59
    assert names - {*described} == set()
    assert len(described) == len({*described})


def test_errors_that_are_explained_are_errors_of_the_library():
    """Or of JAX, Flax and Python, which are these."""
    others = {
        "Received incompatible devices for jitted computation",
        "Array has been deleted",
        "Found an unbound axis name",
        "spans non-addressable (non process local) devices",
        "missing 1 required keyword-only argument: 'value'",
        "pytree structure error: different types at key path",
        'needs PRNG for "dropout"',
        "RESOURCE_EXHAUSTED",
    }
    page = (DOCS / "errors.md").read_text()
    titles = {*re.findall(r"^### (.*)$", page, re.MULTILINE)}
    assert others < titles
    texts = [
        text
        for path in (ROOT / "jpipe").rglob("*.py")
        for text in texts_of(path.read_text())
    ]
    for title in titles - others:
        pieces = map(re.escape, re.split("…", title))
        message = re.compile(".*".join(pieces), re.DOTALL)
        assert any(map(message.search, texts)), title


def texts_of(source: str) -> list[str]:
    """The texts of a module, with "…" in place of what is filled in."""
    texts = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts = [
                str(part.value) if isinstance(part, ast.Constant) else "…"
                for part in node.values
            ]
            texts.append("".join(parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append(node.value)
    return texts


@pytest.mark.parametrize(
    ("name", "num_microbatches"), [("one_microbatch", 1), ("gpipe_four", 4)]
)
def test_the_pictures_of_concepts_are_what_the_command_draws(
    name, num_microbatches, tmp_path
):
    drawn = tmp_path / "drawn.svg"
    command = f"draw gpipe --ranks=4 --microbatches={num_microbatches} --costs=1,2"
    assert main([*command.split(), f"--svg={drawn}"]) == 0
    kept = DOCS / "pictures" / f"{name}.svg"
    assert drawn.read_text("utf-8") == kept.read_text("utf-8")


def test_readme_gives_the_same_loss_on_one_device_and_on_many(interpreter):
    readme = (ROOT / "README.md").read_text()
    programs = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    num_lines = [len(re.findall(r"^.*\S.*$", text, re.M)) for text in programs]
    assert num_lines[0] <= 14  # the program that a newcomer copies
    assert max(num_lines[1:]) <= 6
    assert readme.index(programs[0]) < 1100
    assert len(readme.splitlines()) <= 120
    shown = [
        run("-c", programs[0], devices=1),
        interpreter.run(read_blocks("README.md")),
    ]
    assert ["cpu:1" in text for text in shown] == [False, True]
    losses = [float(text.split()[-1]) for text in shown]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0] < 2  # of 6.2, as of guessing one of 512 labels


def test_the_first_page_begins_with_a_picture_and_a_short_program():
    page = (DOCS / "index.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(re.findall(r"^.*\S.*$", program, re.M)) <= 14
    places = [page.index(text) for text in ("gallery/1f1b.svg", "pip install", program)]
    assert places == sorted(places)
    assert places[-1] < 900


def test_the_page_on_the_pipeline_prints_what_it_shows(interpreter):
    page = (DOCS / "pipeline.md").read_text()
    (shown,) = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    printed = interpreter.run(read_blocks("docs/pipeline.md"))
    assert shape(printed) == shape(shown)


def shape(text: str) -> list[str]:
    """What is printed but for its numbers, which follow from the memory model."""
    return re.sub(r"\d+(\.\d+)?", "0", text).split()


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_pages_run(name, interpreter, tmp_path):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    interpreter.run(read_blocks(f"docs/{name}"), folder=tmp_path)


def test_a_page_that_fails_is_noticed(interpreter):
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        interpreter.run("print(1 / 0)")


def test_the_first_tutorial_is_a_program_that_runs(interpreter):
    shown = interpreter.run(read_blocks("docs/tutorials/first_pipeline.md"))
    assert re.search(r"step 15 loss 0\.\d+\n(.*\n)+accuracy [01]\.\d+", shown)


@pytest.mark.slow
def test_the_first_tutorial_runs_on_one_device():
    program = accelerated(read_blocks("docs/tutorials/first_pipeline.md"))
    assert "accuracy" in run("-c", program, devices=1)


def test_the_notebook_of_the_first_tutorial_is_its_page():
    page = (DOCS / "tutorials" / "first_pipeline.md").read_text()
    notebook = (DOCS / "tutorials" / "first_pipeline.ipynb").read_text()
    cells = json.loads(notebook)["cells"]
    install, *programs = [
        "".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"
    ]
    assert install.startswith("!pip install")
    blocks = re.findall(r"```python\n(.*?)\n```", page, re.DOTALL)
    assert programs == blocks
    writer = runpy.run_path(str(DOCS / "notebook.py"))
    assert notebook == writer["write_notebook"](page), "type `make notebook`"


@pytest.mark.slow
def test_the_gallery_is_what_the_page_on_schedules_draws(interpreter, tmp_path):
    printed = interpreter.run(read_blocks("docs/schedules.md"), folder=tmp_path)
    assert re.search(r"zb_v +\| 8 +\| 25\.5 +\| 5\.9 %", printed)
    drawn = {path.name: path.read_text() for path in tmp_path.glob("build/*/*.svg")}
    kept = {path.name: path.read_text() for path in (DOCS / "gallery").glob("*")}
    assert drawn
    changed = [name for name in drawn if drawn[name] != kept.get(name)]
    assert changed == [], "run the first block of docs/schedules.md, copy build/gallery"
    assert drawn.keys() == kept.keys()


@pytest.mark.slow
def test_two_processes_print_one_loss_as_the_tutorial_shows(tmp_path):
    page = (DOCS / "tutorials" / "two_hosts.md").read_text()
    (tmp_path / "train.py").write_text(read_blocks("docs/tutorials/two_hosts.md"))
    (command,) = re.findall(r"^    python (-m jpipe launch .*)$", page, re.MULTILINE)
    printed = run(*command.split(), folder=tmp_path)
    lines = printed.splitlines()
    first = [line[4:] for line in lines if line.startswith("[0] ")]
    second = [line[4:] for line in lines if line.startswith("[1] ")]
    assert len(first) == 5
    assert first == second
    (shown,) = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    assert {*map(without_loss, shown.splitlines())} <= {*map(without_loss, lines)}
    assert (tmp_path / "build" / "two_hosts").is_dir()


def without_loss(line: str) -> str:
    return re.sub(r"\d\.\d+", "", line)


@pytest.mark.slow
def test_the_page_on_many_devices_gives_one_loss_however_they_lie():
    losses = re.findall(
        r"^(?:one|two|and|eight|seven) .*?(\d\.\d+)$",
        run("-c", read_blocks("docs/many_devices.md")),
        re.MULTILINE,
    )
    assert len(losses) == 6
    assert max(map(float, losses)) - min(map(float, losses)) < 2e-6
