"""How cells of the tables are filled: compiled, predicted, measured, searched."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from hypothesis import given
from hypothesis import strategies as st

import jpipe
from benchmarks.cells import largest
from benchmarks.cells.compiled import Peak, Way, _peak_of_rank, peak, workspace
from benchmarks.cells.measure import Measurement, measure, prepare, spread
from benchmarks.cells.predict import Link, Predictor, one_core
from benchmarks.cells.stages import Calls, gradient_of
from benchmarks.experiment import Setting, arrays, random_key
from benchmarks.measured import model_of
from benchmarks.published import BY_NAME
from jpipe._functions._objective import Objective
from jpipe._run._costs import costs_of

from .work import work


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
            gradient_of(pipe, setting.work.loss, *setting.work.specs(setting.batch))
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
        gradient = gradient_of(
            Way("gpipe", "none").pipe(setting),
            setting.work.loss,
            *setting.work.specs(4),
        )
        call = replace(
            Calls(gradient).distinct[0],
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
            gradient_of(pipe, setting.work.loss, *setting.work.specs(setting.batch))
        )
        # F of all but the last, B of the first, B of those between, and the last's.
        assert len(calls.distinct) == 4
        assert len(calls.of) == 2 * 4 * 3 + 3

    def test_on_one_device_stages_count_what_they_would_on_their_own(self):
        # What a stage keeps of its output, the next one keeps as its input.
        layers = [layer for _ in range(3) for layer in (nn.Dense(8), jnp.tanh)]
        setting = Setting(replace(work(), layers=layers), (2, 2, 2), 4, 2)
        loss, batch = setting.work.loss, setting.work.specs(setting.batch)
        together = Way("gpipe", "none").pipe(setting)
        assert len(set(together.devices)) == 1
        apart = jpipe.pipeline(
            layers, 4, balance=(2, 2, 2), schedule="gpipe", remat="none"
        )
        assert len(set(apart.devices)) == 3
        visits, _ = apart._cache.expected(apart._cache.sample(batch[0]))
        variables = tuple(visit.variables for visit in visits)
        find = apart._cache.gradients(Objective(loss))
        real = find(variables, *batch, jax.eval_shape(random_key), True)
        expected = costs_of(real.program, real.works, real.batch, range(3))
        assert Calls(gradient_of(together, loss, *batch)).costs == expected


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

    def test_all_cores_compile_what_one_core_runs(self, monkeypatch):
        if not hasattr(os, "sched_getaffinity"):
            pytest.skip("this system does not say which cores a process may use")
        cores, compile_it = [], jax.stages.Lowered.compile

        def compiled(lowered, *args, **options):
            cores.append(os.sched_getaffinity(0))
            return compile_it(lowered, *args, **options)

        monkeypatch.setattr(jax.stages.Lowered, "compile", compiled)
        spec = jax.ShapeDtypeStruct((8,), jnp.float32)
        assert Predictor(jax.devices()[0])._timed(jax.jit(jnp.sin), (spec,)) > 0
        assert cores == [os.sched_getaffinity(0)]

    def test_programs_that_donate_can_be_timed_again(self):
        setting = Setting(work(), (3, 3), 2, 2)
        made = Predictor(jax.devices()[0], repeats=2).predict(
            setting, Way("1f1b", "except_last"), Link(12e9)
        )
        assert made.throughput > 0


class TestMeasured:
    def compiled(self, setting, way, devices):
        with ThreadPoolExecutor(1) as pool:
            return prepare(setting, way, devices, pool).result()

    def test_the_plain_step_and_stages_on_one_device_train_alike(self):
        one = jax.devices()[:1]
        plain = self.compiled(Setting(work(), (6,), 1, 8), Way("gpipe", "none"), one)
        assert plain.programs == 1
        shared = Setting(work(), (2, 2, 2), 1, 8)
        piped = self.compiled(shared, Way("gpipe", "full"), one)
        assert piped.programs > 1
        steps = plain.start(), piped.start()
        for _ in range(2):
            by_hand, ours = (step() for step in steps)
        for a, b in zip(jax.tree.leaves(by_hand), jax.tree.leaves(ours), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
            assert b.devices() == set(one)

    @pytest.mark.parametrize(("balance", "remat"), [((6,), "none"), ((3, 3), "full")])
    def test_a_step_that_is_timed_compiles_nothing(self, balance, remat, caplog):
        setting = Setting(work(), balance, len(balance), 4)
        compiled = self.compiled(setting, Way("gpipe", remat), jax.devices()[:1])
        step = compiled.start()
        with jax.log_compiles(), caplog.at_level("WARNING"):
            step()
            assert not caplog.records
            jax.jit(lambda x: x - 41)(1.0)
        assert caplog.records, "what is compiled is logged"

    def test_steps_are_counted_up_to_the_limit(self):
        setting = Setting(work(), (3, 3), 2, 4)
        compiled = self.compiled(setting, Way("gpipe", "full"), jax.devices()[:2])
        assert compiled.seconds > 0
        found = measure(compiled, setting.batch, 3)
        assert len(found.seconds) == 3
        assert found.throughput > 0
        assert found.spread is not None
        few = measure(compiled, setting.batch, 3, limit=0.0)
        assert len(few.seconds) == 1
        assert few.spread is None

    def test_a_model_is_parameters_gradients_and_slots(self):
        parameters = 6 * (8 * 8 + 8)
        # Parameters, gradients, two moments and a count.
        expected = parameters, 4 * 4 * parameters + 4
        assert model_of(replace(work(), tx=optax.adam(1e-3))) == expected

    def test_spread_is_half_the_distance_of_the_quartiles(self):
        assert Measurement((1.0, 2.0, 4.0), 8).throughput == 4.0
        assert Measurement((1.0, 2.0, 4.0), 8).spread == pytest.approx((6 - 3) / 2)

    def test_a_batch_is_made_on_its_devices_in_its_dtype(self):
        spec = jax.ShapeDtypeStruct((3,), jnp.bfloat16)
        labels = jax.ShapeDtypeStruct((), jnp.int32)
        images = replace(work(), x=spec, targets=labels, classes=5)
        first, last = jax.devices()[:2]
        x, targets = arrays(Setting(images, (6,), 4, 2), first, last)
        assert (x.shape, x.dtype, x.devices()) == ((8, 3), jnp.bfloat16, {first})
        assert (targets.shape, targets.devices()) == ((8,), {last})
        assert 0 <= targets.min() <= targets.max() < 5
        assert len(jnp.unique(x[:2])) == 6  # random within a micro-batch
        assert (x[:2] == x[6:]).all()

    @pytest.mark.parametrize(
        ("stages", "expected"), [(1, "a"), (2, "ab"), (3, "aab"), (4, "aabb")]
    )
    def test_neighbours_share_devices(self, stages, expected):
        assert "".join(spread("ab", stages)) == expected
