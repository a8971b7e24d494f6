"""Bytes that a step holds: what is read off the list is what is there."""

import dataclasses

import jax.numpy as jnp
import pytest
from flax import linen as nn

import jpipe

from .. import reference as ref
from ..listing import check_exact, counted, gradient_of, live

WIDTH, BATCH, MICROBATCHES = 32, 16, 8
BOUNDARY = BATCH // MICROBATCHES * WIDTH * 4


# What becomes of the statistics is not its subject.
@pytest.mark.filterwarnings("ignore:value_and_grad leaves:UserWarning")
def test_statistics_of_a_narrower_dtype_are_counted(double):
    pipe = jpipe.pipeline([nn.BatchNorm(), ref.dense(4)], 3)
    x, targets = ref.regression(6, jnp.float32)
    check_exact(pipe, x, targets)


def held(schedule, remat):
    """What stages hold, in boundaries; whether it is there is counted."""
    layers = [ref.dense(WIDTH) for _ in range(4)]
    pipe = jpipe.pipeline(layers, MICROBATCHES, schedule=schedule, remat=remat)
    x = jnp.ones((BATCH, WIDTH))
    plan = check_exact(pipe, x, x)
    return [stage.residual_bytes // BOUNDARY for stage in plan.stages]


def test_stages_hold_their_inputs_of_the_micro_batches_in_flight():
    # min(m, p - r) micro-batches; the forward with the loss is a part of its
    # backward, and keeps nothing.
    assert held("1f1b", "full") == [4, 3, 2, 0]
    assert held("gpipe", "full") == [8, 8, 8, 0]
    # The backward of a dense layer needs its input and its weights, no more.
    assert held("1f1b", "none") == [4, 3, 2, 0]


def test_the_count_sees_an_array_that_is_kept_too_long():
    """The count that the tests above rely on does count."""
    pipe = jpipe.pipeline([ref.dense(4), ref.dense(4)], 3)
    program, leaves = gradient_of(pipe, jnp.ones((6, 4)), jnp.ones((6, 4)))
    assert counted(program, leaves) == live(program)[1:]
    program.local_instructions = [
        dataclasses.replace(instruction, frees=())
        for instruction in program.local_instructions
    ]
    kept = counted(program, leaves, ahead=False)
    assert kept[-1][0] > live(program)[-1][0]
