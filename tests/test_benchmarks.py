"""The published tables: their data, how cells are filled, and every one of them run."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from hypothesis import given
from hypothesis import strategies as st
from rich.progress import Progress

import jpipe
from benchmarks import __main__ as command
from benchmarks.cells import largest
from benchmarks.cells.compiled import Peak, Way, _peak_of_rank, peak, workspace
from benchmarks.cells.measure import Measurement, measure
from benchmarks.cells.predict import Link, Predictor, one_core
from benchmarks.cells.stages import Calls, program_of
from benchmarks.experiment import Setting, Work, scaled_balance
from benchmarks.provenance import cores, provenance
from benchmarks.published import BY_NAME
from benchmarks.result import (
    COMPILED,
    FOLDER,
    MEASURED,
    PREDICTED,
    SCALES,
    Cell,
    Result,
)
from benchmarks.tables.page import PAGE, written
from benchmarks.tables.plot import drawn
from benchmarks.tables.report import number, published_speed_up, shown, table
from benchmarks.tables.run import default_rows, row_names

ROOT = Path(__file__).parent.parent

# What the benchmark page of torchgpipe says of its own throughputs.
SPEED_UPS = {
    "resnet101-speed": [1, 0.853, 1.414, 2.774, 4.294],
    "amoebanetd-speed": [
        *(1, 1.539, 1.773),
        *(1.004, 1.666, 2.709),
        *(0.932, 2.621, 4.953),
    ],
    "unet-speed": [1, 0.858, 1.246, 2.352, 3.105],
}
WITH_MODELS = [name for name, benchmark in BY_NAME.items() if benchmark.work]
DEFERRED = {"transformer-pipeline-32", "transformer-pipeline-128"}


def work(layers=6, **options):
    """A stack of small dense layers."""
    dense = [nn.Dense(8) for _ in range(layers)]
    spec = jax.ShapeDtypeStruct((8,), jnp.float32)
    square = lambda y, t: jnp.mean((y - t) ** 2)  # noqa: E731
    return Work(dense, spec, spec, square, optax.sgd(0.1), **options)


class TestPublished:
    @pytest.mark.parametrize("name", SPEED_UPS)
    def test_speed_ups_follow_from_throughputs(self, name):
        benchmark = BY_NAME[name]
        found = [published_speed_up(benchmark, row) for row in benchmark.rows]
        # The page rounds to three digits; its n4m32 is one off its own column.
        np.testing.assert_allclose(found, SPEED_UPS[name], atol=6e-4)

    @pytest.mark.parametrize("scale", SCALES)
    @pytest.mark.parametrize("name", WITH_MODELS)
    def test_every_row_can_be_cut_at_every_scale(self, name, scale):
        for row in BY_NAME[name].rows:
            if row.name in DEFERRED:
                continue  # as many layers again, and nothing else
            setting = BY_NAME[name].setting(row, scale)
            assert sum(setting.balance) == len(setting.work.layers)
            assert len(setting.balance) == row.num_stages
            assert min(setting.balance) >= 1
            if scale == "full" and row.group != "transformer":
                assert setting.balance == row.balance
                assert abs(setting.batch - row.batch) <= setting.microbatches / 2

    @pytest.mark.parametrize("scale", SCALES)
    @pytest.mark.parametrize("name", WITH_MODELS)
    def test_layers_made_twice_are_equal(self, name, scale):
        benchmark = BY_NAME[name]
        row = benchmark.rows[-1]
        once, again = (benchmark.setting(row, scale).work.layers for _ in range(2))
        assert once == again, "what was timed for one row would be timed for each"

    def test_names_are_unique_and_tiny_ones_exist(self):
        for benchmark in BY_NAME.values():
            names = [row.name for row in benchmark.rows]
            assert len(set(names)) == len(names)
            assert set(benchmark.tiny) <= set(names)
            for scale in SCALES:
                known = row_names(benchmark, scale)
                assert set(default_rows(benchmark, scale)) <= set(known)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(0, 200))
def test_scaled_balances_keep_shares(balance, extra):
    layers = len(balance) + extra
    scaled = scaled_balance(tuple(balance), layers)
    assert sum(scaled) == layers
    assert min(scaled) >= 1
    assert scaled_balance(tuple(balance), sum(balance)) == tuple(balance)


@given(st.integers(1, 60), st.integers(1, 9), st.integers(0, 500), st.integers(1, 80))
def test_search_finds_the_largest(slope, power, offset, guess):
    def most(n):
        return offset + slope * n ** (1 + power % 2)

    limit = 4000
    tried = []
    found = largest.search(lambda n: tried.append(n) or most(n), limit, guess)
    assert most(found) <= limit or found == 0
    assert most(found + 1) > limit
    assert len(set(tried)) == len(tried), "a size was compiled twice"
    assert len(tried) <= 16, "at full size each takes minutes"


def test_a_search_begins_where_the_row_before_ended(monkeypatch):
    guesses = []

    def search(most, limit, guess):
        guesses.append(guess)
        most(5)
        return 5

    monkeypatch.setattr(largest, "search", search)
    monkeypatch.setattr(largest, "peak", lambda setting, way: Peak((10,), 1, 1))
    table = BY_NAME["table1-memory"]
    searches = largest.Largest("small", lambda text: None)
    for count in (1, 8):
        searches.find(table, table.row(f"transformer-pipeline-{count}"))
    assert guesses == [13, 5]


class TestCompiled:
    def test_without_workspace_it_is_the_simulators_peak(self):
        setting = Setting(work(), (2, 2, 2), 4, 2)
        pipe = Way("1f1b", "full").pipe(setting)
        calls = Calls(
            program_of(pipe, setting.work.loss, *setting.work.specs(setting.batch))
        )
        timeline = pipe.schedule.simulate(calls.costs)
        nothing = dict.fromkeys(calls.of, 0)
        for rank, expected in enumerate(timeline.peak_bytes):
            assert _peak_of_rank(timeline, rank, nothing) <= expected
            # Arrivals at the end of an action are not there while it runs.
            much = dict.fromkeys(calls.of, 10**9)
            over = _peak_of_rank(timeline, rank, much) - 10**9
            assert expected / 2 <= over <= expected

    def test_workspace_is_what_xla_says(self):
        x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
        setting = Setting(work(2), (1, 1), 1, 4)
        program = program_of(
            Way("gpipe", "none").pipe(setting),
            setting.work.loss,
            *setting.work.specs(4),
        )
        call = replace(
            Calls(program).distinct[0],
            program=jax.jit(lambda a, b: jnp.sin(a @ b) @ b),
            args=(x, x),
        )
        # One result, and at least one product on the way.
        assert 2 * 64 * 64 * 4 <= workspace(call) <= 4 * 64 * 64 * 4

    def test_gradients_are_added_one_after_the_other(self):
        # In the order that XLA takes by default on CPU all of them are alive together.
        layers = [nn.Conv(64, (3, 3), use_bias=False) for _ in range(8)]
        image = jax.ShapeDtypeStruct((4, 4, 64), jnp.float32)
        convs = replace(work(), layers=layers, x=image, targets=image)
        found = peak(Setting(convs, (8,), 2, 1), Way("gpipe", "full"))
        gradients = 4 * found.parameters
        assert found.activations < 0.75 * gradients

    def test_model_bytes_are_parameters_gradients_and_slots(self):
        setting = Setting(replace(work(), tx=optax.adam(1e-3)), (3, 3), 2, 2)
        found = peak(setting, Way("gpipe", "full"))
        parameters = 6 * (8 * 8 + 8)
        assert found.parameters == parameters
        # Parameters, gradients, two moments, and the count of each stage.
        assert found.model == 4 * 4 * parameters + 2 * 4
        assert found.activations > 0

    def test_equal_layers_are_counted_each(self):
        wide = jax.ShapeDtypeStruct((64,), jnp.float32)
        layers = [nn.Dense(64) for _ in range(6)]
        equal = replace(work(), layers=layers, x=wide, targets=wide)
        found = peak(Setting(equal, (3, 3), 2, 1), Way("1f1b", "full"))
        assert found.parameters == 6 * 65 * 64
        assert found.activations > 0

    def test_equal_stages_are_one_call(self):
        blocks = [nn.Dense(8) if i % 2 else nn.relu for i in range(10)]
        setting = Setting(replace(work(), layers=blocks), (2,) * 5, 3, 2)
        pipe = Way("gpipe", "full").pipe(setting)
        calls = Calls(
            program_of(pipe, setting.work.loss, *setting.work.specs(setting.batch))
        )
        # F of all but the last, B of the first, B of those between, and the last's.
        assert len(calls.distinct) == 4
        assert len(calls.of) == 2 * 4 * 3 + 3


class TestPredicted:
    def test_equal_times_give_the_closed_form(self, monkeypatch):
        monkeypatch.setattr(Predictor, "_timed", lambda self, program, specs: 1.0)
        setting = Setting(work(), (2, 2, 2), 8, 2)
        predictor = Predictor(jax.devices()[0])
        made = predictor.predict(setting, Way("gpipe", "full"), Link(1e30, 0.0))
        # The second rank waits for one F, runs eight F and eight B, and one B of the
        # first follows; the last, whose F are part of its B, is done by then.
        assert made.timeline.makespan == 1 + 8 + 8 + 1
        assert made.throughput == pytest.approx(16 / (18 + made.update))

    def test_layers_add_up_to_stages(self, monkeypatch):
        monkeypatch.setattr(Predictor, "_timed", lambda self, program, specs: 1.0)
        setting = Setting(work(by_layer=True), (2, 4), 4, 2)
        predictor = Predictor(jax.devices()[0])
        made = predictor.predict(setting, Way("gpipe", "full"), Link(1e30, 0.0))
        costs = made.timeline.costs
        assert costs.forward == [[2.0] * 4, [0.0] * 4]
        # The last of four layers is fused with the loss: three F, three B, and it.
        assert costs.backward == [[2.0] * 4, [7.0] * 4]

    def test_large_microbatches_are_scaled(self, monkeypatch):
        monkeypatch.setattr(Predictor, "_timed", lambda self, program, specs: 1.0)
        setting = Setting(work(), (3, 3), 2, 12)
        few = Predictor(jax.devices()[0], most_examples=4)
        made = few.predict(setting, Way("gpipe", "full"), Link(1e9, 0.0))
        assert made.timeline.costs.forward[0] == [3.0, 3.0]
        assert made.timeline.costs.boundary_bytes[1] == [12 * 8 * 4] * 2
        assert made.examples == 24

    def test_a_slow_link_costs_time(self, monkeypatch):
        monkeypatch.setattr(Predictor, "_timed", lambda self, program, specs: 1.0)
        setting, way = Setting(work(), (3, 3), 2, 2), Way("gpipe", "full")
        times = [
            Predictor(jax.devices()[0])
            .predict(setting, way, Link(bandwidth, 0.0))
            .timeline.makespan
            for bandwidth in (1e30, 2 * 8 * 4.0)  # a boundary takes one second
        ]
        assert times[1] >= times[0] + 2

    def test_times_are_of_one_core_and_all_come_back(self):
        if not hasattr(os, "sched_getaffinity"):
            pytest.skip("this system does not say which cores a process may use")
        before = os.sched_getaffinity(0)
        with one_core():
            assert len(os.sched_getaffinity(0)) == 1
        assert os.sched_getaffinity(0) == before

    def test_programs_that_donate_can_be_timed_again(self):
        setting = Setting(work(), (3, 3), 2, 2)
        made = Predictor(jax.devices()[0], repeats=2).predict(
            setting, Way("1f1b", "except_last"), Link(12e9)
        )
        assert made.throughput > 0


def test_measured_steps_are_counted():
    ticks = []
    devices = jax.devices()[:2]
    found = measure(
        Setting(work(), (3, 3), 2, 4),
        Way("gpipe", "except_last"),
        devices,
        3,
        lambda: ticks.append(0),
    )
    assert len(found.seconds) == 3
    assert len(ticks) == 4
    assert found.throughput > 0
    assert Measurement(1.0, (1.0, 2.0, 4.0), 8).throughput == 4.0
    assert Measurement(1.0, (1.0, 2.0, 4.0), 8).spread == pytest.approx((6 - 3) / 2)


class TestResults:
    def result(self, rows, date="2020-01-01"):
        where = {
            "jpipe": "0",
            "jax": "0",
            "flax": "0",
            "python": "3",
            "devices": "1 x",
            "cores": 2,
            "processor": "p",
            "date": date,
            "commit": None,
        }
        return Result("unet-speed", "tiny", dict.fromkeys(rows, where), rows)

    def test_they_come_back_from_json(self, tmp_path):
        cells = {"samples/s": Cell(2.5, MEASURED, "samples/s", 0.1, {"steps": [1, 2]})}
        result = self.result({"baseline": cells})
        assert Result.load(result.save(tmp_path)) == result

    def test_an_earlier_row_stays_with_where_it_was_made(self):
        old = self.result({"baseline": {"samples/s": Cell(1.0, MEASURED)}})
        new = self.result({"pipeline-2": {}}, date="2021-01-01")
        merged = new.merged(old)
        assert set(merged.rows) == {"baseline", "pipeline-2"}
        text = table(BY_NAME["unet-speed"], merged)
        assert "baseline: made with" in text
        assert "2021-01-01" in text
        with pytest.raises(ValueError, match="two benchmarks or scales"):
            replace(new, scale="full").merged(old)

    def test_an_unknown_kind_is_refused(self):
        with pytest.raises(ValueError, match="measured, compiled, predicted"):
            Cell(1.0, "guessed")

    def test_cells_are_marked(self):
        assert shown(Cell(1.5, MEASURED, spread=0.25)) == "1.50 ± 0.250"
        assert shown(Cell(1.5, COMPILED)) == "1.50 ᶜ"
        assert shown(Cell(1.5, PREDICTED)) == "1.50 ᵖ"
        assert shown(None) == "-"

    @pytest.mark.parametrize(
        ("value", "text"),
        [
            (44549160, "44,549,160"),
            (95.862, "95.9"),
            (0.853, "0.853"),
            (1234.5, "1,234"),
            (0.0123, "0.0123"),
            (3.0, "3"),
        ],
    )
    def test_numbers(self, value, text):
        assert number(value) == text

    @pytest.mark.parametrize("ran", [False, True])
    def test_columns_without_a_figure_are_left_out_of_what_ran(self, ran):
        rows = {"baseline": {"predicted samples/s": Cell(3.0, PREDICTED)}}
        text = table(BY_NAME["unet-speed"], self.result(rows if ran else {}))
        assert "| torchgpipe, samples/s |" in text
        assert ("predicted by measured" in text) == (not ran)

    def test_other_scales_show_the_rows_that_ran(self):
        rows = {"baseline": {"samples/s": Cell(3.0, MEASURED)}}
        for scale, shown_rows in (("full", 5), ("small", 1)):
            result = replace(self.result(rows), scale=scale)
            lines = table(BY_NAME["unet-speed"], result).splitlines()
            assert sum(line.startswith("| ") for line in lines) == 2 + shown_rows
            (axes,) = drawn(BY_NAME["unet-speed"], result).axes
            assert len(axes.get_xticks()) == shown_rows

    def test_speed_ups_are_of_cells_of_one_kind(self):
        measured, predicted = Cell(2.0, MEASURED), Cell(3.0, PREDICTED)
        rows = {
            "baseline": {"samples/s": measured, "predicted samples/s": predicted},
            "pipeline-2": {"predicted samples/s": Cell(6.0, PREDICTED)},
        }
        line = next(
            line
            for line in table(BY_NAME["unet-speed"], self.result(rows)).splitlines()
            if line.startswith("| pipeline-2")
        )
        assert "| 2.000 ᵖ |" in line
        assert "3.000" not in line


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
    # Flags of the tests would be in the way of those that the command sets.
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
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


def test_every_table_runs_at_the_tiny_scale(tmp_path):
    """One test, for it is one run: what came out is looked at part by part."""
    words = ["run", "--all", "--scale", "tiny", "--folder", str(tmp_path)]
    shown = run_tiny("benchmarks", *words)
    results = {name: Result.load(tmp_path / f"{name}-tiny.json") for name in BY_NAME}
    for name, result in results.items():
        ran = default_rows(BY_NAME[name], "tiny")
        assert list(result.rows) == ran
        assert set(result.provenance) == set(ran)
        assert all(result.rows.values()), f"{name} has a row without a cell"
        assert f"### {BY_NAME[name].title}" in shown
        picture = (tmp_path / f"{name}-tiny.png").read_bytes()
        assert picture.startswith(b"\x89PNG")

    speed = results["resnet101-speed"].rows["pipeline-2"]
    assert ("samples/s" in speed) == (cores() > 1)  # two stages need two
    if "samples/s" in speed:
        assert speed["samples/s"].kind == MEASURED
        assert speed["samples/s"].detail["compile_s"] > 0
    assert speed["predicted samples/s"].kind == PREDICTED
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


def test_the_page_shows_what_was_saved():
    page = PAGE.read_text()
    assert page == written(page), "type python -m benchmarks page"
    for benchmark in BY_NAME.values():
        assert f"### {benchmark.title}" in page


def test_results_of_the_page_are_of_real_sizes_and_marked():
    for path in FOLDER.glob("*-*.json"):
        name, _, scale = path.stem.rpartition("-")
        if name not in BY_NAME:
            continue
        assert scale in ("full", "small"), "tiny figures say nothing"
        result = Result.load(path)
        for row, cells in result.rows.items():
            if scale == "full" and "cpu" in result.provenance[row]["devices"]:
                assert all(cell.kind != MEASURED for cell in cells.values()), row


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.json")))
def test_results_tell_no_path_of_a_machine(name):
    def texts(value):
        if isinstance(value, dict):
            return [text for part in value.values() for text in texts(part)]
        if isinstance(value, list):
            return [text for part in value for text in texts(part)]
        return [value] if isinstance(value, str) else []

    found = texts(json.loads((FOLDER / f"{name}.json").read_text()))
    assert found
    assert not [text for text in found if Path(text).is_absolute()]
