"""A pipeline on paper: what `print` shows of it."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

import jpipe
from jpipe import schedules

from . import reference as ref
from .run.held import gradient_of


def printed(stages, microbatches, schedule="1f1b"):
    devices = [jax.devices()[0]] * stages
    layers = [nn.Dense(2) for _ in range(stages)]
    pipe = jpipe.pipeline(layers, microbatches, schedule=schedule, devices=devices)
    return str(pipe).split("\n"), pipe


@pytest.mark.parametrize(
    ("stages", "microbatches", "schedule"),
    [(1, 900, "gpipe"), (4, 64, "interleaved"), (12, 1200, "zb_h1"), (3, 30, "zb_v")],
)
def test_a_wide_grid_is_cut_in_the_middle(stages, microbatches, schedule):
    stages = 2 * stages if schedule in ("interleaved", "zb_v") else stages
    lines, pipe = printed(stages, microbatches, schedule)
    whole = str(pipe.schedule).split("\n")[1:]
    shown = lines[-1 - len(whole) : -1]
    assert all(len(line) <= 170 for line in lines)
    left_out = set()
    for row, line in zip(whole, shown, strict=True):
        start, end = line.split(" ...")
        assert row.startswith(f"{start} ")
        assert row.endswith(end)
        assert end[0] == " "
        left_out.add(len(row) - len(start) - len(end))
    (columns,) = left_out
    says = f"({columns} columns left out; print(pipe.schedule) shows all)"
    assert lines[-1] == says


def test_a_grid_that_can_be_read_is_whole():
    lines, pipe = printed(4, 9)
    assert "\n".join(lines).endswith(str(pipe.schedule))


RUNNING = [name for name in schedules.BY_NAME if name != "forward_only"]


REMATS = ["full", "none", "except_last"]


@pytest.mark.parametrize(
    ("name", "remat"),
    [
        *zip(RUNNING, itertools.cycle(REMATS), strict=False),
        *((name, remat) for name in ("gpipe", "zb_v") for remat in REMATS[1:]),
    ],
)
def test_what_is_drawn_is_what_runs(name, remat):
    """In this order, and each action once."""
    schedule = schedules.BY_NAME[name](2, 4)
    layers = [ref.dense(3) for _ in range(schedule.num_stages)]
    x, targets = ref.regression(4)
    pipe = jpipe.pipeline(layers, 4, schedule=schedule, remat=remat)
    gradient, leaves = gradient_of(pipe, x, targets[:, :3])
    ran = [[] for _ in range(schedule.num_ranks)]

    def observe(instruction, _):
        label = instruction.label
        if not instruction.is_move and not isinstance(label, str):
            rank = schedule.placement[label.stage]
            single = schedule.num_stages == schedule.num_ranks
            ran[rank].append(str(label)[single:] if single else str(label))

    gradient.program(leaves, observe)
    rows = re.findall(r"^rank \d+ \|(.*)\|$", str(pipe), re.MULTILINE)
    drawn = [list(dict.fromkeys(re.findall(r"\w+", row))) for row in rows]
    assert drawn == ran


def test_long_lists_are_shortened():
    def named(number):
        def layer(x):
            return x

        layer.__name__ = f"f{number}"
        return layer

    def stashing(x, number):
        jpipe.stash(f"s{number}", x)
        return x

    def popping(x, number):
        return x + jpipe.pop(f"s{number}")

    into, out = (
        [functools.partial(f, number=number) for number in range(10)]
        for f in (stashing, popping)
    )
    layers = [*map(named, range(9)), *into, *out]
    pipe = jpipe.pipeline(layers, 2, balance=[9, 10, 10])
    pipe.apply(({},) * len(layers), jnp.ones((4, 2)))
    assert " f0, f1, f2, ..., f6, f7, f8 (9) " in str(pipe)
    assert "'s7': stage 1 to 2, 2 more" in str(pipe)
