"""How many bytes each place holds, read off a list of instructions."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ..schedules._action import FORWARD, Action
from ._program import Program


def nbytes(spec: Any) -> int:
    """The bytes of an array."""
    return spec.size * spec.dtype.itemsize


def live(program: Program) -> Iterator[list[int]]:
    """The bytes of each place before the first instruction, then after each.

    Counted are arguments that are in a place, which are the caller's and stay unless
    they are donated, and all that instructions make; not what a program needs while it
    runs.
    """
    now = [0 for _ in program.devices]

    def count(slots: Iterable[int], sign: int) -> None:
        for slot in slots:
            if program.places[slot] >= 0:
                now[program.places[slot]] += sign * program.nbytes[slot]

    given = program.constants.stop
    count(range(given), 1)
    yield [*now]
    for instruction in program.instructions:
        donated = set(instruction.donates)
        count(instruction.writes, 1)
        count((x for x in instruction.frees if x >= given or x in donated), -1)
        yield [*now]


def peaks(program: Program) -> list[int]:
    """The most that each place holds."""
    counts = live(program)
    most = next(counts)
    for instruction, now in zip(program.instructions, counts, strict=True):
        place = instruction.place  # no other holds more after it than before
        most[place] = max(most[place], now[place])
    return most


Cells = dict[tuple[int, int], int]


def residuals(program: Program) -> Cells:
    """What each stage holds of each micro-batch between its forward and its backward.

    Read off the list: what a forward has read or made and only backwards of the same
    stage and micro-batch read later; not what stays, such as weights.
    """
    readers: dict[int, list[Any]] = {}
    for instruction in program.instructions:
        for slot in instruction.reads:
            readers.setdefault(slot, []).append(instruction.label)
    found: Cells = {}
    for instruction in program.instructions:
        label = instruction.label
        if instruction.is_move or not isinstance(label, Action) or label.op != FORWARD:
            continue
        cell = stage, microbatch = label.stage, label.microbatch
        for slot in {*instruction.reads, *instruction.writes}:
            labels = readers.get(slot, [])
            if slot < program.constants.stop or not _are_of(microbatch, labels):
                continue
            if any(x.stage == stage and x.op != FORWARD for x in labels):
                found[cell] = found.get(cell, 0) + program.nbytes[slot]
    return found


def _are_of(microbatch: int, labels: Sequence[Any]) -> bool:
    return all(isinstance(x, Action) and x.microbatch == microbatch for x in labels)


def most_residuals(program: Program, num_stages: int) -> Sequence[int]:
    """The most residuals of each stage, of all micro-batches at once."""
    sizes = residuals(program)
    now, most = [0] * num_stages, [0] * num_stages
    labels = [i.label for i in program.instructions if not i.is_move]
    actions = [label for label in labels if isinstance(label, Action)]
    last = {action[1:]: number for number, action in enumerate(actions)}
    for number, action in enumerate(actions):
        stage, cell = action.stage, action[1:]
        if action.op == FORWARD:
            now[stage] += sizes.get(cell, 0)
            most[stage] = max(most[stage], now[stage])
        elif last[cell] == number:
            now[stage] -= sizes.get(cell, 0)
    return most
