"""How many bytes each place holds, read off a list of instructions."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ._program import Program


def nbytes(spec: Any) -> int:
    """The bytes of an array."""
    return spec.size * spec.dtype.itemsize


def live(program: Program) -> list[list[int]]:
    """The bytes of each place before the first instruction, then after each.

    Counted are arguments that are in a place, which are the caller's and stay unless
    they are donated, and all that instructions make; not what a program needs while it
    runs.
    """
    return [list(now) for now in _counts(program)]


def peaks(program: Program) -> list[int]:
    """The most that each place holds."""
    counts = _counts(program)
    most = list(next(counts))
    for instruction, now in zip(program.instructions, counts, strict=True):
        place = instruction.place  # no other holds more after it than before
        most[place] = max(most[place], now[place])
    return most


def _counts(program: Program) -> Iterator[list[int]]:
    """The rows of `live`, as one list that changes: there may be a great many."""
    now = [0 for _ in program.devices]

    def count(slots: Iterable[int], sign: int) -> None:
        for slot in slots:
            if program.places[slot] >= 0:
                now[program.places[slot]] += sign * program.nbytes[slot]

    given = len(program.specs) - sum(len(i.writes) for i in program.instructions)
    count(range(given), 1)
    yield now
    for instruction in program.instructions:
        own = set(instruction.donates)
        count(instruction.writes, 1)
        count((x for x in instruction.frees if x >= given or x in own), -1)
        yield now


Cells = dict[tuple[int, int], int]


def residuals(program: Program) -> Cells:
    """What each stage holds of each micro-batch between its forward and its backward.

    Read off the list: what a forward has read or made and only backwards of the same
    stage and micro-batch read later; not what stays, such as weights.
    """
    readers: dict[int, list[Any]] = {}
    for instruction in program.instructions:
        for slot in {*instruction.reads}:
            readers.setdefault(slot, []).append(instruction.label)
    found: Cells = {}
    for instruction in program.instructions:
        label = instruction.label
        if getattr(label, "op", None) != "F" or instruction.is_move:
            continue
        for slot in {*instruction.reads, *instruction.writes}:
            if slot < program.constants.stop:
                continue
            labels = readers.get(slot, [])
            alone = all(_is_of(x, label.microbatch) for x in labels)
            if alone and any(_same_cell(label, x) for x in labels):
                cell = label.stage, label.microbatch
                found[cell] = found.get(cell, 0) + program.nbytes[slot]
    return found


def _is_of(label: Any, microbatch: int) -> bool:
    return not isinstance(label, str) and label.microbatch == microbatch


def _same_cell(label: Any, other: Any) -> bool:
    return getattr(other, "op", None) in ("B", "I", "W") and label[1:] == other[1:]


def most_residuals(program: Program, num_stages: int) -> Sequence[int]:
    """The most that each stage keeps of all micro-batches at once."""
    sizes = residuals(program)
    now, most = [0] * num_stages, [0] * num_stages
    last = {
        i.label[1:]: n
        for n, i in enumerate(program.instructions)
        if getattr(i.label, "op", None) in ("B", "I", "W") and not i.is_move
    }
    for number, instruction in enumerate(program.instructions):
        label = instruction.label
        if instruction.is_move or isinstance(label, str):
            continue
        cell = label[1:]
        if label.op == "F":
            now[label.stage] += sizes.get(cell, 0)
            most[label.stage] = max(most[label.stage], now[label.stage])
        elif last[cell] == number:
            now[label.stage] -= sizes.get(cell, 0)
    return most
