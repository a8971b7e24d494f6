"""Any single change of a good schedule is refused, with its reason and its place."""

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from jpipe.schedules import BY_NAME, Action, Schedule, ScheduleError

from .orders import ASCENDING, by_hand, fewest, halves, reads, refusal_of, swap


def closure(action: Action, num_stages: int, split: set[Action]) -> set[Action]:
    """All that must have run before an action, whatever the ranks."""
    found: set[Action] = set()
    todo = [action]
    while todo:
        new = set(reads(todo.pop(), num_stages, split)) - found
        found |= new
        todo += new
    return found


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
