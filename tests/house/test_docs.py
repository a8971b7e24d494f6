"""What the documents show is run: README, the pages under `docs/`, and examples.

Docstrings are run by pytest itself.
"""

import ast
import doctest
import importlib
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import jpipe
from jpipe.__main__ import main

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# The pages whose Python is one program, but for those with a test of their own.
PROGRAMS = sorted(
    {
        str(page.relative_to(DOCS))
        for page in DOCS.rglob("*.md")
        if "```python" in page.read_text()
    }
    - {"many_devices.md", "pipeline.md", "tutorials/first_pipeline.md"}
)
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


def slow(*row: Any) -> Any:
    return pytest.param(*row, marks=pytest.mark.slow)


def start(
    *command: str, devices: int = 1, folder: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """A program in a process of its own.

    Args:
      *command: what follows `python`.
      devices: how many there are, unless the program says how many CPU devices it
        wants.
      folder: where it runs.
    """
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={
            **os.environ,
            "COLUMNS": "100",
            "JAX_NUM_CPU_DEVICES": str(devices),
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'examples'}",
            # Half of the time would go to optimizations of XLA.
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        },
    )


def run(*command: str, **options: Any) -> str:
    """What a program prints that ends well."""
    result = start(*command, **options)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def accelerated(program: str) -> str:
    """The program as a machine with accelerators runs it.

    There the number of CPU devices says nothing; here it is that of `start`.
    """
    program, number = re.subn(r"jax\.config\.update\(.jax_num_cpu.*", "", program)
    assert number == 1
    return program


def blocks(page: str) -> str:
    """All Python of a page, as one program."""
    text = (ROOT / page).read_text()
    return "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))


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
    assert len(names) >= 60
    assert names - {*described} == set()
    assert len(described) == len({*described})


def test_errors_that_are_explained_are_errors_of_the_library():
    """Or of JAX, Flax and Python, which are these."""
    others = {
        "Received incompatible devices for jitted computation",
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


def test_readme_gives_the_same_loss_on_one_device_and_on_many(tmp_path):
    readme = (ROOT / "README.md").read_text()
    first, *_ = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert readme.index(first) < 700
    assert len(readme.splitlines()) <= 150
    shown = [
        run("-c", blocks("README.md"), devices=1, folder=tmp_path),
        run("-c", first, devices=2),
    ]
    assert ["cpu:1" in text for text in shown] == [False, True]
    (loss,) = {text.split()[-1] for text in shown}
    assert float(loss) < 1e-3


def test_the_page_on_the_pipeline_prints_what_it_shows():
    page = (ROOT / "docs" / "pipeline.md").read_text()
    (shown,) = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    assert shape(run("-c", blocks("docs/pipeline.md"))) == shape(shown)


def shape(text: str) -> list[str]:
    """What is printed but for its numbers, which follow from the memory model."""
    return re.sub(r"\d+(\.\d+)?", "0", text).split()


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_pages_run(name, tmp_path):
    run("-c", blocks(f"docs/{name}"), devices=2, folder=tmp_path)


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_first_tutorial_is_a_program_that_runs(devices):
    program = accelerated(blocks("docs/tutorials/first_pipeline.md"))
    shown = run("-c", program, devices=devices)
    assert re.search(r"step 15 loss 0\.\d+\n(.*\n)+accuracy [01]\.\d+", shown)


@pytest.mark.slow
def test_the_page_on_many_devices_gives_one_loss_however_they_lie():
    losses = re.findall(
        r"^(?:one|two|and|eight|seven) .*?(\d\.\d+)$",
        run("-c", blocks("docs/many_devices.md")),
        re.MULTILINE,
    )
    assert len(losses) == 6
    assert max(map(float, losses)) - min(map(float, losses)) < 2e-6


@pytest.mark.slow
def test_a_mesh_and_two_processes_give_the_losses_of_as_many_micro_batches():
    """And the example of text runs, in each of its ways."""
    small = "--steps=10 --evaluation-batches=2 --write=8 --width=32 --heads=2 "
    small += "--context=16 --depth=2"
    runs = [
        "--mesh=stage=2,data=2 --microbatches=2",
        "--stages=2 --microbatches=4 --schedule=gpipe",
        "--stages=2 --microbatches=4 --processes=2",
    ]
    printed = [run("examples/train_text.py", *f"{small} {r}".split()) for r in runs]
    shown = [re.findall(r"\d\.\d+(?= bits)|model +(\d\.\d+)", text) for text in printed]
    assert len(shown[0]) == 12
    assert shown[0] == shown[1] == shown[2]
    for text in printed[:2]:
        assert re.search(r"parameters +differ by at most \d", text)
    assert "(data=2)" in printed[0]
    assert "process 1" in printed[2]


@pytest.mark.slow
def test_every_option_of_the_main_job_is_documented():
    text = run("examples/train_text.py", "--help")
    options = set(re.findall(r"^\s+(--[\w-]+)", text, re.MULTILINE))
    assert {"--stages", "--schedule", "--remat", "--steps"} <= options
    for line in re.findall(r"^\s+--[\w-]+ [^\n]*(?:\n\s{20,}[^\n]*)*", text, re.M):
        assert len(line.split()) > 3, line


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        slow("digits.py", r"9[5-9]\.\d"),
        slow("functional_loop.py", r"(?s)last .*\b9\d\.\d%.*averaged .*\b9\d\.\d%"),
        slow(
            "mixed_precision.py",
            r"(?s)step 130: .*skipped\nstep 131: scale 2\^16.* 9\d\.\d% on 360",
        ),
        slow(
            "lora.py",
            r"adapters: +9\d\.\d% .*\nadapters take [2-6]\d% of the memory and",
        ),
        slow(
            "unet.py --steps=3 --batch-size=4 --patch=16 --width=4 --schedule=zb_h1",
            r"gradients +differ by at most \d",
        ),
        (
            "tied_lm.py --steps=2 --width=16 --blocks=2 --batch-size=8 "
            "--microbatches=4 --schedule=zb_v",
            r"differ from one device by at most \d\.\de-(0[6-9]|\d\d)|most 0\.0e",
        ),
    ],
    ids=lambda text: text.split(".")[0] if ".py" in text else "",
)
def test_examples_run_and_write_where_git_ignores(command, shown, tmp_path):
    name, *options = command.split()
    example = str(ROOT / "examples" / name)
    assert re.search(shown, run(example, *options, folder=tmp_path))
    assert {path.name for path in tmp_path.iterdir()} <= {"build"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_examples_of_several_stages_run_on_one_device(name):
    program = accelerated((ROOT / "examples" / f"{name}.py").read_text())
    shown = run("-c", program, "--steps=1", devices=1)
    assert re.search(r"differ by at most \d\.\de-0[67]\n", shown)


@pytest.mark.slow
def test_the_gallery_is_what_the_example_draws(tmp_path):
    printed = run(str(ROOT / "examples/schedules.py"), folder=tmp_path)
    assert re.search(r"zb_v +\| 8 +\| 25\.5 +\| 5\.9 %", printed)
    drawn = {path.name: path.read_text() for path in tmp_path.glob("build/*/*.svg")}
    kept = {path.name: path.read_text() for path in (ROOT / "docs/gallery").glob("*")}
    assert drawn
    assert drawn == kept


@pytest.mark.slow
def test_a_plan_from_the_shell_is_of_a_profile_that_is_measured_once(tmp_path):
    example = str(ROOT / "examples/plan.py")
    small = "--blocks=4", "--width=64", "--words=500", "--devices=2"
    for profile in ("wrote", "read"):
        shown = run(example, *small, folder=tmp_path)
        assert shown.startswith(f"{profile} build/plan/profile.json\nmeasured on cpu")
        assert re.search(r"(?m)^predicted: .* a step", shown)
        assert shown.endswith("wrote build/plan/plan.json\nwrote build/plan/plan.svg\n")
    plan = jpipe.Plan.from_json((tmp_path / "build/plan/plan.json").read_text())
    assert str(plan) in shown


@pytest.mark.slow
def test_the_picture_of_a_plan_is_what_the_example_draws(tmp_path):
    run("examples/plan.py", "--estimate", "--devices=4", f"--out={tmp_path}")
    drawn, kept = tmp_path / "plan.svg", ROOT / "docs/plan.svg"
    assert drawn.read_text("utf-8") == kept.read_text("utf-8")


@pytest.mark.slow
def test_bad_options_of_the_main_job_are_refused_in_one_line():
    result = start("examples/train_text.py", "--stages=9", "--batch-size=1")
    assert result.returncode == 2
    assert "--stages 9" in result.stderr
    assert "--batch-size 1" in result.stderr
