"""``python -m benchmarks``: every table runs, at a scale where it takes seconds."""

import json
import os
import re
import subprocess
import sys
import time

import pytest
from rich.progress import Progress

from benchmarks import __main__ as command
from benchmarks import measured
from benchmarks import provenance as provenance_module
from benchmarks.provenance import cores, provenance
from benchmarks.published import BY_NAME
from benchmarks.result import COMPILED, MEASURED, PREDICTED, Cell, Result
from benchmarks.tables.report import table
from benchmarks.tables.rows import default_rows

from .work import ROOT


class TestCommand:
    def test_unknown_names_list_what_exists(self):
        with pytest.raises(SystemExit, match=r"unknown: resnet.*resnet101-speed"):
            command.main(["table", "resnet"])
        with pytest.raises(SystemExit, match=r"no table was named.*--all"):
            command.main(["table"])

    def test_list_shows_all(self, capsys):
        command.main(["list"])
        shown = capsys.readouterr().out
        assert set(BY_NAME) <= set(shown.split())

    def test_a_missing_result_says_what_to_type(self, tmp_path, capsys):
        command.main(["table", "unet-speed", "--folder", str(tmp_path)])
        assert "python -m benchmarks run unet-speed" in capsys.readouterr().out


class TestDirtyCheckouts:
    @pytest.fixture
    def repository(self, tmp_path, monkeypatch):
        """A repository with one commit, taken for that of the benchmarks."""
        monkeypatch.setattr(provenance_module, "ROOT", tmp_path)
        for name in ("code.py", "benchmarks/results/unet.json", "benchmarks/README.md"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text("before")
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        for words in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "a"]):
            subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
        return tmp_path

    def test_results_and_their_page_may_have_changed(self, repository):
        name = provenance_module.commit()
        assert re.fullmatch("[0-9a-f]{9}", name)
        for made in ("benchmarks/results/unet.json", "benchmarks/README.md"):
            (repository / made).write_text("after")
        assert provenance_module.commit() == name

    def test_their_results_are_not_kept_beside_published_ones(self, repository):
        (repository / "code.py").write_text("after")
        assert provenance_module.commit().endswith("-dirty")
        with pytest.raises(SystemExit, match="commit them first, or add --folder"):
            command.main(["run", "unet-speed", "--measured"])


def test_a_row_that_fails_does_not_stop_the_others(tmp_path):
    class Runner:
        """Rows run, all but one."""

        def run(self, benchmark, names):
            if names == ["pipeline-1"]:
                raise MemoryError("too large")
            rows = {name: {"samples/s": Cell(1.0, MEASURED)} for name in names}
            return Result(
                benchmark.name, "tiny", dict.fromkeys(rows, provenance()), rows
            )

    names = ["baseline", "pipeline-1", "pipeline-2"]
    with Progress(disable=True) as progress:
        failed = command._run_table("unet-speed", names, Runner(), progress, tmp_path)
    assert failed == ["unet-speed: pipeline-1: MemoryError('too large')"]
    kept = Result.load(tmp_path / "unet-speed-tiny.json")
    assert list(kept.rows) == ["baseline", "pipeline-2"]
    assert "--experiment baseline --experiment pipeline-2" in table(
        BY_NAME["unet-speed"], kept
    )


def run_tiny(module, *words, cache=None):
    """A command in a process of its own, as one types it."""
    # Flags of the tests would be in the way of those that the command sets. What is
    # measured is no matter here: XLA takes half as long without its optimizations.
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    if cache:
        environment["JAX_COMPILATION_CACHE_DIR"] = str(cache)
    done = subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        done.check_returncode()
    except subprocess.CalledProcessError as error:
        error.add_note(done.stderr)
        raise
    return done.stdout


# One of each kind, but of test errors, of which `test_accuracy` runs one; and what a
# slow link is worth. Steps of the other models are taken in the tests of the models.
TABLES = [
    "unet-speed",
    "unet-timeline",
    "unet-memory",
    "table1-memory",
    "table3-slow-interconnect",
]


def test_tables_of_every_kind_run_at_the_tiny_scale(tmp_path):
    """One test, for it is one run: what came out is looked at part by part."""
    kinds = {BY_NAME[name].kind for name in TABLES}
    assert kinds == {table.kind for table in BY_NAME.values()} - {"accuracy"}
    words = ["run", *TABLES, "--scale", "tiny", "--folder", str(tmp_path)]
    shown = run_tiny("benchmarks", *words)
    results = {name: Result.load(tmp_path / f"{name}-tiny.json") for name in TABLES}
    for name, result in results.items():
        ran = default_rows(BY_NAME[name], "tiny")
        assert list(result.rows) == ran
        assert set(result.provenance) == set(ran)
        assert all(result.rows.values()), f"{name} has a row without a cell"
        assert f"### {BY_NAME[name].title}" in shown
        picture = (tmp_path / f"{name}-tiny.png").read_bytes()
        assert picture.startswith(b"\x89PNG")

    speed = results["unet-speed"].rows["pipeline-2"]
    assert ("samples/s" in speed) == (cores() > 1)  # two stages need two
    if "samples/s" in speed:
        assert speed["samples/s"].kind == MEASURED
        assert speed["compiling"].value > 0
    assert speed["predicted samples/s"].kind == PREDICTED
    assert speed["1f1b samples/s"].kind == PREDICTED
    slow = results["table3-slow-interconnect"].rows["transformer-k2"]
    assert {cell.kind for cell in slow.values()} == {PREDICTED}
    memory = results["unet-memory"].rows["pipeline-2"]
    assert {cell.kind for cell in memory.values()} == {COMPILED}
    largest = results["table1-memory"].rows
    one = largest["transformer-pipeline-1"]["size"].value
    assert largest["transformer-pipeline-8"]["size"].value > 4 * one >= 4


def test_rows_are_measured_on_the_devices_there_are(tmp_path):
    words = ["run", "unet-speed", "--measured", "--dtype", "bfloat16"]
    words += ["--experiment", "baseline", "--experiment", "pipeline-4"]
    words += ["--scale", "tiny", "--folder", str(tmp_path)]
    shown = run_tiny("benchmarks", *words, cache=tmp_path / "programs")
    assert "| compiling, s |" in shown
    result = Result.load(tmp_path / "unet-speed-tiny-measured-bfloat16.json")
    assert list(result.rows) == ["baseline", "pipeline-4"]
    for row, cells in result.rows.items():
        assert list(cells) == ["samples/s", "compiling"]
        assert {cell.kind for cell in cells.values()} == {MEASURED}
        assert min(cell.value for cell in cells.values()) > 0
        devices = min(BY_NAME["unet-speed"].row(row).num_stages, cores())
        assert f"| {BY_NAME['unet-speed'].row(row).num_stages} on {devices} |" in shown
        assert cells["samples/s"].detail["devices"] == devices
    assert result.rows["baseline"]["compiling"].detail["programs"] == 1
    # All of it is kept for another run.
    assert list((tmp_path / "programs").iterdir())


def test_rows_of_memory_are_measured_in_processes_of_their_own(tmp_path):
    words = ["run", "unet-memory", "--measured", "--scale", "tiny"]
    words += ["--experiment", "baseline", "--experiment", "pipeline-8"]
    words += ["--folder", str(tmp_path)]
    shown = run_tiny("benchmarks", *words, cache=tmp_path / "programs")
    assert shown.count("traced and compiled in") >= 2
    result = Result.load(tmp_path / "unet-memory-tiny-measured.json")
    cells = result.rows["baseline"]
    assert cells["parameters"].value == 1694
    assert cells["compiling"].value > 0
    assert "memory" not in cells  # a CPU's allocator does not count
    assert ("pipeline-8" in result.rows) == (cores() >= 8)
    if cores() < 8:
        assert f"left out: needs 8 devices, has {cores()}" in shown


def test_what_cannot_be_measured_is_refused(tmp_path):
    words = ["--measured", "--folder", str(tmp_path)]
    with pytest.raises(subprocess.CalledProcessError) as caught:
        run_tiny("benchmarks", "run", "table1-memory", *words)
    assert "table1-memory: --measured is of tables of speed and" in caught.value.stderr
    how = measured.Options("full", "float32", 2, tmp_path)
    with pytest.raises(SystemExit, match=r"no accelerator.*type --scale small"):
        measured.run(BY_NAME["unet-speed"], ["baseline"], how)


class TestAccelerators:
    def test_a_part_that_is_not_done_in_time_is_ended_and_named(self, tmp_path):
        path, start = tmp_path / "out.json", time.monotonic()
        words = ["--scale", "tiny", "--steps", "2", "--seconds", "4"]
        words += ["--part", "step-unet-float32", "--part", "dispatch"]
        with pytest.raises(subprocess.CalledProcessError) as caught:
            run_tiny("benchmarks.gpu", *words, "--json", str(path))
        assert time.monotonic() - start < 30  # of minutes
        assert "type the same again" in caught.value.stderr
        found = json.loads(path.read_text())
        assert list(found) == ["step-unet-float32", "dispatch"]
        for part in found.values():
            assert part["ended"].startswith("not done after")
            assert part["results"] == []

    def test_the_smallest_part_is_done(self, tmp_path):
        path = tmp_path / "out.json"
        run_tiny("benchmarks.gpu", "--part", "dispatch", "--json", str(path))
        part = json.loads(path.read_text())["dispatch"]
        assert part["ended"] == "done"
        assert json.loads(part["output"][-1])["step_us"] > 0
