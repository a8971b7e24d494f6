"""A pipeline on paper: what `print` shows of it."""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

import jpipe
from jpipe import schedules

from .. import reference as ref
from ..listing import actions, gradient_of, moves, plan_of_gradient
from .chains import LayerProfile


def printed(stages, microbatches, schedule="1f1b"):
    devices = [jax.devices()[0]] * stages
    layers = [nn.Dense(2) for _ in range(stages)]
    pipe = jpipe.pipeline(layers, microbatches, schedule=schedule, devices=devices)
    return str(pipe).split("\n"), pipe


@pytest.mark.parametrize(
    ("stages", "microbatches", "schedule"), [(1, 900, "gpipe"), (6, 30, "zb_v")]
)
def test_the_end_of_a_wide_grid_is_left_out(stages, microbatches, schedule):
    lines, pipe = printed(stages, microbatches, schedule)
    whole = str(pipe.schedule).split("\n")[1:]
    assert all(len(line) <= 170 for line in lines)
    for row, shown in zip(whole, lines[-1 - len(whole) : -1], strict=True):
        assert row.startswith(shown.removesuffix(" ..."))
        assert len(shown) > 160
    assert lines[-1] == "(print(pipe.schedule) shows all)"


@pytest.mark.parametrize("name", sorted({*schedules.BY_NAME} - {"forward_only"}))
def test_print_shows_the_actions_that_run_in_their_order(name):
    schedule = schedules.BY_NAME[name](2, 4)
    layers = [ref.dense(3) for _ in range(schedule.num_stages)]
    x, targets = ref.regression(4)
    pipe = jpipe.pipeline(layers, 4, schedule=schedule, remat="full")
    program, _ = gradient_of(pipe, x, targets[:, :3])
    plan = plan_of_gradient(pipe, x, targets[:, :3])
    rows = re.findall(r"^rank \d+ \|(.*)\|$", str(plan), re.MULTILINE)
    drawn = [list(dict.fromkeys(re.findall(r"\w+", row))) for row in rows]
    if schedule.num_stages == schedule.num_ranks:  # then the stage is that of the row
        drawn = [[f"{r}{cell}" for cell in row] for r, row in enumerate(drawn)]
    assert drawn == actions(program)


def test_print_says_who_runs_what_and_the_peaks_of_a_step():
    pipe = jpipe.pipeline(ref.mlp(), 4, balance=[2, 2, 2])
    assert "parameters" not in str(pipe)
    x, targets = ref.regression(8)
    variables = pipe.init(jax.random.key(0), x)
    assert "Dense, tanh" in str(pipe)
    assert "rank 1 |.  F0 F1" in str(pipe)
    total = sum(leaf.size for leaf in jax.tree.leaves(variables))
    assert sum(stage.num_params for stage in pipe.plan.stages) == total
    find = pipe.value_and_grad(ref.mse)
    initialized = str(pipe)
    assert str(find) == initialized
    find(variables, x, targets)
    assert "peak of a step" in str(find)
    assert str(pipe) == initialized
    assert repr(find) == "<jpipe.ValueAndGrad: mse, 4 micro-batches, reduction 'mean'>"
    assert repr(pipe) == "<jpipe.Pipeline: 6 layers in 3 stages, 4 micro-batches, 1f1b>"


def test_a_column_of_which_nothing_is_known_is_left_out():
    x, targets = ref.regression(8)
    for remat, is_known in (("min_cut", True), ("full", False)):
        pipe = jpipe.pipeline(ref.mlp(), 4, balance=[2, 2, 2], remat=remat)
        plan = plan_of_gradient(pipe, x, targets)
        assert ("recomputed flops" in str(plan)) == is_known
    layer = LayerProfile("a", 1.0, 2.0)
    header = str(jpipe.Profile((layer,))).splitlines()[1]
    assert header.split() == ["layer", "forward", "backward", "parameters", "output"]


def carry(d):
    """A layer that reads what all layers read."""
    return {**d, "h": jnp.tanh(d["h"]) * d["mask"]}


def start(x):
    return {"h": x, "mask": jnp.tanh(x) + 1}


@pytest.mark.parametrize("devices", [[0, 1, 2, 3], [0, 1, 0, 1], [0, 0, 0, 0]])
def test_sent_bytes_are_those_of_the_moves_of_a_forward(devices):
    layers = [ref.dense(4), start, carry, carry, carry, lambda d: d["h"]]
    pipe = jpipe.pipeline(
        layers,
        2,
        balance=[2, 1, 1, 2],
        devices=[jax.devices()[i] for i in devices],
        schedule="gpipe",
    )
    x, targets = ref.regression(4)
    program, _ = gradient_of(pipe, x, targets)
    moved_bytes = [0] * 4
    for label, _, _, num_bytes in moves(program):
        if label in ("0F0", "1F0", "2F0", "3F0"):
            moved_bytes[int(label[0])] += num_bytes
    stages = plan_of_gradient(pipe, x, targets).stages
    assert [stage.sent_bytes for stage in stages] == moved_bytes


def test_sent_bytes_count_a_value_once_and_where_it_is_computed():
    def duplicate(x):
        return {"x": x, "y": x}

    layers = [ref.dense(4), duplicate, lambda d: d, lambda d: d["x"] + d["y"]]
    pipe = jpipe.pipeline(layers, 2, balance=[2, 1, 1], schedule="gpipe")
    x, targets = ref.regression(8)
    program, _ = gradient_of(pipe, x, targets)
    activation_bytes = 4 * 4 * 4  # four examples of four numbers
    stages = plan_of_gradient(pipe, x, targets).stages
    sent_bytes = [stage.sent_bytes for stage in stages]
    assert sent_bytes == [activation_bytes, 0, 0]
    # The forward of stage 0 sends one array to stage 2, past stage 1.
    sent = [move for move in moves(program) if move[0] in ("0F0", "1F0")]
    assert sent == [("0F0", 0, 2, activation_bytes)]


@pytest.mark.parametrize(
    ("layer", "numbers"),
    [
        # A mean, or the 64 numbers that it is of.
        (lambda x: jnp.sin(x.mean(-1, keepdims=True)), 1),
        # To add up again takes less than to keep three times what is added up.
        (lambda x: jnp.sin(jnp.cumsum(jnp.tile(x, 3), -1)), 64),
    ],
)
def test_min_cut_keeps_an_input_or_what_follows_from_it(layer, numbers):
    pipe = jpipe.pipeline([ref.dense(64), layer], 2, balance=[1, 1], schedule="gpipe")
    x, targets = ref.regression(8)
    plan = plan_of_gradient(pipe, x, targets, loss=lambda y, targets: jnp.mean(y**2))
    # Of each of four examples.
    assert plan.stages[1].residuals["min_cut"] == 4 * numbers * 4
