"""``python -m benchmarks.peers``, at a scale where it takes seconds.

Nothing is said here about which side is faster.
"""

import importlib.util
import json
import math
import sys
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks.peers import command, launch, ours, report
from benchmarks.peers.command import main
from benchmarks.peers.launch import SIDES, Run
from benchmarks.peers.workload import MODELS, SIZES, Case

TINY = ["--scale", "tiny", "--rounds", "1", "--microbatches", "4"]


def table(text: str) -> list[list[str]]:
    """The cells of the rows of the first Markdown table."""
    rows = [line.strip("|").split("|") for line in text.splitlines() if "|" in line[:1]]
    return [[cell.strip() for cell in row] for row in rows if "---" not in row[0]]


def test_our_side_alone(capsys, tmp_path):
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


def test_all_sides_do_the_same_work(tmp_path):
    pytest.importorskip("torch")
    has_torchgpipe = importlib.util.find_spec("torchgpipe")
    sides = [name for name in SIDES if name != "torchgpipe" or has_torchgpipe]
    path = tmp_path / "peers.json"
    asked = ["--models", "transformer", "--schedules", "gpipe", "--json", str(path)]
    main([*TINY, *asked])
    result = json.loads(path.read_text())
    assert len(result["skipped"]) == 3 - len(sides)
    processes = {run["title"]: run["rounds"][0]["processes"] for run in result["runs"]}
    assert processes == {
        "JAX, no pipeline": 1,
        "PyTorch, no pipeline": 1,
        **{f"{SIDES[name].title}, gpipe": SIDES[name].processes for name in sides},
    }
    (work,) = result["same_work"]
    assert work["same"], work
    for row in result["rows"]:
        assert row.get("forward_threads", 1) == row.get("backward_threads", 1) == 1


def test_what_is_absent_is_left_out_and_says_what_to_type(monkeypatch, capsys):
    def absent(python, packages):
        raise ImportError("ModuleNotFoundError: No module named 'torch'")

    monkeypatch.setattr(command, "versions", absent)
    with pytest.raises(SystemExit, match="nothing to run"):
        main(["--sides", "torchgpipe,pipelining"])
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("left out: torchgpipe (ModuleNotFoundError")
    assert "pip install --no-build-isolation torchgpipe==0.0.7" in first
    assert second.endswith("pip install torch")


def test_packages_are_looked_for_in_the_interpreter_that_is_to_run():
    with pytest.raises(ImportError, match="no_such_package"):
        launch.versions(sys.executable, ["no_such_package"])
    with pytest.raises(ImportError, match="does not run"):
        launch.versions("/no/such/python", ["numpy"])
    found = launch.versions(sys.executable, ["numpy"])
    assert found["numpy"] == np.__version__


def test_a_process_that_fails_says_why_and_takes_the_others_with_it(tmp_path):
    commands = [
        [sys.executable, "-c", "import time; time.sleep(60)"],
        [sys.executable, "-c", "raise ValueError('out of luck')"],
    ]
    with pytest.raises(RuntimeError, match="out of luck"):
        launch._together(commands, tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--microbatches", "3"], "a divisor of 512"),
        (["--microbatches", "1"], "2 or more"),
        (["--sides", "jpipe,megatron"], "megatron: choose from jpipe, jpipe-apart"),
        (["--rounds", "0"], "at least 1"),
        (["--json", "no/such/folder/a.json"], "no folder for no/such/folder/a.json"),
    ],
)
def test_options_that_make_no_sense(options, message, capsys):
    with pytest.raises(SystemExit) as refusal:
        main(options)
    assert refusal.value.code == 2
    assert message in capsys.readouterr().err


def found(seconds, **more):
    return {
        "seconds": [seconds],
        "busy_seconds": 2 * seconds,
        "peak_bytes": 3 * report.MIB,
        "start_bytes": report.MIB,
        "idle_bytes": 1.5 * report.MIB,
        "losses": [2.0, 1.0],
        "parameters": 5,
    } | more


def rounds(piped, plain):
    run = Run("pipelining", Case("mlp", "tiny", 4, "1f1b"), "python")
    return {run.baseline: plain, run: piped}


def test_speed_up_is_by_the_baseline_of_the_same_round():
    plain, row = report.rows(
        rounds([found(1.0), found(4.0), found(2.0)], [found(1.5), found(4), found(4)])
    )
    assert row["speed_up"] == 1.5
    assert (row["speed_up_least"], row["speed_up_most"]) == (1.0, 2.0)
    assert row["of_ideal"] == 1.5 / 1.6
    assert row["samples_per_s"] == 16 / 2
    assert row["cores_busy"] == 2
    assert not report.starved([row | {"cores_busy": 0.2}, plain])
    assert "had 40% of" in report.starved([row, plain | {"cores_busy": 0.4}])[0]
    assert (row["peak_mib"], row["above_start_mib"], row["step_mib"]) == (3, 2, 1.5)


@pytest.mark.parametrize(
    "more",
    [
        {"losses": [2.0, 1.0002]},
        {"losses": [2.0, math.nan]},
        {"parameters": 6},
    ],
)
def test_other_work_is_not_the_same(more):
    assert report.same_work(rounds([found(1)], [found(1)]))[0]["same"]
    (work,) = report.same_work(rounds([found(1, **more)], [found(1)]))
    assert not work["same"]
    assert "NOT the same" in report.sentence(work)


def test_baselines_run_once_and_recompute_what_their_pipelines_do():
    options = command.parse(["--remat", "none,full", "--models", "mlp"])
    runs = command.planned(options, list(SIDES))
    plain = [run for run in runs if run.case.schedule == "baseline"]
    assert [(run.title, run.case.remat, run.case.recomputed) for run in plain] == [
        ("JAX, no pipeline", "none", ()),
        ("PyTorch, no pipeline", "none", ()),
        ("JAX, no pipeline", "full", (0,)),
        ("PyTorch, no pipeline", "full", (0, 1)),
    ]
    assert len(runs) == 2 * 9


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("scale", ["small", "tiny"])
def test_stages_are_halves(model, scale):
    case = Case(model, scale, 2)
    cut, rest = case.balance()
    layers = case.layers()
    assert cut + rest == len(layers)
    kind = "dense" if model == "mlp" else "block"
    counts = [sum(k.kind == kind for k in s) for s in (layers[:cut], layers[cut:])]
    assert counts == [SIZES[model][scale].depth // 2] * 2


@pytest.mark.parametrize("model", MODELS)
def test_weights_fit_the_flax_modules(model):
    case = Case(model, "tiny", 2)
    x: Any = case.data()[0]
    for layer in case.layers():
        module = ours.module(layer, case.size)
        if layer.kind == "relu":
            continue
        x, made = jax.eval_shape(module.init_with_output, jax.random.key(0), x)
        loaded = ours.params(layer, case.size)
        assert jax.tree.map(np.shape, made["params"]) == jax.tree.map(np.shape, loaded)


@pytest.mark.parametrize("model", MODELS)
def test_processes_draw_the_same_numbers_in_single_precision(model):
    case = Case(model, "tiny", 2, recomputed=(0,))
    again = Case.read(str(case))
    assert again == case
    for one, other in zip(case.layers(), again.layers(), strict=True):
        a, b = one.weights(), other.weights()
        assert {array.dtype.name for array in a.values()} <= {"float32"}
        assert all(np.array_equal(a[k], b[k]) for k in b)
    for a, b in zip(case.data(), again.data(), strict=True):
        assert a.dtype.name in ("float32", "int32")
        assert np.array_equal(a, b)
