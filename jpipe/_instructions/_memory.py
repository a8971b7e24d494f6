"""The bytes that each place holds, read off a list of instructions.

Counted are arguments that are in a place, which are the caller's and stay unless they
are donated, and all results; not the workspace of a call while it runs, nor operands
that it frees beside its results. Where these are large, as gradients of shards beside
their sums, plans count them as workspace: see `planning/_forecast`.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ..schedules._action import FORWARD, Action
from ._instruction import WHOLE_BATCH
from ._program import Program


def live_bytes(program: Program) -> Iterator[list[int]]:
    """Yields the bytes of each place before the first instruction, then after each."""
    place_bytes = [0 for _ in program.devices]

    def count(slots: Iterable[int], *, sign: int) -> None:
        for slot in slots:
            place = program.places[slot]
            if place >= 0:
                place_bytes[place] += sign * program.nbytes[slot]

    count(program.inputs, sign=1)
    yield [*place_bytes]

    for instruction in program.instructions:
        donated = set(instruction.donates)
        freed = [
            slot
            for slot in instruction.frees
            if slot not in program.inputs or slot in donated
        ]
        count(instruction.writes, sign=1)
        count(freed, sign=-1)
        yield [*place_bytes]


def peak_bytes(program: Program) -> list[int]:
    """The most bytes that each place holds."""
    states = live_bytes(program)
    peak_bytes = next(states)
    for instruction, place_bytes in zip(program.instructions, states, strict=True):
        place = instruction.place  # no other holds more after it than before
        peak_bytes[place] = max(peak_bytes[place], place_bytes[place])
    return peak_bytes


# (stage, micro-batch) -> bytes of its residuals
Cells = dict[tuple[int, int], int]


def residual_bytes(program: Program) -> Cells:
    """The bytes that each stage holds of each micro-batch from forward to backward.

    Read off the list: what a forward reads or writes and only backwards of the same
    stage and micro-batch read later; not what stays, such as weights.
    """
    # slot -> the labels of the instructions that read it
    readers: dict[int, list[Any]] = {}
    for instruction in program.instructions:
        for slot in instruction.reads:
            readers.setdefault(slot, []).append(instruction.label)

    cell_bytes: Cells = {}
    for instruction in program.instructions:
        action = instruction.label
        if instruction.is_move or not isinstance(action, Action):
            continue
        if action.op != FORWARD:
            continue
        cell = action.stage, action.microbatch
        for slot in {*instruction.reads, *instruction.writes}:
            is_input = slot in program.inputs
            if not is_input and _is_residual(action, readers.get(slot, [])):
                cell_bytes[cell] = cell_bytes.get(cell, 0) + program.nbytes[slot]
    return cell_bytes


def _is_residual(forward: Action, readers: Sequence[Any]) -> bool:
    """True if a backward reads a value of a forward, and no other micro-batch does."""
    has_backward = False
    for reader in readers:
        if reader == WHOLE_BATCH:
            continue
        if not isinstance(reader, Action) or reader.microbatch != forward.microbatch:
            return False
        if reader.stage == forward.stage and reader.op != FORWARD:
            has_backward = True
    return has_backward


def peak_residual_bytes(program: Program, num_stages: int) -> Sequence[int]:
    """The most bytes of residuals of each stage, of all micro-batches at once."""
    cell_bytes = residual_bytes(program)
    labels = [i.label for i in program.instructions if not i.is_move]
    actions = [label for label in labels if isinstance(label, Action)]
    # (stage, micro-batch) -> the index of its last action
    last_index: dict[tuple[int, int], int] = {}
    for index, action in enumerate(actions):
        last_index[action.stage, action.microbatch] = index

    stage_bytes = [0] * num_stages
    peak_bytes = [0] * num_stages
    for index, action in enumerate(actions):
        stage = action.stage
        cell = stage, action.microbatch
        if action.op == FORWARD:
            stage_bytes[stage] += cell_bytes.get(cell, 0)
            peak_bytes[stage] = max(peak_bytes[stage], stage_bytes[stage])
        elif last_index[cell] == index:
            stage_bytes[stage] -= cell_bytes.get(cell, 0)
    return peak_bytes
