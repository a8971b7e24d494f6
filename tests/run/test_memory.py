"""Bytes that a step holds: what the simulator predicts is what the executor holds."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

import jpipe
from jpipe import schedules
from jpipe._run import _compile, _execute, _memory

from .. import reference as ref
from ..schedules.orders import TRAINING
from .held import check_exact, counted


def noisy(stages):
    """Dense layers with dropout between: residuals of several kinds."""

    class Noisy(nn.Module):
        @nn.compact
        def __call__(self, x, train: bool):
            x = nn.gelu(ref.dense(12)(x))
            return nn.Dropout(0.5, deterministic=not train)(x)

    return [Noisy() for _ in range(stages - 1)] + [ref.dense(4)]


@pytest.mark.parametrize("name", TRAINING)
@pytest.mark.parametrize("remat", ["full", "none"])
def test_every_schedule_holds_what_the_simulator_says(name, remat):
    pipe = jpipe.pipeline(noisy(4), 4, schedule=name, remat=remat)
    x, targets = ref.regression(8)
    check_exact(pipe, x, targets, {"dropout": jax.random.key(3)})


@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_so_it_does_with_microbatches_of_two_sizes_and_two_kinds(name):
    pipe = jpipe.pipeline(noisy(3), 4, schedule=name, remat="except_last")
    x, targets = ref.regression(10)
    check_exact(pipe, x, targets, {"dropout": jax.random.key(3)})


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "zb_v"])
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("remat", ["full", "none"])
def test_so_it_does_where_halves_have_nothing_to_compute(name, microbatches, remat):
    layers = [
        lambda x: {"x": x[0], "whole": x[1]},  # without parameters, first
        lambda t: t["x"] + t["whole"],
        ref.dense(5),
        jnp.tanh,
        ref.dense(4),
        jnp.sin,
    ]
    pipe = jpipe.pipeline(
        layers, microbatches, schedule=name, remat=remat, in_axes=(0, None)
    )
    x, targets = ref.regression(2 * microbatches)

    def loss(outputs, targets):
        return ref.mse(outputs, targets), {"outputs": outputs}

    check_exact(pipe, (x, jnp.ones(5)), targets, loss=loss, has_aux=True)


@pytest.mark.parametrize("name", TRAINING)
def test_so_it_does_on_one_rank(name):
    stages = schedules.BY_NAME[name](1, 3).num_stages
    pipe = jpipe.pipeline(noisy(stages), 3, schedule=name)
    x, targets = ref.regression(6)
    check_exact(pipe, x, targets, {"dropout": jax.random.key(3)})


def test_so_it_does_with_statistics_of_a_narrower_dtype(double):
    pipe = jpipe.pipeline([nn.BatchNorm(), ref.dense(4)], 3)
    x, targets = ref.regression(6, jnp.float32)
    check_exact(pipe, x, targets)


class TestClosedForms:
    width, batch, microbatches = 32, 16, 8
    boundary = batch // microbatches * width * 4

    def held(self, **options):
        layers = [ref.dense(self.width) for _ in range(4)]
        pipe = jpipe.pipeline(layers, self.microbatches, **options)
        x = jnp.ones((self.batch, self.width))
        timeline = check_exact(pipe, x, x)
        plan = pipe.plan
        assert plan.peak_bytes == tuple(
            (str(device), int(peak))
            for device, peak in zip(pipe.devices, timeline.peak_bytes, strict=True)
        )
        return [stage.held_bytes // self.boundary for stage in plan.stages]

    def test_full_remat_holds_boundary_inputs_only(self):
        # min(m, p - r) micro-batches
        assert self.held(schedule="1f1b") == [4, 3, 2, 1]
        assert self.held(schedule="gpipe") == [8, 8, 8, 8]

    def test_kept_residuals_hold_no_weights_and_nothing_twice(self):
        # The backward of a dense layer needs its input and its weights, no more.
        assert self.held(schedule="1f1b", remat="none") == [4, 3, 2, 1]

    def test_a_split_backward_leaves_input_and_cotangent_of_a_dense_layer(self):
        pipe = jpipe.pipeline(
            [ref.dense(self.width) for _ in range(4)],
            self.microbatches,
            schedule="zb_h1",
            remat="none",
        )
        x = jnp.ones((self.batch, self.width))
        _, program = counted(pipe, x, x)
        costs = _memory.costs_of(program)
        pending = [row[0] // self.boundary for row in costs.pending_bytes]
        # Input and cotangent. The first stage has no first half: its cotangent waits.
        assert pending == [2, 2, 2, 2]


def test_devices_that_serve_several_ranks_hold_the_sum():
    devices = [jax.devices()[i] for i in (0, 1, 0, 1)]
    pipe = jpipe.pipeline([ref.dense(8) for _ in range(4)], 4, devices=devices)
    x = jnp.ones((8, 8))
    meter, _ = counted(pipe, x, x)
    counts = [[row[0] + row[2], row[1] + row[3]] for row in meter.ranks()]
    assert pipe.plan.peak_bytes == tuple(
        (str(device), max(column))
        for device, column in zip(devices[:2], zip(*counts, strict=True), strict=True)
    )


def test_the_meter_sees_an_array_that_is_kept_too_long():
    """The count that the tests above rely on does count."""

    def forgetful(step, live):
        held = live.held[step.stage][step.microbatch]
        _execute.backward(step, live)
        live.held[step.stage][step.microbatch] = held

    pipe = jpipe.pipeline([ref.dense(4), ref.dense(4)], 3)
    x, targets = jnp.ones((6, 4)), jnp.ones((6, 4))
    _, program = counted(pipe, x, targets)
    timeline = pipe.schedule.simulate(_memory.costs_of(program))
    (*_, right) = (event.bytes for event in timeline.memory if event.rank == 0)
    for i, step in enumerate(program.steps):
        if step.run is _execute.backward:
            program.steps[i] = step._replace(run=forgetful)
    meter, _ = counted(pipe, x, targets)
    assert meter.ranks()[-1][0] > right


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_a_tied_module_twice_in_one_stage_is_counted_once(schedule):
    twice = ref.dense(5)
    layers = [twice, jnp.tanh, twice, jnp.sin, ref.dense(4)]
    pipe = jpipe.pipeline(layers, 3, balance=[3, 2], schedule=schedule)
    x, targets = ref.regression(6)
    check_exact(pipe, x, targets)


@pytest.mark.parametrize("name", ["1f1b", "zb_v"])
def test_what_a_step_has_traced_is_not_traced_for_the_count(name, monkeypatch):
    stages = 4 if name == "zb_v" else 2
    devices = jax.devices()[:2] * (stages // 2)
    layers = [ref.dense(4) for _ in range(stages)]
    pipe = jpipe.pipeline(layers, 4, schedule=name, devices=devices)
    x, targets = ref.regression(8)
    _, program = counted(pipe, x, targets)
    traced = []
    accumulate = _compile.accumulate

    def noted(sums, new):
        traced.append(len(sums))
        return accumulate(sums, new)

    monkeypatch.setattr(_compile, "accumulate", noted)
    _memory.costs_of(program)
    assert not traced
    # Of another mini-batch everything is traced: the count can fail.
    counted(pipe, x[:4], targets[:4])
    assert traced
