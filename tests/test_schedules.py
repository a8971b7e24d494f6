"""Schedules are tables: their test is a drawing, and a catalogue of properties."""

import dataclasses
import itertools
import re
import subprocess
import sys
from collections import Counter
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
    gpipe,
    one_f_one_b,
)

# ------------------------------------------------------------------ drawings
#
# The literature's pictures for four ranks and eight micro-batches. One column is one
# unit of time; a backward takes two.

GPIPE_ORDER = """\
0F0 0F1 0F2 0F3 0F4 0F5 0F6 0F7 0B0 0B1 0B2 0B3 0B4 0B5 0B6 0B7
1F0 1F1 1F2 1F3 1F4 1F5 1F6 1F7 1B0 1B1 1B2 1B3 1B4 1B5 1B6 1B7
2F0 2F1 2F2 2F3 2F4 2F5 2F6 2F7 2B0 2B1 2B2 2B3 2B4 2B5 2B6 2B7
3F0 3F1 3F2 3F3 3F4 3F5 3F6 3F7 3B0 3B1 3B2 3B3 3B4 3B5 3B6 3B7"""

GPIPE_PICTURE = """\
gpipe: 4 ranks, 4 stages, 8 micro-batches, bubble 27.3 %
rank 0 |F0 F1 F2 F3 F4 F5 F6 F7 .  .  .  .  .  .  .  .  .  B0 B0 B1 B1 B2 B2 B3 B3 B4 B4 B5 B5 B6 B6 B7 B7|
rank 1 |.  F0 F1 F2 F3 F4 F5 F6 F7 .  .  .  .  .  .  B0 B0 B1 B1 B2 B2 B3 B3 B4 B4 B5 B5 B6 B6 B7 B7 .  . |
rank 2 |.  .  F0 F1 F2 F3 F4 F5 F6 F7 .  .  .  B0 B0 B1 B1 B2 B2 B3 B3 B4 B4 B5 B5 B6 B6 B7 B7 .  .  .  . |
rank 3 |.  .  .  F0 F1 F2 F3 F4 F5 F6 F7 B0 B0 B1 B1 B2 B2 B3 B3 B4 B4 B5 B5 B6 B6 B7 B7 .  .  .  .  .  . |"""  # noqa: E501

ONE_F_ONE_B_ORDER = """\
0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0F6 0B3 0F7 0B4 0B5 0B6 0B7
1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1F6 1B4 1F7 1B5 1B6 1B7
2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2F5 2B4 2F6 2B5 2F7 2B6 2B7
3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5 3F6 3B6 3F7 3B7"""

ONE_F_ONE_B_PICTURE = """\
1f1b: 4 ranks, 4 stages, 8 micro-batches, bubble 27.3 %
rank 0 |F0 F1 F2 F3 .  .  .  .  .  .  B0 B0 F4 B1 B1 F5 B2 B2 F6 B3 B3 F7 B4 B4 .  B5 B5 .  B6 B6 .  B7 B7|
rank 1 |.  F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 F4 B2 B2 F5 B3 B3 F6 B4 B4 F7 B5 B5 .  B6 B6 .  B7 B7 .  . |
rank 2 |.  .  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 F4 B3 B3 F5 B4 B4 F6 B5 B5 F7 B6 B6 .  B7 B7 .  .  .  . |
rank 3 |.  .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 F4 B4 B4 F5 B5 B5 F6 B6 B6 F7 B7 B7 .  .  .  .  .  . |"""  # noqa: E501


@pytest.mark.parametrize(
    ("builder", "order", "picture"),
    [
        pytest.param(gpipe, GPIPE_ORDER, GPIPE_PICTURE, id="gpipe"),
        pytest.param(one_f_one_b, ONE_F_ONE_B_ORDER, ONE_F_ONE_B_PICTURE, id="1f1b"),
    ],
)
def test_four_ranks_and_eight_microbatches_look_as_published(builder, order, picture):
    schedule = builder(4, 8)
    assert schedule.to_text() == order
    assert str(schedule) == picture


@pytest.mark.parametrize(
    ("schedule", "order"),
    [
        pytest.param(gpipe(1, 3), "0F0 0F1 0F2 0B0 0B1 0B2", id="gpipe, one rank"),
        pytest.param(one_f_one_b(1, 3), "0F0 0B0 0F1 0B1 0F2 0B2", id="1f1b, one rank"),
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

RANKS = range(1, 9)
MICROBATCHES = range(1, 17)

# The most micro-batches that rank r holds between their forward and their backward,
# for p ranks and m micro-batches. A new schedule has to bring its row.
PEAK_LIVE = {
    "gpipe": lambda p, m, r: m,
    "1f1b": lambda p, m, r: min(m, p - r),
}

every_name = pytest.mark.parametrize("name", BY_NAME)
every_number_of_ranks = pytest.mark.parametrize("p", RANKS)


def reads(action: Action, num_stages: int) -> list[Action]:
    """What an action waits for, written again here to check the library's."""
    op, stage, i = action
    if op == "F":
        return [Action("F", stage - 1, i)] if stage else []
    after = [Action("B", stage + 1, i)] if stage + 1 < num_stages else []
    return [Action("F", stage, i), *after]


def test_every_schedule_of_the_catalogue_has_a_closed_form():
    assert set(PEAK_LIVE) == set(BY_NAME)


@every_name
@every_number_of_ranks
def test_runs_every_action_once_and_says_what_it_is(name, p):
    for m in MICROBATCHES:
        schedule = BY_NAME[name](p, m)
        assert schedule.validate() is schedule
        assert (schedule.name, schedule.num_ranks) == (name, p)
        assert schedule.num_microbatches == m
        assert len(schedule.placement) == schedule.num_stages
        cells = [(action, r) for r, row in enumerate(schedule.rows) for action in row]
        assert Counter(cells) == Counter(
            (Action(op, stage, i), rank)
            for op in "FB"
            for stage, rank in enumerate(schedule.placement)
            for i in range(m)
        )


@every_name
@every_number_of_ranks
def test_backwards_of_a_stage_ascend(name, p):
    # The order in which gradients are summed: the same bits under every schedule.
    for m in MICROBATCHES:
        schedule = BY_NAME[name](p, m)
        for row in schedule.rows:
            for stage in range(schedule.num_stages):
                order = [a.microbatch for a in row if a.op == "B" and a.stage == stage]
                assert order == sorted(order)


@every_name
@every_number_of_ranks
def test_order_of_execution_respects_rows_and_dependencies(name, p):
    for m in MICROBATCHES:
        schedule = BY_NAME[name](p, m)
        order = schedule.simulate().order()
        place = {action: i for i, action in enumerate(order)}
        assert len(order) == len(place) == sum(map(len, schedule.rows))
        for row in schedule.rows:
            assert sorted(row, key=place.__getitem__) == list(row)
            for action in row:
                for read in reads(action, schedule.num_stages):
                    assert place[read] < place[action]


@every_name
@every_number_of_ranks
def test_text_round_trip(name, p):
    for m in MICROBATCHES:
        schedule = BY_NAME[name](p, m)
        assert Schedule.from_text(schedule.to_text(), name) == schedule


@every_name
@every_number_of_ranks
@pytest.mark.parametrize(
    "costs", [Costs(), Costs(1.0, 1.0), Costs(0.75, 0.25)], ids=str
)
def test_makespan_and_bubble_have_their_closed_forms(name, p, costs):
    # Exact: all times are multiples of 1/4, and one division of them is rounded.
    both = costs.forward + costs.backward
    for m in MICROBATCHES:
        timeline = BY_NAME[name](p, m).simulate(costs)
        assert timeline.makespan == (m - 1 + p) * both
        assert timeline.idle == ((p - 1) * both,) * p
        assert timeline.bubble_fraction == (p - 1) / (m + p - 1)


@every_name
@every_number_of_ranks
def test_peak_of_live_microbatches(name, p):
    for m in MICROBATCHES:
        for rank, row in enumerate(BY_NAME[name](p, m).rows):
            live = peak = 0
            for action in row:
                live += 1 if action.op == "F" else -1
                peak = max(peak, live)
            assert live == 0
            assert peak == PEAK_LIVE[name](p, m, rank)


@every_name
@every_number_of_ranks
def test_inference_is_the_forwards_in_the_same_order(name, p):
    for m in MICROBATCHES:
        schedule = BY_NAME[name](p, m)
        forwards = schedule.forwards()
        assert forwards.rows == tuple(
            tuple(action for action in row if action.op == "F") for row in schedule.rows
        )
        assert forwards.simulate().makespan == m - 1 + p


@every_name
def test_builders_refuse_less_than_one_and_name_all_that_is_wrong(name):
    match = re.escape(f"{name}: num_ranks=0, num_microbatches=-2: must be at least 1")
    with pytest.raises(ScheduleError, match=match):
        BY_NAME[name](0, -2)
    with pytest.raises(ScheduleError, match=f"{name}: num_microbatches=0: must be"):
        BY_NAME[name](1, 0)


# ------------------------------------------------------------------- actions


@given(st.sampled_from("FB"), st.integers(0, 10**6), st.integers(0, 10**6))
def test_action_reads_what_it_prints(op, stage, microbatch):
    action = Action(op, stage, microbatch)
    assert str(action) == repr(action) == f"{stage}{op}{microbatch}"
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize(
    "text",
    ["", "F0", "2F", "2X0", "2f0", "-1F0", "2 F0", " 2F0", "2F0\n", "2F0junk", "2F0.5"],
)
def test_action_refuses_anything_else(text):
    match = re.escape(f"{text!r} is no action: write stage, op (F, B) and micro-batch")
    with pytest.raises(ValueError, match=match):
        Action.parse(text)


# --------------------------------------------------- what the validator refuses


@st.composite
def mutations(draw):
    """A schedule of the catalogue with one fault, and what the error must say."""
    p, m = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    schedule = BY_NAME[draw(st.sampled_from(sorted(BY_NAME)))](p, m)
    rank = draw(st.integers(0, p - 1))
    row = list(schedule.rows[rank])
    at = draw(st.integers(0, len(row) - 1))
    old = row[at]
    kinds = ["drop", "duplicate", "turn", "stage", "microbatch", "op", "late"]
    kind = draw(st.sampled_from(kinds if m > 1 else kinds[:-1]))
    if kind == "drop":
        del row[at]
        says = f"{old} never runs"
    elif kind == "duplicate":
        row.insert(draw(st.integers(0, len(row))), old)
        says = f"{old} runs 2 times"
    elif kind == "turn":
        forward, backward = old._replace(op="F"), old._replace(op="B")
        swap(row, row.index(forward), row.index(backward))
        says = f"rank {rank} runs {backward} before {forward}"
    elif kind == "stage":
        other = draw(st.integers(0, p).filter(lambda stage: stage != old.stage))
        row[at] = old._replace(stage=other)
        says = f"{row[at]} at position {at} of rank {rank}: " + (
            f"the stages are 0 to {p - 1}"
            if other == p
            else f"stage {other} is placed on rank {schedule.placement[other]}"
        )
    elif kind == "microbatch":
        other = draw(st.integers(0, m).filter(lambda i: i != old.microbatch))
        row[at] = old._replace(microbatch=other)
        says = (
            f"{row[at]} at position {at} of rank {rank}: "
            f"the micro-batches are 0 to {m - 1}"
            if other == m
            else f"{row[at]} runs 2 times"
        )
    elif kind == "op":
        row[at] = old._replace(op="B" if old.op == "F" else "F")
        says = f"{row[at]} runs 2 times"
    else:
        i, j = sorted(draw(st.permutations(range(m)))[:2])
        first, second = Action("B", old.stage, i), Action("B", old.stage, j)
        swap(row, row.index(first), row.index(second))
        says = "gradients are summed in ascending order of micro-batches"
    rows = list(schedule.rows)
    rows[rank] = tuple(row)
    return dataclasses.replace(schedule, rows=tuple(rows)), says


def swap(row: list, i: int, j: int) -> None:
    row[i], row[j] = row[j], row[i]


@settings(deadline=None)
@given(mutations())
def test_every_single_mutation_is_refused_with_its_reason(mutation):
    schedule, says = mutation
    with pytest.raises(ScheduleError, match=re.escape(says)):
        schedule.validate()


@settings(deadline=None)
@given(mutations())
def test_every_single_mutation_is_refused_as_text(mutation):
    schedule, _ = mutation
    with pytest.raises(ScheduleError):
        Schedule.from_text(schedule.to_text())


@st.composite
def any_orders(draw):
    """Complete schedules of up to two stages per rank; most of them can run."""
    num_ranks, m = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    more = draw(st.lists(st.integers(0, num_ranks - 1), max_size=num_ranks))
    placement = tuple(draw(st.permutations([*range(num_ranks), *more])))
    num_stages = len(placement)
    todo = [
        Action(op, s, i) for op in "FB" for s in range(num_stages) for i in range(m)
    ]
    rows: list[list[Action]] = [[] for _ in range(num_ranks)]
    done: set[Action] = set()
    while todo:
        ready = [
            action
            for action in todo
            if done.issuperset(reads(action, num_stages))
            and (action.op == "F" or not before(action) or before(action) in done)
        ]
        action = draw(st.sampled_from(ready))
        todo.remove(action)
        done.add(action)
        rows[placement[action.stage]].append(action)
    for row in rows:
        if draw(st.booleans()):
            at = st.integers(0, len(row) - 1)
            swap(row, draw(at), draw(at))
    return Schedule("any", num_stages, m, placement, tuple(map(tuple, rows)))


def before(backward: Action) -> Action | None:
    i = backward.microbatch
    return backward._replace(microbatch=i - 1) if i else None


def starts(schedule: Schedule, costs: Costs) -> dict[Action, float]:
    """The start of each action: the longest path to it in the graph of what it needs.

    Raises:
      CycleError: if there is no order.
    """
    needs = {a: reads(a, schedule.num_stages) for row in schedule.rows for a in row}
    for row in schedule.rows:
        for earlier, later in itertools.pairwise(row):
            needs[later].append(earlier)
    start: dict[Action, float] = {}
    for action in TopologicalSorter(needs).static_order():
        ends = [start[need] + getattr(costs, COST[need.op]) for need in needs[action]]
        start[action] = max(ends, default=0.0)
    return start


COST = {"F": "forward", "B": "backward"}


@settings(max_examples=300, deadline=None)
@given(any_orders(), st.sampled_from([Costs(), Costs(1.0, 1.0), Costs(3.0, 0.5)]))
def test_validator_and_simulator_agree_with_graph_theory(schedule, costs):
    # Neither a schedule that can run is refused, nor one accepted that cannot.
    orders = [
        [a.microbatch for a in row if (a.op, a.stage) == (op, stage)]
        for row in schedule.rows
        for stage in range(schedule.num_stages)
        for op in "FB"
    ]
    ascending = all(order == sorted(order) for order in orders)
    try:
        start = starts(schedule, costs)
    except CycleError:
        start = None
    if start is None or not ascending:
        with pytest.raises(ScheduleError):
            schedule.validate()
    else:
        assert schedule.validate() is schedule
        assert schedule.simulate(costs).start == start
        assert Schedule.from_text(schedule.to_text(), "any") == schedule


def test_ranks_that_wait_for_each_other_are_named():
    with pytest.raises(
        ScheduleError,
        match="waits for ever: rank 0 cannot start 0B0 before 1B0; "
        "rank 1 cannot start 1F1 before 0F1",
    ):
        Schedule.from_text("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1")


def test_all_faults_are_in_one_message():
    # One stage that is nowhere, one on the wrong rank, one missing, one twice.
    rows = Schedule.from_text("0F0 0B0\n1F0 1B0").rows
    broken = Schedule(
        "mine", 2, 1, (0, 1), ((*rows[0], Action("F", 7, 0)), (*rows[0], rows[1][0]))
    )
    with pytest.raises(ScheduleError) as refusal:
        broken.validate()
    assert str(refusal.value) == (
        "schedule 'mine' cannot run:\n"
        "  * 7F0 at position 2 of rank 0: the stages are 0 to 1\n"
        "  * 0F0 at position 0 of rank 1: stage 0 is placed on rank 0\n"
        "  * 0B0 at position 1 of rank 1: stage 0 is placed on rank 0\n"
        "  * 1B0 never runs\n"
        "  * 0F0 runs 2 times\n"
        "  * 0B0 runs 2 times"
    )


@pytest.mark.parametrize(
    ("schedule", "says"),
    [
        pytest.param(
            dataclasses.replace(gpipe(2, 1), placement=(0,)),
            "placement has 1 entries for 2 stages",
            id="placement",
        ),
        pytest.param(
            dataclasses.replace(
                gpipe(1, 1), rows=((Action("F", 0, 0), Action("W", 0, 0)),)
            ),
            "0W0 at position 1 of rank 0: the ops are F, B",
            id="op",
        ),
        pytest.param(
            dataclasses.replace(gpipe(1, 2), num_microbatches=3),
            "0F2 never runs",
            id="num_microbatches",
        ),
    ],
)
def test_a_schedule_made_by_hand_is_checked_against_its_own_numbers(schedule, says):
    with pytest.raises(ScheduleError, match=re.escape(says)):
        schedule.validate()


@pytest.mark.parametrize("text", ["", "\n  \n"])
def test_empty_text_is_refused(text):
    with pytest.raises(ScheduleError, match="an empty text holds no schedule"):
        Schedule.from_text(text)


def test_text_with_a_cell_that_is_no_action_is_refused():
    with pytest.raises(ScheduleError, match="'0G0' is no action"):
        Schedule.from_text("0F0 0G0")


def test_blank_lines_in_text_do_not_count_as_ranks():
    assert Schedule.from_text("\n0F0 0B0\n\n1F0 1B0\n").num_ranks == 2


# --------------------------------------------------------------------- purity

# Loads one module of the package without running its __init__, which imports JAX.
PROBE = """
import importlib, sys, types
package = types.ModuleType("jpipe")
package.__path__ = [sys.argv[1]]
sys.modules["jpipe"] = package
importlib.import_module(f"jpipe.{sys.argv[2]}")
print(*sorted({"jax", "jaxlib", "numpy", "flax", "optax"} & set(sys.modules)))
"""


def imported_by(module: str) -> list[str]:
    folder = str(Path(jpipe.__file__).parent)
    command = [sys.executable, "-c", PROBE, folder, module]
    return subprocess.run(
        command, check=True, capture_output=True, text=True
    ).stdout.split()


@pytest.mark.parametrize("module", ["_action", "timeline", "schedules"])
def test_schedules_are_pure_data_and_load_without_jax(module):
    assert imported_by(module) == []


def test_the_probe_sees_jax_where_it_is():
    assert "jax" in imported_by("_signature")
