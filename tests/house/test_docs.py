"""What the documents show is run: README and the pages under `docs/`.

Docstrings are run by pytest itself.
"""

import doctest
import importlib
import pkgutil
import re

import pytest

import jpipe

from ..programs import ROOT, accelerated, run

MODULES = [m.name for m in pkgutil.walk_packages(jpipe.__path__, "jpipe.")]


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


def blocks(page: str) -> str:
    """All Python of a page, as one program."""
    text = (ROOT / page).read_text()
    return "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))


def test_links_between_pages_lead_somewhere():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    assert len(pages) >= 11
    for page in pages:
        for path, part in re.findall(
            r"\]\(([\w./-]*)(?:#([\w-]+))?\)", page.read_text()
        ):
            target = page.parent / path if path else page
            assert target.exists(), f"{page.name}: {path}"
            if part:
                titles = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
                assert part in [title.lower().replace(" ", "-") for title in titles]


def test_readme_gives_the_same_loss_on_one_device_and_on_many():
    readme = (ROOT / "README.md").read_text()
    programs = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    num_lines = [len(re.findall(r"^.*\S.*$", text, re.M)) for text in programs]
    assert num_lines[0] <= 14  # the program that a newcomer copies
    assert max(num_lines[1:]) <= 6
    assert readme.index(programs[0]) < 1100
    assert len(readme.splitlines()) <= 120
    shown = [
        run("-c", programs[0], devices=1),
        run("-c", blocks("README.md"), devices=2),
    ]
    assert ["cpu:1" in text for text in shown] == [False, True]
    losses = [float(text.split()[-1]) for text in shown]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0] < 2  # of 6.2, as of guessing one of 512 labels


def test_the_page_on_the_pipeline_prints_what_it_shows():
    page = (ROOT / "docs" / "pipeline.md").read_text()
    (shown,) = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    assert shape(run("-c", blocks("docs/pipeline.md"))) == shape(shown)


def shape(text: str) -> list[str]:
    """What is printed but for its numbers, which follow from the memory model."""
    return re.sub(r"\d+(\.\d+)?", "0", text).split()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("batch_norm_and_state", "loss_functions", "memory", "models", "planning"),
        "schedules",
    ],
)
def test_pages_run(name, tmp_path):
    run("-c", blocks(f"docs/{name}.md"), devices=2, folder=tmp_path)


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_guide_is_a_program_that_runs(devices):
    program = accelerated(blocks("docs/guide.md"))
    shown = run("-c", program, devices=devices)
    assert re.search(r"gradient \d+\.\d+\naccuracy [01]\.\d+", shown)


@pytest.mark.slow
def test_the_page_on_many_devices_gives_one_loss_however_they_lie():
    losses = re.findall(
        r"^(?:one|two|and|eight|seven) .*?(\d\.\d+)$",
        run("-c", blocks("docs/many_devices.md")),
        re.MULTILINE,
    )
    assert len(losses) == 6
    assert max(map(float, losses)) - min(map(float, losses)) < 2e-6
