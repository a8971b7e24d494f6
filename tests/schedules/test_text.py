"""Schedules as text and as JSON: what is read, and what is refused."""

import json
import re

import pytest

from jpipe.schedules import Action, Schedule, ScheduleError, gpipe, looped_bfs

from .orders import TORCH_LOOPED_BFS


def test_action_parse_refuses_other_texts():
    for text in ("", "F0", "2F", "2X0", "2f0", "٢F0", "-1F0", "2 F0", "2F0\n", "2F0.5"):
        says = f"{text!r} is not an action: write stage, op (F, B, I, W) and micro-"
        with pytest.raises(ValueError, match=re.escape(says)):
            Action.parse(text)


def test_a_number_that_is_too_large_is_refused_before_anything_is_as_long():
    with pytest.raises(ScheduleError, match="E1 '0F9999999' is not an action"):
        Schedule.from_text("0F9999999")
    with pytest.raises(ScheduleError, match=r"E5 stage 0 runs nothing on .*\n(.*\n)*"):
        Schedule.from_text("999999F999999")
    with pytest.raises(ScheduleError) as refusal:
        Schedule.from_text("0F0 0B0\n1F0 12345B0")
    *faults, more = str(refusal.value).splitlines()[1:]
    assert (len(faults), more) == (50, "  * and more")
    assert (
        faults[1] == "  * E5 stage 2 runs nothing on micro-batch 0, needs F B or F I W"
    )


def test_all_cells_of_a_text_that_are_no_actions_are_in_one_message():
    with pytest.raises(ScheduleError) as refusal:
        Schedule.from_text("0F0 0G0\n1F0 1B0 B", name="mine")
    says = (
        "is not an action: write stage, op (F, B, I, W) and micro-batch without blanks"
    )
    assert str(refusal.value) == (
        "schedule 'mine' cannot run:\n"
        f"  * E1 '0G0' {says}, such as '2F0' (rank 0, position 1)\n"
        f"  * E1 'B' {says}, such as '2F0' (rank 1, position 2)"
    )


def test_a_csv_file_of_torch_is_a_schedule():
    schedule = Schedule.from_text(TORCH_LOOPED_BFS)
    lines = TORCH_LOOPED_BFS.split()
    rows = [[cell for cell in line.split(",") if cell] for line in lines]
    assert [list(map(str, row)) for row in schedule.rows] == rows
    ours = looped_bfs(2, 3)
    assert schedule.placement == ours.placement
    assert schedule.simulate().makespan == ours.simulate().makespan


def json_with(**fields) -> str:
    return json.dumps({**json.loads(gpipe(2, 1).to_json()), **fields})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nonsense", "no schedule as Schedule.to_json writes it: JSONDecodeError"),
        ("[" * 10**5, "no schedule as Schedule.to_json writes it: RecursionError"),
        ("{}", "no schedule as Schedule.to_json writes it: name is missing; "),
        (json_with(more=1), "writes it: more is unknown"),
        (json_with(rows=[[1]]), "rows[0][0]: 1 is not an action: write stage, op"),
        (json_with(num_stages=0), "E0 num_stages=0, num_microbatches=1: must be ints"),
        (json_with(num_microbatches="1"), "num_microbatches is '1', needs an int"),
        (
            json_with(num_microbatches=2),
            "E5 stage 0 runs nothing on micro-batch 1",
        ),
        (
            json_with(forward_only=True),
            "E5 stage 0 runs F B on micro-batch 0, needs F alone",
        ),
        (json_with(placement=[1, 0]), "E4 0F0: stage 0 is placed on rank 1"),
    ],
)
def test_json_that_is_no_schedule_is_refused(text, says):
    with pytest.raises(ScheduleError, match=re.escape(says)):
        Schedule.from_json(text)
