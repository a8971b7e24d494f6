"""Schedules are tables: their test is a drawing, and a catalogue of properties."""

import dataclasses
import itertools
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

import jpipe
from jpipe.schedules import (
    BY_NAME,
    Action,
    Costs,
    Schedule,
    ScheduleError,
    dualpipe_v,
    eager_one_f_one_b,
    forward_only,
    gpipe,
    interleaved,
    looped_bfs,
    named,
    one_f_one_b,
    zb_h1,
    zb_v,
)

# ------------------------------------------------------------------ drawings
#
# The literature's pictures for four ranks and eight micro-batches. One column is one
# unit of time: a forward takes one, a backward two, each of its halves one. Upper
# case is the first chunk of a rank's layers, lower case the second.

PICTURES = {
    "gpipe": """\
r0 |F0 F1 F2 F3 F4 F5 F6 F7 .  .  .  .  .  .  .  .  .  B0 B0 B1 B1 B2 B2 B3 B3 B4 B4 B5 B5 B6 B6 B7 B7 |
r1 |.  F0 F1 F2 F3 F4 F5 F6 F7 .  .  .  .  .  .  B0 B0 B1 B1 B2 B2 B3 B3 B4 B4 B5 B5 B6 B6 B7 B7 .  .  |
r2 |.  .  F0 F1 F2 F3 F4 F5 F6 F7 .  .  .  B0 B0 B1 B1 B2 B2 B3 B3 B4 B4 B5 B5 B6 B6 B7 B7 .  .  .  .  |
r3 |.  .  .  F0 F1 F2 F3 F4 F5 F6 F7 B0 B0 B1 B1 B2 B2 B3 B3 B4 B4 B5 B5 B6 B6 B7 B7 .  .  .  .  .  .  |""",  # noqa: E501
    "1f1b": """\
r0 |F0 F1 F2 F3 .  .  .  .  .  .  B0 B0 F4 B1 B1 F5 B2 B2 F6 B3 B3 F7 B4 B4 .  B5 B5 .  B6 B6 .  B7 B7 |
r1 |.  F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 F4 B2 B2 F5 B3 B3 F6 B4 B4 F7 B5 B5 .  B6 B6 .  B7 B7 .  .  |
r2 |.  .  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 F4 B3 B3 F5 B4 B4 F6 B5 B5 F7 B6 B6 .  B7 B7 .  .  .  .  |
r3 |.  .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 F4 B4 B4 F5 B5 B5 F6 B6 B6 F7 B7 B7 .  .  .  .  .  .  |""",  # noqa: E501
    "interleaved": """\
r0 |F0 F1 F2 F3 f0 f1 f2 f3 F4 F5 F6 .  .  .  b0 b0 F7 b1 b1 .  f4 b2 b2 f5 b3 b3 f6 B0 B0 f7 B1 B1 B2 B2 .  B3 B3 .  b4 b4 .  b5 b5 .  b6 b6 .  b7 b7 B4 B4 B5 B5 B6 B6 B7 B7 |
r1 |.  F0 F1 F2 F3 f0 f1 f2 f3 F4 .  .  b0 b0 F5 b1 b1 F6 b2 b2 F7 b3 b3 f4 B0 B0 f5 B1 B1 f6 B2 B2 f7 B3 B3 .  b4 b4 .  b5 b5 .  b6 b6 .  b7 b7 B4 B4 B5 B5 B6 B6 B7 B7 .  .  |
r2 |.  .  F0 F1 F2 F3 f0 f1 f2 .  b0 b0 f3 b1 b1 F4 b2 b2 F5 b3 b3 F6 B0 B0 F7 B1 B1 f4 B2 B2 f5 B3 B3 f6 b4 b4 f7 b5 b5 .  b6 b6 .  b7 b7 B4 B4 B5 B5 B6 B6 B7 B7 .  .  .  .  |
r3 |.  .  .  F0 F1 F2 F3 f0 b0 b0 f1 b1 b1 f2 b2 b2 f3 b3 b3 F4 B0 B0 F5 B1 B1 F6 B2 B2 F7 B3 B3 f4 b4 b4 f5 b5 b5 f6 b6 b6 f7 b7 b7 B4 B4 B5 B5 B6 B6 B7 B7 .  .  .  .  .  .  |""",  # noqa: E501
    # The literature's backwards descend here; ours ascend everywhere, which takes as
    # long and sums the same bits as every other schedule.
    "looped_bfs": """\
r0 |F0 F1 F2 F3 F4 F5 F6 F7 f0 f1 f2 f3 f4 f5 f6 f7 .  .  .  .  .  .  .  .  .  b0 b0 b1 b1 b2 b2 b3 b3 b4 b4 b5 b5 b6 b6 b7 b7 B0 B0 B1 B1 B2 B2 B3 B3 B4 B4 B5 B5 B6 B6 B7 B7 |
r1 |.  F0 F1 F2 F3 F4 F5 F6 F7 f0 f1 f2 f3 f4 f5 f6 f7 .  .  .  .  .  .  b0 b0 b1 b1 b2 b2 b3 b3 b4 b4 b5 b5 b6 b6 b7 b7 B0 B0 B1 B1 B2 B2 B3 B3 B4 B4 B5 B5 B6 B6 B7 B7 .  .  |
r2 |.  .  F0 F1 F2 F3 F4 F5 F6 F7 f0 f1 f2 f3 f4 f5 f6 f7 .  .  .  b0 b0 b1 b1 b2 b2 b3 b3 b4 b4 b5 b5 b6 b6 b7 b7 B0 B0 B1 B1 B2 B2 B3 B3 B4 B4 B5 B5 B6 B6 B7 B7 .  .  .  .  |
r3 |.  .  .  F0 F1 F2 F3 F4 F5 F6 F7 f0 f1 f2 f3 f4 f5 f6 f7 b0 b0 b1 b1 b2 b2 b3 b3 b4 b4 b5 b5 b6 b6 b7 b7 B0 B0 B1 B1 B2 B2 B3 B3 B4 B4 B5 B5 B6 B6 B7 B7 .  .  .  .  .  .  |""",  # noqa: E501
    "zb_h1": """\
r0 |F0 F1 F2 F3 .  .  .  I0 W0 F4 I1 W1 F5 I2 W2 F6 I3 W3 F7 I4 W4 I5 W5 I6 W6 I7 W7 |
r1 |.  F0 F1 F2 .  .  I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 F6 I4 W3 F7 I5 W4 I6 W5 I7 W6 W7 |
r2 |.  .  F0 F1 .  I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 F6 I5 W3 F7 I6 W4 I7 W5 W6 W7 |
r3 |.  .  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 F6 I6 W3 F7 I7 W4 W5 W6 W7 |""",  # noqa: E501
    "zb_h2": """\
r0 |F0 F1 F2 F3 F4 F5 F6 I0 W0 F7 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 I6 W6 I7 W7 .  .  .  |
r1 |.  F0 F1 F2 F3 F4 I0 F5 I1 F6 I2 W0 F7 I3 W1 I4 W2 I5 W3 I6 W4 I7 W5 W6 W7 .  .  |
r2 |.  .  F0 F1 F2 I0 F3 I1 F4 I2 F5 I3 F6 I4 W0 F7 I5 W1 I6 W2 I7 W3 W4 W5 W6 W7 .  |
r3 |.  .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 F5 I5 F6 I6 W0 F7 I7 W1 W2 W3 W4 W5 W6 W7 |""",  # noqa: E501
    "zb_v": """\
r0 |F0 F1 F2 F3 F4 F5 F6 f0 i0 w0 f1 i1 w1 f2 i2 w2 f3 i3 w3 F7 I0 W0 f4 i4 w4 I1 W1 f5 i5 w5 I2 W2 f6 i6 w6 I3 W3 f7 i7 w7 I4 W4 I5 W5 I6 W6 I7 W7 .  .  .  |
r1 |.  F0 F1 F2 F3 F4 f0 F5 f1 i0 w0 f2 i1 w1 f3 i2 w2 F6 I0 W0 f4 i3 w3 F7 I1 W1 f5 i4 w4 I2 W2 f6 i5 w5 I3 W3 f7 i6 w6 I4 i7 I5 W4 I6 W5 I7 W6 w7 W7 .  .  |
r2 |.  .  F0 F1 F2 f0 F3 f1 F4 f2 i0 w0 f3 i1 w1 F5 I0 W0 f4 i2 w2 F6 I1 W1 f5 i3 w3 F7 I2 W2 f6 i4 w4 I3 W3 f7 i5 w5 I4 i6 I5 i7 I6 W4 I7 W5 w6 w7 W6 W7 .  |
r3 |.  .  .  F0 f0 F1 f1 F2 f2 F3 f3 i0 w0 F4 I0 W0 f4 i1 w1 F5 I1 W1 f5 i2 w2 F6 I2 W2 f6 i3 w3 F7 I3 W3 f7 i4 w4 I4 i5 I5 i6 I6 i7 I7 W4 w5 w6 w7 W5 W6 W7 |""",  # noqa: E501
    "dualpipe_v": """\
r0 |F0 F1 F2 F3 F4 F5 F6 f0 i0 w0 f1 i1 w1 f2 i2 w2 f3 F7 b3 b3 f4 B0 B0 b4 b4 f5 .  B1 B1 b5 b5 f6 .  B2 B2 b6 b6 f7 .  B3 B3 b7 b7 I4 W4 I5 W5 I6 W6 I7 W7 |
r1 |.  F0 F1 F2 F3 F4 f0 F5 f1 i0 w0 f2 i1 w1 f3 F6 b2 b2 f4 B0 B0 F7 b3 b3 f5 B1 B1 b4 b4 f6 .  B2 B2 b5 b5 f7 .  B3 B3 b6 b6 B4 B4 i7 I5 w7 I6 W5 I7 W6 W7 |
r2 |.  .  F0 F1 F2 f0 F3 f1 F4 f2 i0 w0 f3 F5 b1 b1 f4 B0 B0 F6 b2 b2 f5 B1 B1 F7 b3 b3 f6 B2 B2 b4 b4 f7 .  B3 B3 b5 b5 B4 B4 b6 b6 I5 i7 I6 W5 I7 w7 W6 W7 |
r3 |.  .  .  F0 f0 F1 f1 F2 f2 F3 f3 F4 b0 b0 f4 B0 B0 F5 b1 b1 f5 B1 B1 F6 b2 b2 f6 B2 B2 F7 b3 b3 f7 B3 B3 b4 b4 B4 B4 b5 b5 B5 B5 i6 I6 i7 I7 w6 W6 w7 W7 |""",  # noqa: E501
}

# Where the literature draws none: what each rank starts with tells them apart.
ORDERS = {
    "eager_1f1b": """\
0F0 0F1 0F2 0F3 0F4 0F5 0F6 0B0 0F7 0B1 0B2 0B3 0B4 0B5 0B6 0B7
1F0 1F1 1F2 1F3 1F4 1B0 1F5 1B1 1F6 1B2 1F7 1B3 1B4 1B5 1B6 1B7
2F0 2F1 2F2 2B0 2F3 2B1 2F4 2B2 2F5 2B3 2F6 2B4 2F7 2B5 2B6 2B7
3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5 3F6 3B6 3F7 3B7""",
    "forward_only": """\
0F0 0F1 0F2 0F3 0F4 0F5 0F6 0F7
1F0 1F1 1F2 1F3 1F4 1F5 1F6 1F7
2F0 2F1 2F2 2F3 2F4 2F5 2F6 2F7
3F0 3F1 3F2 3F3 3F4 3F5 3F6 3F7""",
}

IN_A_V = {"zb_v", "dualpipe_v"}
IN_A_LOOP = {"interleaved", "looped_bfs"}
ON_A_LINE = set(BY_NAME) - IN_A_V - IN_A_LOOP


def stage_of(name: str, num_ranks: int, rank: int, chunk: int) -> int:
    """Which stage a chunk of a rank is: round the ranks, or down and up again."""
    if name in IN_A_V and chunk:
        return 2 * num_ranks - 1 - rank
    return chunk * num_ranks + rank


def cells(picture: str) -> list[list[str]]:
    """The columns of each rank of a picture."""
    lines = [line for line in picture.splitlines() if "|" in line]
    return [line.split("|")[1].split() for line in lines]


def drawn(name: str, picture: str) -> list[dict[Action, tuple[int, int]]]:
    """The actions of each rank in order, each with the columns where it is drawn."""
    grid = cells(picture)
    rows: list[dict[Action, tuple[int, int]]] = [{} for _ in grid]
    for rank, line in enumerate(grid):
        for column, cell in enumerate(line):
            if cell == ".":
                continue
            stage = stage_of(name, len(grid), rank, int(cell[0].islower()))
            action = Action(cell[0].upper(), stage, int(cell[1:]))
            start, _ = rows[rank].get(action, (column, None))
            rows[rank][action] = (start, column + 1)
    return rows


@pytest.mark.parametrize("name", PICTURES)
def test_four_ranks_and_eight_microbatches_run_as_published(name):
    picture = drawn(name, PICTURES[name])
    schedule = BY_NAME[name](4, 8)
    assert [list(row) for row in schedule.rows] == [list(row) for row in picture]
    timeline = schedule.simulate()
    for row in picture:
        for action, columns in row.items():
            assert (timeline.start[action], timeline.end[action]) == columns


@pytest.mark.parametrize("name", sorted(ON_A_LINE & set(PICTURES)))
def test_a_schedule_prints_as_published(name):
    assert cells(str(BY_NAME[name](4, 8))) == cells(PICTURES[name])


@pytest.mark.parametrize("name", ORDERS)
def test_four_ranks_and_eight_microbatches_are_in_this_order(name):
    assert BY_NAME[name](4, 8).to_text() == ORDERS[name]


def test_every_schedule_of_the_catalogue_is_drawn_or_written_down():
    assert set(PICTURES) | set(ORDERS) == set(BY_NAME)


@pytest.mark.parametrize(
    ("schedule", "order"),
    [
        pytest.param(gpipe(1, 3), "0F0 0F1 0F2 0B0 0B1 0B2", id="gpipe, one rank"),
        pytest.param(one_f_one_b(1, 3), "0F0 0B0 0F1 0B1 0F2 0B2", id="1f1b, one rank"),
        pytest.param(
            zb_h1(1, 2), "0F0 0I0 0W0 0F1 0I1 0W1", id="zb_h1, one rank: no lag"
        ),
        # With one micro-batch there is nothing to choose.
        pytest.param(gpipe(3, 1), "0F0 0B0\n1F0 1B0\n2F0 2B0", id="gpipe, m=1"),
        pytest.param(one_f_one_b(3, 1), "0F0 0B0\n1F0 1B0\n2F0 2B0", id="1f1b, m=1"),
        pytest.param(
            gpipe(4, 2),
            "0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1\n2F0 2F1 2B0 2B1\n3F0 3F1 3B0 3B1",
            id="gpipe, fewer micro-batches than ranks",
        ),
        pytest.param(
            one_f_one_b(4, 2),
            "0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1\n2F0 2F1 2B0 2B1\n3F0 3B0 3F1 3B1",
            id="1f1b, fewer micro-batches than ranks",
        ),
        pytest.param(
            zb_h1(3, 1),
            "0F0 0I0 0W0\n1F0 1I0 1W0\n2F0 2I0 2W0",
            id="zb_h1, fewer micro-batches than ranks",
        ),
        pytest.param(
            interleaved(2, 1),
            "0F0 2F0 2B0 0B0\n1F0 3F0 3B0 1B0",
            id="interleaved, a group that is not full",
        ),
    ],
)
def test_small_cases_have_these_orders(schedule, order):
    assert schedule.to_text() == order


def test_picture_names_the_stage_where_a_rank_has_several():
    v_shape = Schedule.from_text("0F0 2F0 2B0 0B0\n1F0 1B0", name="v")
    assert v_shape.placement == (0, 1, 0)
    assert str(v_shape) == (
        "v: 2 ranks, 3 stages, 1 micro-batch, bubble 50.0 %\n"
        "rank 0 |0F0 .   2F0 2B0 2B0 .   .   0B0 0B0|\n"
        "rank 1 |.   1F0 .   .   .   1B0 1B0 .   .  |"
    )


# ----------------------------------------------------------------- catalogue

every_name = pytest.mark.parametrize("name", BY_NAME)


def fewest(name: str, num_ranks: int) -> int:
    """The fewest micro-batches that a schedule is made for."""
    return 2 * num_ranks if name == "dualpipe_v" else 1


def sizes(name: str) -> Iterator[tuple[int, int]]:
    """Ranks and micro-batches: fewer, as many, more, multiples and others."""
    for p in range(1, 7):
        first = fewest(name, p)
        yield from ((p, m) for m in range(first, first + 13))


def sums(row: tuple[Action, ...], num_stages: int) -> Iterator[list[int]]:
    """The micro-batches that each stage adds up: losses, then gradients."""
    for stage in range(num_stages):
        for ops in ("F", "BW"):
            yield [a.microbatch for a in row if a.stage == stage and a.op in ops]


def closure(action: Action, num_stages: int, split: set[Action]) -> set[Action]:
    """All that must have run before an action, whatever the ranks."""
    found: set[Action] = set()
    todo = [action]
    while todo:
        new = set(reads(todo.pop(), num_stages, split)) - found
        found |= new
        todo += new
    return found


def reads(action: Action, num_stages: int, split: set[Action]) -> list[Action]:
    """What an action waits for, written again here to check the library's.

    Args:
      action: that waits.
      num_stages: the number of stages.
      split: the first halves (I) that there are; other backwards are whole.
    """
    op, stage, i = action
    if op == "F":
        return [Action("F", stage - 1, i)] if stage else []
    if op == "W":
        return [Action("I", stage, i)]
    found = [Action("F", stage, i)]
    if stage + 1 < num_stages:
        half = Action("I", stage + 1, i)
        found.append(half if half in split else Action("B", stage + 1, i))
    return found


def halves(schedule: Schedule) -> set[Action]:
    return {action for row in schedule.rows for action in row if action.op == "I"}


@every_name
def test_every_stage_is_where_its_shape_puts_it(name):
    for p, m in sizes(name):
        schedule = BY_NAME[name](p, m)
        chunks = 1 if name in ON_A_LINE else 2
        assert (schedule.name, schedule.num_microbatches) == (name, m)
        assert (schedule.num_ranks, schedule.num_stages) == (p, chunks * p)
        assert {
            stage_of(name, p, rank, chunk): rank
            for rank in range(p)
            for chunk in range(chunks)
        } == dict(enumerate(schedule.placement))


@every_name
def test_runs_everything_once_for_any_number_of_microbatches(name):
    whole = {"zb_h1": False, "zb_h2": False, "zb_v": False, "dualpipe_v": None}
    for p, m in sizes(name):
        schedule = BY_NAME[name](p, m)
        assert schedule.validate() is schedule
        ran = Counter(
            (action, rank) for rank, row in enumerate(schedule.rows) for action in row
        )
        assert set(ran.values()) == {1}
        expected = set()
        for stage, rank in enumerate(schedule.placement):
            for i in range(m):
                f, b, half, rest = (Action(op, stage, i) for op in "FBIW")
                is_whole = whole.get(name, True)
                if is_whole is None:
                    is_whole = (b, rank) in ran
                backward = [b] if is_whole else [half, rest]
                todo = [f] if name == "forward_only" else [f, *backward]
                expected |= {(action, rank) for action in todo}
        assert set(ran) == expected


@every_name
def test_losses_and_gradients_are_summed_in_ascending_order(name):
    # So that all schedules give the same bits.
    for p, m in sizes(name):
        schedule = BY_NAME[name](p, m)
        for rank, row in enumerate(schedule.rows):
            for order in sums(row, schedule.num_stages):
                assert order == sorted(order)
            stages = schedule.placement.count(rank)
            added = sum(map(len, sums(row, schedule.num_stages)))
            assert added == m * stages * (1 if name == "forward_only" else 2)


@every_name
def test_no_action_comes_before_what_it_reads(name):
    for p, m in sizes(name):
        schedule = BY_NAME[name](p, m)
        order = schedule.simulate().order()
        place = {action: i for i, action in enumerate(order)}
        split = halves(schedule)
        assert len(order) == len(place) == sum(map(len, schedule.rows))
        for row in schedule.rows:
            assert sorted(row, key=place.__getitem__) == list(row)
            for action in row:
                for read in reads(action, schedule.num_stages, split):
                    assert place[read] < place[action]


@every_name
def test_text_and_json_are_read_back(name):
    for p, m in sizes(name):
        schedule = BY_NAME[name](p, m)
        assert Schedule.from_text(schedule.to_text(), name) == schedule
        assert Schedule.from_json(schedule.to_json()) == schedule


@every_name
def test_inference_is_the_forwards_in_the_same_order(name):
    for p, m in sizes(name):
        schedule = BY_NAME[name](p, m)
        forwards = schedule.forwards().validate()
        assert forwards.forward_only
        assert forwards.rows == tuple(
            tuple(action for action in row if action.op == "F") for row in schedule.rows
        )
        if name in ON_A_LINE:
            assert forwards.simulate().makespan == m - 1 + p
            assert forwards.rows == forward_only(p, m).rows


def test_the_name_of_a_forward_pass_tells_where_it_comes_from():
    assert gpipe(2, 2).forwards().name == "gpipe (forward)"
    schedule = forward_only(2, 2)
    assert schedule.forwards() is schedule


def test_text_without_a_backward_is_for_inference():
    assert Schedule.from_text("0F0 0F1\n1F0 1F1").forward_only
    assert not Schedule.from_text("0F0 0F1 0B0 0B1").forward_only


@every_name
def test_builders_refuse_less_than_one_and_name_all_that_is_wrong(name):
    group = ", group=0" if name == "interleaved" else ""
    says = f"{name}: num_ranks=0, num_microbatches=-2{group}: must be at least 1"
    with pytest.raises(ScheduleError, match=f"^{re.escape(says)}$"):
        BY_NAME[name](0, -2)
    says = f"{name}: num_microbatches=0: must be at least 1"
    with pytest.raises(ScheduleError, match=f"^{re.escape(says)}$"):
        BY_NAME[name](1, 0)


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: interleaved(2, 2, 0), "interleaved: num_chunks=0: must be"),
        (lambda: interleaved(2, 2, 2, 0), "interleaved: group=0: must be"),
        (
            lambda: interleaved(2, 2, -1, -1),
            "interleaved: num_chunks=-1, group=-1: must be",
        ),
        (lambda: looped_bfs(2, 2, 0), "looped_bfs: num_chunks=0: must be"),
    ],
)
def test_builders_refuse_less_than_one_chunk(build, says):
    with pytest.raises(ScheduleError, match=f"^{says} at least 1$"):
        build()


def test_dualpipe_v_needs_two_microbatches_per_rank():
    for p in range(1, 6):
        dualpipe_v(p, 2 * p).validate()
        says = (
            f"dualpipe_v: num_microbatches={2 * p - 1}: needs at least "
            f"2 * num_ranks = {2 * p}"
        )
        with pytest.raises(ScheduleError, match=f"^{re.escape(says)}$"):
            dualpipe_v(p, 2 * p - 1)


def test_zb_v_of_few_microbatches_is_that_of_enough_without_the_others():
    for p in range(2, 6):
        enough = zb_v(p, 2 * p - 1)
        for m in range(1, 2 * p - 1):
            assert zb_v(p, m).rows == tuple(
                tuple(action for action in row if action.microbatch < m)
                for row in enough.rows
            )


def test_interleaved_with_one_chunk_is_1f1b():
    # The formulas for more chunks would give the eager order.
    for p, m in sizes("interleaved"):
        assert interleaved(p, m, 1) == one_f_one_b(p, m)
    assert interleaved(4, 8, 1) != eager_one_f_one_b(4, 8)


def test_chunked_schedules_run_with_any_number_of_chunks():
    for p, m, v in itertools.product(range(1, 5), range(1, 10), range(1, 5)):
        assert interleaved(p, m, v).validate().num_stages == v * p
        assert looped_bfs(p, m, v).validate().num_stages == v * p


def test_groups_of_as_many_microbatches_as_ranks_or_more_never_wait_for_ever():
    for p, m, v in itertools.product(range(1, 5), range(1, 10), range(2, 4)):
        for group in range(p, m + 2):
            interleaved(p, m, v, group).validate()


def test_a_group_with_fewer_microbatches_than_ranks_is_refused_with_the_cycle():
    with pytest.raises(ScheduleError) as refusal:
        interleaved(4, 8, group=2)
    assert str(refusal.value) == (
        "schedule 'interleaved' cannot run:\n"
        "  * E9 the schedule waits for ever: "
        "rank 0: 4F3 waits for 3F3, which rank 3 runs after 3B0; "
        "rank 3: 3B0 waits for 4B0, which rank 0 runs after 4F3"
    )


def test_a_schedule_is_found_by_its_name_and_by_that_of_its_function():
    for name, builder in BY_NAME.items():
        assert named(name) is builder
        assert named(builder.__name__) is builder
    assert named("one_f_one_b") is one_f_one_b


def test_an_unknown_name_is_answered_with_all_names():
    with pytest.raises(
        ValueError, match=r"^unknown schedule 'gpip': choose"
    ) as refusal:
        named("gpip")
    assert re.findall(r"'(\w+)'", str(refusal.value)) == ["gpip", *BY_NAME]


# ------------------------------------------------------------------- actions


@given(st.sampled_from("FBIW"), st.integers(0, 10**6), st.integers(0, 10**6))
def test_action_reads_what_it_prints(op, stage, microbatch):
    action = Action(op, stage, microbatch)
    assert str(action) == repr(action) == f"{stage}{op}{microbatch}"
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize(
    "text",
    ["", "F0", "2F", "2X0", "2f0", "-1F0", "2 F0", " 2F0", "2F0\n", "2F0junk", "2F0.5"],
)
def test_action_refuses_anything_else(text):
    says = f"{text!r} is no action: write stage, op (F, B, I, W) and micro-batch"
    with pytest.raises(ValueError, match=re.escape(says)):
        Action.parse(text)


# --------------------------------------------------- what the validator refuses


def by_hand(text: str, num_microbatches: int, placement=None, **fields) -> Schedule:
    """A schedule that nobody has checked, whatever its cells are."""
    rows = tuple(
        tuple(
            Action(op, int(stage), int(i))
            for stage, op, i in re.findall(r"(-?\d+)([A-Z])(-?\d+)", line)
        )
        for line in text.split("\n")
    )
    placement = tuple(range(len(rows))) if placement is None else placement
    return Schedule("mine", len(placement), num_microbatches, placement, rows, **fields)


def refusal_of(schedule: Schedule, **limits) -> str:
    with pytest.raises(ScheduleError) as refusal:
        schedule.validate(**limits)
    first, _, faults = str(refusal.value).partition("\n")
    assert first == f"schedule {schedule.name!r} cannot run:"
    return faults


ASCENDING = "losses and gradients are summed in ascending order of micro-batches"

REFUSED = {
    "E1 of an unknown op": (
        by_hand("0F0 0B0 0R0", 1),
        """\
  * E1 0R0: the ops are F, B, I, W (rank 0, position 2)
      rank 0: 0F0 0B0 0R0
                      ^^^""",
    ),
    "E2 of a stage past the last and one before the first": (
        by_hand("0F0 0B0\n1F0 2F0 1B0 -1F0", 1),
        """\
  * E2 2F0: the stages are 0 to 1 (rank 1, position 1)
      rank 1: 1F0 2F0 1B0 -1F0
                  ^^^
  * E2 -1F0: the stages are 0 to 1 (rank 1, position 3)
      rank 1: 1F0 2F0 1B0 -1F0
                          ^^^^""",
    ),
    "E3 of a micro-batch past the last and one before the first": (
        by_hand("0F0 0B0 0F1 0B-1", 1),
        """\
  * E3 0F1: the micro-batches are 0 to 0 (rank 0, position 2)
      rank 0: 0F0 0B0 0F1 0B-1
                      ^^^
  * E3 0B-1: the micro-batches are 0 to 0 (rank 0, position 3)
      rank 0: 0F0 0B0 0F1 0B-1
                          ^^^^""",
    ),
    "E4 of a stage on another rank": (
        by_hand("0F0 1F0 0B0\n1B0", 1),
        """\
  * E4 1F0: stage 1 is placed on rank 1 (rank 0, position 1)
      rank 0: 0F0 1F0 0B0
                  ^^^""",
    ),
    "E4 of a placement for fewer stages": (
        dataclasses.replace(gpipe(2, 1), placement=(0,)),
        "  * E4 placement has 1 entries for 2 stages",
    ),
    "E4 of a placement on ranks that do not exist": (
        by_hand("0F0 0B0", 1, placement=(3,)),
        """\
  * E4 stages [0] are placed on ranks that are not 0 to 0
  * E4 0F0: stage 0 is placed on rank 3 (rank 0, position 0)
      rank 0: 0F0 0B0
              ^^^
  * E4 0B0: stage 0 is placed on rank 3 (rank 0, position 1)
      rank 0: 0F0 0B0
                  ^^^""",
    ),
    "E5 of a forward": (by_hand("0F0 0B0\n1B0", 1), "  * E5 1F0 never runs"),
    "E5 of a backward": (
        by_hand("0F0\n1F0 1B0", 1),
        "  * E5 0B0 never runs, nor do 0I0 and 0W0",
    ),
    "E5 of one half of a backward": (
        by_hand("0F0 0I0\n1F0 1W0", 1),
        "  * E5 0W0 never runs, 0I0 does\n  * E5 1I0 never runs, 1W0 does",
    ),
    "E5 of a micro-batch": (
        by_hand("0F0 0B0", 2),
        "  * E5 0F1 never runs\n  * E5 0B1 never runs, nor do 0I1 and 0W1",
    ),
    "E6 of an action that runs three times": (
        by_hand("0F0 0B0 0F0 0F0", 1),
        """\
  * E6 0F0 runs 3 times (rank 0, position 2)
      rank 0: 0F0 0B0 0F0 0F0
                      ^^^
  * E6 0F0 runs 3 times (rank 0, position 3)
      rank 0: 0F0 0B0 0F0 0F0
                          ^^^""",
    ),
    "E7 of a whole backward beside its halves": (
        by_hand("0F0 0B0 0I0 0W0\n1F0 1B0 1W0", 1),
        "  * E7 0B0 and 0I0 and 0W0 both run\n  * E7 1B0 and 1W0 both run",
    ),
    "E7 of a backward in inference": (
        by_hand("0F0 0B0", 1, forward_only=True),
        "  * E7 0B0 in a schedule that is forward_only",
    ),
    "E8 of a backward before its forward": (
        by_hand("0B0 0F0\n1I0 1F0 1W0", 1),
        """\
  * E8 0B0 runs before 0F0 (rank 0, position 0)
      rank 0: 0B0 0F0
              ^^^
  * E8 1I0 runs before 1F0 (rank 1, position 0)
      rank 1: 1I0 1F0 1W0
              ^^^""",
    ),
    "E8 of a second half before the first": (
        by_hand("0F0 0W0 0I0", 1),
        """\
  * E8 0W0 runs before 0I0 (rank 0, position 1)
      rank 0: 0F0 0W0 0I0
                  ^^^""",
    ),
    "E8 of forwards that descend": (
        by_hand("0F1 0F0 0B0 0B1", 2),
        f"""\
  * E8 0F0 runs after 0F1: {ASCENDING} (rank 0, position 1)
      rank 0: 0F1 0F0 0B0 0B1
                  ^^^""",
    ),
    "E8 of sums that descend, whole and split, far from both ends": (
        by_hand("0F0 0F1 0F2 0F3 0F4 0I0 0I1 0B2 0W0 0W1 0B3 0B4", 5),
        f"""\
  * E8 0W0 runs after 0B2: {ASCENDING} (rank 0, position 8)
      rank 0: ... 0F4 0I0 0I1 0B2 0W0 0W1 0B3 0B4
                                  ^^^""",
    ),
    "E8 of a cell between cells of other widths": (
        by_hand(
            "0F0 0F1 0F2 0F3 0F4 0F5 0F6 0F7 0F8 0F10 0F9 0F11",
            12,
            forward_only=True,
        ),
        f"""\
  * E8 0F9 runs after 0F10: {ASCENDING} (rank 0, position 10)
      rank 0: ... 0F6 0F7 0F8 0F10 0F9 0F11
                                   ^^^""",
    ),
    "E9 of two ranks": (
        by_hand("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1", 2),
        "  * E9 the schedule waits for ever: "
        "rank 0: 0B0 waits for 1B0, which rank 1 runs after 1F1; "
        "rank 1: 1F1 waits for 0F1, which rank 0 runs after 0B0",
    ),
    "E9 of one rank that waits for itself": (
        by_hand("1F0 0F0 1B0 0B0", 1, placement=(0, 0)),
        "  * E9 the schedule waits for ever: "
        "rank 0: 1F0 waits for 0F0, which rank 0 runs after 1F0",
    ),
    "E9 without the rank that only waits for the cycle": (
        by_hand(
            "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1\n2F0 2F1 2B0 2B1", 2, placement=(0, 1, 2)
        ),
        "  * E9 the schedule waits for ever: "
        "rank 1: 1B0 waits for 2B0, which rank 2 runs after 2F1; "
        "rank 2: 2F1 waits for 1F1, which rank 1 runs after 1B0",
    ),
    "E10 of a backward on another rank than its forward": (
        by_hand("0F0 0B0 1I0\n1F0 1W0", 1),
        """\
  * E10 1I0: stage 1 is placed on rank 1, where its forward runs (rank 0, position 2)
      rank 0: 0F0 0B0 1I0
                      ^^^""",
    ),
}


@pytest.mark.parametrize("rule", REFUSED)
def test_the_validator_refuses_with(rule):
    schedule, says = REFUSED[rule]
    assert refusal_of(schedule) == says


def test_every_rule_that_needs_no_limit_has_an_example():
    assert {rule.split()[0] for rule in REFUSED} == {f"E{n}" for n in range(1, 11)}


def test_e11_names_each_rank_that_holds_more_than_the_limit():
    schedule = gpipe(3, 4)
    costs = Costs(residual_bytes=[2, 1, 2])
    assert schedule.validate(max_bytes=8, costs=costs) is schedule
    assert refusal_of(schedule, max_bytes=7.5, costs=costs) == (
        "  * E11 rank 0 holds 8 bytes, more than 7.5\n"
        "  * E11 rank 2 holds 8 bytes, more than 7.5"
    )
    assert refusal_of(schedule, max_bytes=3).count("E11") == 3


def test_e12_warns_of_a_rank_with_nothing_to_do():
    schedule = by_hand("0F0 0B0\n", 1, placement=(0,))
    with pytest.warns(UserWarning, match="^E12 rank 1 runs nothing$"):
        assert schedule.validate() is schedule


def test_a_rank_whose_stage_is_missing_is_refused_and_not_only_warned_of():
    # Warnings are errors in these tests: one would hide the refusal.
    assert refusal_of(by_hand("0F0 0B0\n", 1)) == (
        "  * E5 1F0 never runs\n  * E5 1B0 never runs, nor do 1I0 and 1W0"
    )


def test_all_faults_are_in_one_message():
    # A stage that is nowhere, two on the wrong rank, one missing, two twice.
    schedule = by_hand("0F0 0B0 7F0\n0F0 0B0 1F0", 1)
    assert (
        refusal_of(schedule)
        == """\
  * E2 7F0: the stages are 0 to 1 (rank 0, position 2)
      rank 0: 0F0 0B0 7F0
                      ^^^
  * E4 0F0: stage 0 is placed on rank 0 (rank 1, position 0)
      rank 1: 0F0 0B0 1F0
              ^^^
  * E10 0B0: stage 0 is placed on rank 0, where its forward runs (rank 1, position 1)
      rank 1: 0F0 0B0 1F0
                  ^^^
  * E5 1B0 never runs, nor do 1I0 and 1W0
  * E6 0F0 runs 2 times (rank 1, position 0)
      rank 1: 0F0 0B0 1F0
              ^^^
  * E6 0B0 runs 2 times (rank 1, position 1)
      rank 1: 0F0 0B0 1F0
                  ^^^"""
    )


def test_all_faults_of_order_are_in_one_message():
    faults = refusal_of(by_hand("0B0 0F0 0W1 0I1 0F1\n1F1 1F0 1B1 1B0", 2))
    assert re.findall(r"E8 (.*?)[:(]", faults) == [
        "0B0 runs before 0F0 ",
        "0W1 runs before 0I1 ",
        "0I1 runs before 0F1 ",
        "1F0 runs after 1F1",
        "1B0 runs after 1B1",
    ]


def test_all_cells_of_a_text_that_are_no_actions_are_in_one_message():
    with pytest.raises(ScheduleError) as refusal:
        Schedule.from_text("0F0 0G0\n1F0 1B0 B", name="mine")
    says = "is no action: write stage, op (F, B, I, W) and micro-batch without blanks"
    assert str(refusal.value) == (
        "schedule 'mine' cannot run:\n"
        f"  * E1 '0G0' {says}, such as '2F0' (rank 0, position 1)\n"
        f"  * E1 'B' {says}, such as '2F0' (rank 1, position 2)"
    )


@pytest.mark.parametrize("text", ["", "\n  \n", "# 0F0 0B0"])
def test_empty_text_is_refused(text):
    with pytest.raises(ScheduleError, match=r"^an empty text holds no schedule$"):
        Schedule.from_text(text)


def test_blank_lines_and_comments_in_text_do_not_count():
    text = "# two ranks\n0F0 0B0  # the first\n\n1F0 1B0\n"
    assert Schedule.from_text(text).rows == gpipe(2, 1).rows


def json_with(**fields) -> str:
    return json.dumps({**json.loads(gpipe(2, 1).to_json()), **fields})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nonsense", "no schedule as Schedule.to_json writes it: JSONDecodeError"),
        ("[]", "no schedule as Schedule.to_json writes it: TypeError"),
        ("{}", "no schedule as Schedule.to_json writes it: KeyError('name')"),
        (json_with(more=1), "got an unexpected keyword argument 'more'"),
        (json_with(rows=None), "no schedule as Schedule.to_json writes it: TypeError"),
        (json_with(rows=[[1]]), "no schedule as Schedule.to_json writes it: TypeError"),
        (json_with(num_microbatches="1"), "sizes and placement are integers"),
        (json_with(placement=["0", "1"]), "sizes and placement are integers"),
        (json_with(rows=[["0F0", "0G0"]]), "E1 '0G0' is no action"),
        (json_with(num_microbatches=2), "E5 0F1 never runs"),
        (json_with(forward_only=True), "E7 0B0 in a schedule that is forward_only"),
        (json_with(placement=[1, 0]), "E4 0F0: stage 0 is placed on rank 1"),
    ],
)
def test_json_that_is_no_schedule_is_refused(text, says):
    with pytest.raises(ScheduleError, match=re.escape(says)):
        Schedule.from_json(text)


# -------------------------------------------------------------- single mutations


@st.composite
def mutations(draw):
    """A schedule of the catalogue with one fault, of which kind, and what to say."""
    name = draw(st.sampled_from(sorted(BY_NAME)))
    p = draw(st.integers(1, 4))
    m = fewest(name, p) + draw(st.integers(0, 4))
    schedule = BY_NAME[name](p, m)
    rank = draw(st.integers(0, p - 1))
    row = list(schedule.rows[rank])
    possible = {
        kind: places for kind, find in FIND.items() if (places := find(schedule, row))
    }
    kind = draw(st.sampled_from(sorted(possible)))
    says = MUTATE[kind](
        draw, schedule, rank, row, draw(st.sampled_from(possible[kind]))
    )
    rows = list(schedule.rows)
    rows[rank] = tuple(row)
    return kind, dataclasses.replace(schedule, rows=tuple(rows)), says


def swap(row: list, i: int, j: int) -> None:
    row[i], row[j] = row[j], row[i]


def everywhere(schedule: Schedule, row: list[Action]) -> list:
    return list(range(len(row)))


def from_own(schedule: Schedule, row: list[Action]) -> list:
    """Where an action and the one of its own stage that it reads stand."""
    return [
        (row.index(read), at)
        for at, action in enumerate(row)
        for read in reads(action, schedule.num_stages, halves(schedule))
        if read.stage == action.stage
    ]


def from_afar(schedule: Schedule, row: list[Action]) -> list:
    """Where an action and one that it waits for in the end stand on the rank."""
    split = halves(schedule)
    return [
        (row.index(before), at)
        for at, action in enumerate(row)
        for before in closure(action, schedule.num_stages, split) & set(row)
    ]


def in_one_sum(schedule: Schedule, row: list[Action]) -> list:
    """Where two terms of one sum stand."""
    return [
        pair
        for stage in range(schedule.num_stages)
        for ops in ("F", "BW")
        for pair in itertools.combinations(
            [at for at, a in enumerate(row) if a.stage == stage and a.op in ops], 2
        )
    ]


FIND = {
    "drop": everywhere,
    "duplicate": everywhere,
    "stage": everywhere,
    "microbatch": everywhere,
    "op": everywhere,
    "turn": from_own,
    "wait": from_afar,
    "late": in_one_sum,
}


def absent(schedule: Schedule, action: Action) -> str:
    """What is said of an action that is not there any more."""
    op, stage, i = action
    if op == "F":
        return f"E5 {action} never runs"
    if op == "B":
        return f"E5 {action} never runs, nor do {stage}I{i} and {stage}W{i}"
    return f"E5 {action} never runs, {action._replace(op='IW'[op == 'I'])} does"


def drop(draw, schedule, rank, row, at):
    return absent(schedule, row.pop(at))


def duplicate(draw, schedule, rank, row, at):
    old = row[at]
    row.insert(draw(st.integers(0, len(row))), old)
    return f"E6 {old} runs 2 times (rank {rank}, position "


def other_stage(draw, schedule, rank, row, at):
    old, count = row[at], schedule.num_stages
    other = draw(st.integers(-1, count).filter(lambda stage: stage != old.stage))
    row[at] = new = old._replace(stage=other)
    place = f" (rank {rank}, position {at})"
    if not 0 <= other < count:
        return f"E2 {new}: the stages are 0 to {count - 1}{place}"
    home = schedule.placement[other]
    if home == rank:
        return absent(schedule, old)
    if old.op == "F":
        return f"E4 {new}: stage {other} is placed on rank {home}{place}"
    return f"E10 {new}: stage {other} is placed on rank {home}, where its forward runs"


def other_microbatch(draw, schedule, rank, row, at):
    old, count = row[at], schedule.num_microbatches
    other = draw(st.integers(-1, count).filter(lambda i: i != old.microbatch))
    row[at] = new = old._replace(microbatch=other)
    if 0 <= other < count:
        return absent(schedule, old)
    place = f"(rank {rank}, position {at})"
    return f"E3 {new}: the micro-batches are 0 to {count - 1} {place}"


def other_op(draw, schedule, rank, row, at):
    old = row[at]
    op = draw(st.sampled_from("FBIWR".replace(old.op, "")))
    row[at] = new = old._replace(op=op)
    if op == "R":
        return f"E1 {new}: the ops are F, B, I, W (rank {rank}, position {at})"
    if row.count(new) == 2:
        return f"E6 {new} runs 2 times"
    if old.op == "F":
        return absent(schedule, old)
    if op == "B":
        left = old._replace(op="IW"[old.op == "I"])
        return f"E7 {new} and {left} both run"
    return absent(schedule, new._replace(op="IW"[op == "I"]))


def turn(draw, schedule, rank, row, pair):
    first, later = (row[at] for at in pair)
    swap(row, *pair)
    place = f"(rank {rank}, position {row.index(later)})"
    return f"E8 {later} runs before {first} {place}"


def wait(draw, schedule, rank, row, pair):
    swap(row, *pair)
    return ""  # a matter of order or of waiting, and said elsewhere


def late(draw, schedule, rank, row, pair):
    swap(row, *pair)
    return ASCENDING


MUTATE = {
    "drop": drop,
    "duplicate": duplicate,
    "stage": other_stage,
    "microbatch": other_microbatch,
    "op": other_op,
    "turn": turn,
    "wait": wait,
    "late": late,
}


def marked(faults: str) -> Iterator[tuple[str, str, int, int]]:
    """The action that each fault with a place names, the cell marked, and the place."""
    pattern = r"  \* E\d+ (\S+?):? .* \(rank (\d+), position (\d+)\)\n(.*)\n( *)(\^+)"
    for action, rank, position, line, blank, mark in re.findall(pattern, faults):
        assert line.startswith(f"      rank {rank}: ")
        cell = line[len(blank) : len(blank) + len(mark)]
        # It is the whole cell: blanks or ends on both sides.
        assert f" {cell} " in f"{line} "[len(blank) - 1 : len(blank) + len(mark) + 1]
        yield action, cell, int(rank), int(position)


@settings(deadline=None, max_examples=300)
@given(mutations())
def test_every_single_mutation_is_refused_with_its_reason_and_its_place(mutation):
    kind, schedule, says = mutation
    faults = refusal_of(schedule)
    assert says in faults
    assert faults.count("^\n") + faults.endswith("^") == len(list(marked(faults)))
    for action, cell, rank, position in marked(faults):
        assert action == cell == str(schedule.rows[rank][position])
    if kind in ("turn", "wait", "late"):
        assert set(re.findall(r"E\d+", faults)) <= {"E8", "E9"}


def is_complete(schedule: Schedule) -> bool:
    """Whether the cells alone are everything that some smaller pipeline runs."""
    found = Counter(action for row in schedule.rows for action in row)
    stages = {action.stage for action in found}
    batches = {action.microbatch for action in found}
    patterns = {
        "".join(op * found[Action(op, stage, i)] for op in "FBIW")
        for stage in stages
        for i in batches
    }
    dense = all(set(range(len(some))) == some for some in (stages, batches))
    return dense and (patterns == {"F"} or patterns <= {"FB", "FIW"}) and bool(found)


@settings(deadline=None, max_examples=300)
@given(mutations())
def test_every_single_mutation_is_refused_as_text(mutation):
    kind, schedule, _ = mutation
    text = schedule.to_text()
    if kind == "drop" and is_complete(schedule):
        # Sizes are read off the text. What is left of a 1 x 1 schedule without its
        # backward, or of a forward-only one without its end, is another schedule.
        smaller = Schedule.from_text(text)
        assert smaller.forward_only
        assert smaller.rows == tuple(row for row in schedule.rows if row)
    else:
        with pytest.raises(ScheduleError):
            Schedule.from_text(text)


def test_what_is_left_of_one_forward_and_one_backward_is_for_inference():
    assert is_complete(by_hand("0F0", 1))
    assert Schedule.from_text("0F0").forward_only


# --------------------------------------------------------- against graph theory


@st.composite
def any_orders(draw):
    """Complete schedules of up to two stages per rank; most of them can run."""
    num_ranks, m = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    more = draw(st.lists(st.integers(0, num_ranks - 1), max_size=num_ranks))
    placement = tuple(draw(st.permutations([*range(num_ranks), *more])))
    num_stages = len(placement)
    pairs = list(itertools.product(range(num_stages), range(m)))
    split = {Action("I", *pair) for pair in pairs if draw(st.booleans())}
    todo = [
        Action(op, *pair)
        for pair in pairs
        for op in ("FIW" if Action("I", *pair) in split else "FB")
    ]
    rows: list[list[Action]] = [[] for _ in range(num_ranks)]
    done: set[Action] = set()
    while todo:
        ready = [
            action
            for action in todo
            if done.issuperset(reads(action, num_stages, split))
            and not any(comes_before(other, action) for other in todo)
        ]
        action = draw(st.sampled_from(ready))
        todo.remove(action)
        done.add(action)
        rows[placement[action.stage]].append(action)
    for row in rows:
        if draw(st.integers(0, 3)) == 0:
            at = st.integers(0, len(row) - 1)
            swap(row, draw(at), draw(at))
    return Schedule("any", num_stages, m, placement, tuple(map(tuple, rows)))


def comes_before(one: Action, other: Action) -> bool:
    """Whether both are terms of one sum, and one is the earlier."""
    same = any(one.op in ops and other.op in ops for ops in ("F", "BW"))
    return same and one.stage == other.stage and one.microbatch < other.microbatch


COST = {"F": "forward", "B": "backward", "I": "input_grad", "W": "weight_grad"}


def starts(schedule: Schedule, costs: Costs) -> dict[Action, float]:
    """The start of each action: the longest path to it in the graph of what it needs.

    Raises:
      CycleError: if there is no order.
    """
    split, rank = halves(schedule), schedule.placement
    # What each action comes after, and how long after its end.
    needs = {
        action: {
            read: costs.latency * (rank[read.stage] != rank[action.stage])
            for read in reads(action, schedule.num_stages, split)
        }
        for row in schedule.rows
        for action in row
    }
    for row in schedule.rows:
        for earlier, later in itertools.pairwise(row):
            needs[later].setdefault(earlier, 0.0)
    start: dict[Action, float] = {}
    for action in TopologicalSorter(needs).static_order():
        arrivals = [
            start[need] + getattr(costs, COST[need.op]) + delay
            for need, delay in needs[action].items()
        ]
        start[action] = max(arrivals, default=0.0)
    return start


ANY_COSTS = [
    Costs(1.0, 2.0, 1.0, 1.0),
    Costs(1.0, 1.0, 0.25, 0.75, latency=0.5),
    Costs(3.0, 0.5, 0.5, 0.0, latency=2.0),
]


@settings(max_examples=300, deadline=None)
@given(any_orders(), st.sampled_from(ANY_COSTS))
def test_validator_and_simulator_agree_with_graph_theory(schedule, costs):
    # Neither a schedule that can run is refused, nor one accepted that cannot.
    ascending = all(
        order == sorted(order)
        for row in schedule.rows
        for order in sums(row, schedule.num_stages)
    )
    try:
        start = starts(schedule, costs)
    except CycleError:
        start = None
    if start is None or not ascending:
        faults = refusal_of(schedule)
        assert ("E9" in faults) == ("E8" not in faults)
    else:
        assert schedule.validate() is schedule
        assert schedule.simulate(costs).start == start
        assert Schedule.from_text(schedule.to_text(), "any") == schedule
    if start is None:
        with pytest.raises(ScheduleError, match="the schedule waits for ever: rank"):
            schedule.simulate()


def waits(schedule: Schedule) -> list[tuple[str, ...]]:
    """The rank, its action, what it waits for, on which rank, after which action."""
    try:
        schedule.simulate()
    except ScheduleError as refusal:
        says = str(refusal).removeprefix("the schedule waits for ever: ")
        return [WAIT.fullmatch(clause).groups() for clause in says.split("; ")]
    return []


WAIT = re.compile(
    r"rank (\d+): (\w+) waits for (\w+), which rank (\d+) runs(?: after (\w+))?"
)


@settings(max_examples=200, deadline=None)
@given(any_orders())
def test_ranks_that_wait_for_each_other_are_printed_as_a_cycle(schedule):
    cycle = waits(schedule)
    position = {str(a): at for row in schedule.rows for at, a in enumerate(row)}
    split = halves(schedule)
    for wait, following in zip(cycle, cycle[1:] + cycle[:1], strict=True):
        rank, action, need, owner, after = wait
        # The rank that it waits for stands still at its own wait.
        assert following[:2] == (owner, after or need)
        assert not after or position[after] < position[need]
        waiting, awaited = Action.parse(action), Action.parse(need)
        assert waiting in schedule.rows[int(rank)]
        assert awaited in schedule.rows[int(owner)]
        assert awaited in reads(waiting, schedule.num_stages, split)


def test_simulating_what_nobody_runs_says_so():
    # `validate` finds it before; a schedule made by hand may not have been asked.
    with pytest.raises(ScheduleError, match="0B0 waits for 1B0, which nobody runs"):
        by_hand("0F0 0B0\n1F0", 1).simulate()


# --------------------------------------------------------------------- purity

# Loads modules of the package without running its __init__, which imports JAX.
PROBE = """
import importlib, sys, types
package = types.ModuleType("jpipe")
package.__path__ = [sys.argv[1]]
sys.modules["jpipe"] = package
for module in sys.argv[2:]:
    importlib.import_module(f"jpipe.{module}")
print(*sorted({"jax", "jaxlib", "numpy", "flax", "optax"} & set(sys.modules)))
"""

LIBRARY = Path(jpipe.__file__).parent


def imported_by(*modules: str) -> list[str]:
    command = [sys.executable, "-c", PROBE, str(LIBRARY), *modules]
    return subprocess.run(
        command, check=True, capture_output=True, text=True
    ).stdout.split()


def test_schedules_and_their_pictures_load_without_jax():
    modules = [
        ".".join(path.relative_to(LIBRARY).with_suffix("").parts)
        for folder in ("schedules", "draw")
        for path in (LIBRARY / folder).glob("*.py")
    ]
    assert {"schedules._zero_bubble", "schedules._validate"} <= set(modules)
    assert imported_by(*modules) == []


def test_the_probe_sees_jax_where_it_is():
    assert "jax" in imported_by("_run._signature")
