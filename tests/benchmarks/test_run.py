"""``python -m benchmarks``: every table runs, at a scale where it takes seconds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks.provenance import cores
from benchmarks.published import BY_NAME
from benchmarks.result import COMPILED, MEASURED, PREDICTED, Result

ROOT = Path(__file__).parents[2]


def test_unknown_names_list_what_exists():
    with pytest.raises(SystemExit, match=r"unknown: resnet.*resnet101-speed"):
        command.main(["table", "resnet"])


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


@pytest.mark.slow
def test_tables_of_every_kind_run_at_the_tiny_scale(tmp_path):
    """One test, for it is one run: what came out is looked at part by part."""
    kinds = {BY_NAME[name].kind for name in TABLES}
    assert kinds == {table.kind for table in BY_NAME.values()} - {"accuracy"}
    words = ["run", *TABLES, "--scale", "tiny", "--folder", str(tmp_path)]
    shown = run_tiny("benchmarks", *words)
    results = {name: Result.load(tmp_path / f"{name}-tiny.json") for name in TABLES}
    for name, result in results.items():
        ran = BY_NAME[name].default_rows("tiny")
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_rows_of_more_stages_than_devices_are_predicted_from_one(tmp_path):
    words = ["run", "unet-speed", "--measured", "--predict", "--bandwidth", "3"]
    words += ["--schedule", "1f1b", "--remat", "min_cut"]
    words += ["--experiment", "baseline", "--experiment", "pipeline-8"]
    words += ["--scale", "tiny", "--folder", str(tmp_path)]
    shown = run_tiny("benchmarks", *words, cache=tmp_path / "programs")
    variant = "measured-1f1b-min_cut-predict"
    rows = Result.load(tmp_path / f"unet-speed-tiny-{variant}.json").rows
    assert set(rows["baseline"]) == {"samples/s", "compiling", "predicted samples/s"}
    plain = rows["baseline"]["samples/s"].detail
    assert (plain["schedule"], plain["remat"]) == ("gpipe", "none")
    (cell,) = rows["pipeline-8"].values()
    assert cell.kind == PREDICTED
    assert cell.detail["schedule"] == "1f1b"
    assert cell.detail["remat"] == "min_cut"
    assert cell.detail["bandwidth, bytes/s"] == 3e9
    setting = BY_NAME["unet-speed"].setting(
        BY_NAME["unet-speed"].row("pipeline-8"), "tiny"
    )
    assert cell.detail["examples timed"] == setting.size
    assert "predicted from stage times of one cpu, transfers at 3.0 GB/s" in shown
    assert "--schedule 1f1b --remat min_cut --predict --scale tiny" in shown


def test_options_that_nothing_would_read_are_refused(capsys):
    for words in (["--predict"], ["--schedule", "1f1b"], ["--remat", "full"]):
        with pytest.raises(SystemExit):
            command.main(["run", "unet-speed", *words])
        assert "needs --measured" in capsys.readouterr().err
