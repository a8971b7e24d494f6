"""Orders of actions: of which sizes, what each action reads, how one is refused."""

import itertools
import random
import re
from collections.abc import Iterator, Sequence

import pytest

from jpipe.schedules import BY_NAME, Action, Schedule, ScheduleError

# Written by ScheduleLoopedBFS of torch 2.13: two stages on each of two ranks.
TORCH_LOOPED_BFS = """\
0F0,0F1,0F2,2F0,2F1,2F2,,,2B2,2B1,2B0,0B2,0B1,0B0
,1F0,1F1,1F2,3F0,3F1,3F2,3B2,3B1,3B0,1B2,1B1,1B0
"""

IN_A_V = {"zb_v", "v_half", "v_min", "1f1b_v", "dualpipe_v"}
IN_A_LOOP = {"interleaved", "interleaved_zb", "looped_bfs"}
ON_A_LINE = set(BY_NAME) - IN_A_V - IN_A_LOOP
every_name = pytest.mark.parametrize("name", BY_NAME)


def fewest(name: str, num_ranks: int) -> int:
    """The fewest micro-batches that a schedule is made for."""
    return 2 * num_ranks if name == "dualpipe_v" else 1


def some_sizes(name: str) -> Iterator[tuple[int, int]]:
    """Ranks and micro-batches: fewer, as many, more, multiples and others."""
    for p in (1, 2, 3, 5):
        first = fewest(name, p)
        yield from ((p, m) for m in sorted({first, first + 1, 2 * p, 2 * p + 1, 13}))


def sums(row: tuple[Action, ...], num_stages: int) -> Iterator[list[int]]:
    """The micro-batches that each stage adds up: losses, then gradients."""
    for stage in range(num_stages):
        for ops in ("F", "BW"):
            yield [a.microbatch for a in row if a.stage == stage and a.op in ops]


def reads(action: Action, num_stages: int, split: set[Action]) -> list[Action]:
    """The actions that an action waits for, written again to check the library's.

    Args:
      action: the action that waits.
      num_stages: the number of stages.
      split: the input gradients (I) of the schedule; other backwards are whole.
    """
    op, stage, i = action
    if op == "F":
        return [Action("F", stage - 1, i)] if stage else []
    if op == "W":
        return [Action("I", stage, i)]
    needs = [Action("F", stage, i)]
    if stage + 1 < num_stages:
        half = Action("I", stage + 1, i)
        needs.append(half if half in split else Action("B", stage + 1, i))
    return needs


def comes_before(first: Action, second: Action) -> bool:
    """True if both are terms of one sum, and the first is the earlier."""
    is_one_sum = first.stage == second.stage and any(
        first.op in ops and second.op in ops for ops in ("F", "BW")
    )
    return is_one_sum and first.microbatch < second.microbatch


def any_rows(
    chance: random.Random, placement: Sequence[int], num_microbatches: int
) -> list[list[Action]]:
    """Rows that can run: backwards are whole or split, actions in any order."""
    pairs = list(itertools.product(range(len(placement)), range(num_microbatches)))
    share = chance.choice([0, 0.5, 1])
    split = {Action("I", *pair) for pair in pairs if chance.random() < share}
    todo = [
        Action(op, *pair)
        for pair in pairs
        for op in ("FIW" if Action("I", *pair) in split else "FB")
    ]
    rows: list[list[Action]] = [[] for _ in range(max(placement) + 1)]
    done: set[Action] = set()
    while todo:
        ready = [
            action
            for action in todo
            if done.issuperset(reads(action, len(placement), split))
            and not any(comes_before(other, action) for other in todo)
        ]
        action = chance.choice(ready)
        todo.remove(action)
        done.add(action)
        rows[placement[action.stage]].append(action)
    return rows


def halves(schedule: Schedule) -> set[Action]:
    return {action for row in schedule.rows for action in row if action.op == "I"}


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


def refusal_of(schedule: Schedule) -> str:
    with pytest.raises(ScheduleError) as refusal:
        schedule.validate()
    first, _, faults = str(refusal.value).partition("\n")
    assert first == f"schedule {schedule.name!r} cannot run:"
    return faults
