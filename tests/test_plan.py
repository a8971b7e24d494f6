"""A pipeline on paper: what `print` shows of it."""

import jax
import pytest
from flax import linen as nn

import jpipe


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
