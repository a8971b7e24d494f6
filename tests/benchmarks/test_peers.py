"""``python -m benchmarks.peers``, at a scale where it takes seconds.

Nothing is said here about which side is faster.
"""

import importlib.util
import json
import sys

import pytest

from benchmarks.peers import report
from benchmarks.peers.command import main, parse, planned

TINY = ["--scale", "tiny", "--rounds", "1", "--microbatches", "4"]


def table(text: str) -> list[list[str]]:
    """The cells of the rows of the first Markdown table."""
    rows = [line.strip("|").split("|") for line in text.splitlines() if "|" in line[:1]]
    return [[cell.strip() for cell in row] for row in rows if "---" not in row[0]]


@pytest.mark.slow
def test_one_side_by_itself_is_printed_and_saved(capsys, tmp_path):
    path = tmp_path / "peers.json"
    asked = ["--sides", "jpipe", "--schedules", "1f1b", "--models", "mlp"]
    main([*TINY, *asked, "--json", str(path)])
    out = capsys.readouterr().out
    head, plain, piped = table(out)
    assert head[0] == 'mlp, M = 4, remat "none"'
    assert plain[0] == "JAX, no pipeline"
    assert piped[:2] == ["jpipe, 1f1b", "two CPU devices, 1 process"]
    assert "mlp: the same work. 2,112 parameters on every side" in out

    result = json.loads(path.read_text())
    assert {"jax", "jaxlib", "flax", "jpipe"} <= result["provenance"]["versions"].keys()
    assert result["settings"]["microbatches"] == 4
    assert str(tmp_path) not in json.dumps(result)
    assert sys.executable not in json.dumps(result)
    assert result["skipped"] == {}
    row = result["rows"][1]
    assert row["of_ideal"] == pytest.approx(row["speed_up"] / 1.6)
    assert piped[4] == f"**{row['speed_up']:.2f}**"
    (work,) = result["same_work"]
    assert work["same"]
    assert len(work["parameters"]) == 1
    # Training went on: the losses would else agree without a gradient.
    assert work["losses"][0] - work["losses"][-1] > 100 * report.TOLERANCE
    assert all(run["rounds"][0]["processes"] == 1 for run in result["runs"])


@pytest.mark.slow
@pytest.mark.skipif(
    bool(importlib.util.find_spec("spectrax")),
    reason="spectrax is installed: nothing is refused",
)
def test_a_side_that_is_missing_is_left_out_with_what_to_type(capsys):
    with pytest.raises(SystemExit, match="nothing to run"):
        main([*TINY, "--sides", "spectrax", "--remat", "full"])
    says = capsys.readouterr().err
    assert "left out: SpectraX (" in says
    assert "to have it: pip install spectrax-lib" in says


def test_a_side_has_rows_of_what_it_can_keep_alone():
    options = parse([*TINY, "--remat", "none,full", "--sides", "jpipe,spectrax"])
    runs = planned(options, options.sides)
    kinds = {(run.side, run.case.remat) for run in runs}
    assert kinds == {("jpipe", "none"), ("jpipe", "full"), ("spectrax", "full")}


@pytest.mark.slow
def test_two_processes_do_the_work_of_one(capsys):
    sides = ["--sides", "jpipe,jpipe-apart", "--schedules", "1f1b,eager_1f1b"]
    main([*TINY, *sides, "--models", "mlp", "--remat", "default"])
    out = capsys.readouterr().out
    titles = [row[0] for row in table(out)[1:]]
    apart = "jpipe, two processes"
    assert titles == [
        "JAX, no pipeline",
        "jpipe, 1f1b",
        f"{apart}, 1f1b",
        f"{apart}, eager_1f1b",
    ]
    assert "mlp: the same work. 2,112 parameters on every side" in out
