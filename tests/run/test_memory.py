"""Bytes that a step holds: what is read off the list is what is there."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import jpipe
from jpipe import schedules
from jpipe._instructions._bytes import live, nbytes, peaks
from jpipe._run._costs import costs_of

from .. import reference as ref
from ..schedules.orders import TRAINING
from .held import check_exact, counted, gradient_of


def test_statistics_of_a_narrower_dtype_are_counted(double):
    pipe = jpipe.pipeline([nn.BatchNorm(), ref.dense(4)], 3)
    x, targets = ref.regression(6, jnp.float32)
    check_exact(pipe, x, targets)


class TestClosedForms:
    width, batch, microbatches = 32, 16, 8
    boundary = batch // microbatches * width * 4

    def pipe(self, **options):
        layers = [ref.dense(self.width) for _ in range(4)]
        return jpipe.pipeline(layers, self.microbatches, **options)

    def held(self, **options):
        pipe, x = self.pipe(**options), jnp.ones((self.batch, self.width))
        check_exact(pipe, x, x)
        return [stage.held_bytes // self.boundary for stage in pipe.plan.stages]

    def test_full_remat_holds_boundary_inputs_only(self):
        # min(m, p - r) micro-batches; the forward with the loss is a part of its
        # backward, and keeps nothing
        assert self.held(schedule="1f1b", remat="full") == [4, 3, 2, 0]
        assert self.held(schedule="gpipe", remat="full") == [8, 8, 8, 0]

    def test_kept_residuals_hold_no_weights_and_nothing_twice(self):
        # The backward of a dense layer needs its input and its weights, no more.
        assert self.held(schedule="1f1b", remat="none") == [4, 3, 2, 0]

    def test_a_split_backward_leaves_input_and_cotangent_of_a_dense_layer(self):
        pipe = self.pipe(schedule="zb_h1", remat="none")
        x = jnp.ones((self.batch, self.width))
        gradient, _ = gradient_of(pipe, x, x)
        costs = costs_of(gradient.program, gradient.works, gradient.batch, range(4))
        pending = [row[0] // self.boundary for row in costs.pending_bytes]
        # Input and cotangent. The first stage has no first half: its cotangent waits.
        assert pending == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("name", "remat"),
    [*zip(TRAINING, itertools.cycle(["full", "min_cut", "none"]), strict=False)],
)
def test_the_simulator_has_the_peaks_of_the_list_whatever_times_are(name, remat):
    stages = schedules.BY_NAME[name](2, 4).num_stages
    layers = [layer for _ in range(stages) for layer in (nn.relu, ref.dense(6))]
    pipe = jpipe.pipeline(layers, 4, balance=[2] * stages, schedule=name, remat=remat)
    x = jnp.ones((10, 6))
    gradient, _ = gradient_of(pipe, x, x)
    where = pipe.schedule.placement
    costs = costs_of(gradient.program, gradient.works, gradient.batch, where)
    slow = [1.0 + 7 * (s % 2) for s in range(stages)]
    uneven = dataclasses.replace(costs, forward=slow, backward=[*reversed(slow)])
    for some in costs, uneven, dataclasses.replace(costs, latency=0.7):
        predicted = pipe.schedule.simulate(some).peak_bytes
        assert list(predicted) == peaks(gradient.program)


def test_the_count_sees_an_array_that_is_kept_too_long():
    """The count that the tests above rely on does count."""
    pipe = jpipe.pipeline([ref.dense(4), ref.dense(4)], 3)
    x, targets = jnp.ones((6, 4)), jnp.ones((6, 4))
    gradient, leaves = gradient_of(pipe, x, targets)
    program = gradient.program
    assert counted(program, leaves) == live(program)[1:]
    program.steps = [step._replace(frees=()) for step in program.steps]
    kept = counted(program, leaves, ahead=False)
    assert kept[-1][0] > live(program)[-1][0]


def test_what_is_held_of_a_stage_is_counted_by_hand():
    layers = [ref.dense(5), ref.dense(4)]
    pipe = jpipe.pipeline(layers, 2, schedule="gpipe", remat="full")
    x, targets = ref.regression(6)
    gradient, _ = gradient_of(pipe, x, targets)
    # Both inputs of the first stage; the other one runs forwards with backwards.
    assert pipe.plan.stages[0].held_bytes == x.nbytes
    assert pipe.plan.stages[1].held_bytes == 0
    start, *_ = live(gradient.program)
    params = sum(map(nbytes, gradient.layout.weights[0].specs))
    first_row = np.dtype(np.int32).itemsize  # what the mini-batch is cut from
    assert start[0] == params + first_row
