"""``python -m benchmarks``: every table runs, at a scale where it takes seconds."""

import json
import os
import subprocess
import sys

import pytest
from rich.progress import Progress

import jpipe
from benchmarks import __main__ as command
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


def run_tiny(module, *words):
    """A command in a process of its own, as one types it."""
    # Flags of the tests would be in the way of those that the command sets. What is
    # measured is no matter here: XLA takes half as long without its optimizations.
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    done = subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
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
        assert speed["samples/s"].detail["compile_s"] > 0
    assert speed["predicted samples/s"].kind == PREDICTED
    own = speed["own 1f1b samples/s"]
    assert own.kind == PREDICTED
    assert sum(own.detail["layers per stage"]) == sum(
        speed["1f1b samples/s"].detail["layers per stage"]
    )
    slow = results["table3-slow-interconnect"].rows["transformer-k2"]
    assert {cell.kind for cell in slow.values()} == {PREDICTED}
    memory = results["unet-memory"].rows["pipeline-2"]
    assert {cell.kind for cell in memory.values()} == {COMPILED}
    largest = results["table1-memory"].rows
    one = largest["transformer-pipeline-1"]["size"].value
    assert largest["transformer-pipeline-8"]["size"].value > 4 * one >= 4


def test_the_accelerator_benchmark_runs_a_part(tmp_path):
    path = tmp_path / "out.json"
    words = ["--scale", "tiny", "--part", "step-unet-float32", "--steps", "2"]
    run_tiny("benchmarks.gpu", *words, "--json", str(path))
    result = json.loads(path.read_text())
    assert result["left out"] == {}
    part = result["parts"]["step-unet-float32"]
    assert part["ratio"] == pytest.approx(
        part["pipeline-1 samples/s"] / part["plain samples/s"]
    )
    assert result["provenance"]["jpipe"] == jpipe.__version__
