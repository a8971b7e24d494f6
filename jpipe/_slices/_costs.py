"""What a mini-batch moves and keeps, for predictions on paper."""

from collections.abc import Iterator, Sequence
from typing import Any

from .._functions._batch import Batch
from .._functions._weights import sum_spec
from .._instructions._bytes import nbytes, residuals
from .._instructions._program import Program
from .._jaxprs import _cheapest
from ..schedules import Action, Costs
from ..schedules._action import FORWARD, INPUT, WEIGHT
from ..schedules._costs import Skip
from ._slice import specs
from ._stages import Stages


def costs_of(
    program: Program, stages: Stages, batch: Batch, placement: Sequence[int]
) -> Costs:
    """The bytes that a mini-batch with a loss moves and keeps; times are left at one.

    Args:
      program: its instructions.
      stages: what runs.
      batch: the mini-batch.
      placement: the rank of each stage.

    Returns:
      Costs with one number per stage and micro-batch. A schedule that is simulated with
      them has the peaks of its program, unless stages share what is counted for each:
      an output that its stage keeps too, a leaf of the input without a batch axis, the
      keys of a step.
    """
    numbers, count = range(len(placement)), range(len(batch.sizes))
    last = numbers[-1]
    ran = {i.label for i in program.instructions if not i.is_move}
    between, constants = residuals(program), _constants(program, placement)
    made = [_makers(stages, m) for m in count]

    def table(number: Any) -> list[list[int]]:
        return [[number(s, m) for m in count] for s in numbers]

    def arriving(source: int, s: int, m: int) -> list[Any]:
        return [v for v in stages.part(s, m).arrives if made[m][v] == source]

    def boundary(s: int, m: int) -> int:
        return total(arriving(s - 1, s, m) if s else stages.part(0, m).inputs)

    def wanted(variables: Sequence[Any], m: int) -> int:
        return total([v for v in variables if stages.has_gradient(v, m)])

    def cotangent(s: int, m: int) -> int:
        return wanted(arriving(s - 1, s, m), m)

    def given(s: int, m: int, of_examples: bool) -> int:
        axes = dict(zip(stages.program(m).given, batch.x_axes, strict=False))
        own = [v for v in stages.part(s, m).given if v in axes]
        rest = own if s else [v for v in own if v not in stages.part(0, m).inputs]
        return total([v for v in rest if (axes[v] is not None) == of_examples])

    def residual(s: int, m: int) -> int:
        if Action(FORWARD, s, m) in ran:
            # What came with the batch counts as extra until the backward.
            return max(between.get((s, m), 0) - given(s, m, True), 0)
        part = stages.part(s, m)  # what it reads waits for the backward, which does all
        return total([*part.arrives, *part.inputs])

    def pending(s: int, m: int) -> int:
        if Action(WEIGHT, s, m) not in ran:
            return 0
        if Action(INPUT, s, m) in ran:
            return _pending(program, s, m)
        return residual(s, m) + (cotangent(s + 1, m) if s < last else 0)

    def emitted(s: int, m: int) -> int:
        own, state = stages.program(m), {i for x in stages.states for i in x.leaves}
        leaves = [v for i, v in enumerate(own.beside) if i not in state]
        return total([v for v in leaves if v not in own.params]) * (s == last)

    def sums(s: int) -> list[Any]:
        trained = [stages.spec_of(weight) for weight in stages.trained_by(s)]
        loss = specs(stages.first.loss) * (s == last)
        return [*map(sum_spec, [*trained, *loss]), *stages.states[s].sum_specs]

    def skips() -> Iterator[Skip]:
        for s in numbers:
            for source in range(s - 1):
                found = [arriving(source, s, m) for m in count]
                if any(found):
                    cotangents = [wanted(own, m) for m, own in enumerate(found)]
                    yield Skip(source, s, list(map(total, found)), cotangents)

    return Costs(
        boundary_bytes=table(boundary),
        cotangent_bytes=table(cotangent),
        residual_bytes=table(residual),
        pending_bytes=table(pending),
        extra_bytes=table(lambda s, m: given(s, m, True)),
        emitted_bytes=table(emitted),
        parameter_bytes=[
            sum(map(nbytes, map(stages.spec_of, stages.held_by(s))))
            + constants.get(s, 0)
            for s in numbers
        ],
        accumulator_bytes=[sum(map(nbytes, sums(s))) for s in numbers],
        shared_bytes=[given(s, 0, False) for s in numbers],
        skips=tuple(skips()),
    )


def _makers(stages: Stages, m: int) -> dict[Any, int]:
    """The stage that makes what others read."""
    parts = [stages.part(s, m) for s in range(stages.num_stages)]
    return {v: s for s, part in enumerate(parts) for v in [*part.leaves, *part.beside]}


def _constants(program: Program, placement: Sequence[int]) -> dict[int, int]:
    """The bytes of the constants that each stage reads, or that its batch is split by.

    What stages of one rank share is that of the first. Where several ranks run a stage,
    of the one that reads most.
    """
    stages: dict[int, int] = {}  # of each slot, the stage that it is read for
    found: dict[tuple[int, int], dict[int, int]] = {}
    for instruction in reversed(program.instructions):
        label, reads = instruction.label, (*instruction.reads, *instruction.donates)
        if isinstance(label, str):
            known = (stages[slot] for slot in instruction.writes if slot in stages)
            stage = next(known, None)
        else:
            stage = label.stage
        if stage is not None:
            stages |= dict.fromkeys(reads, stage)
            sizes = {s: program.nbytes[s] for s in reads if s in program.constants}
            found.setdefault((stage, instruction.place), {}).update(sizes)
    most: dict[int, int] = {}
    counted: set[tuple[int, int]] = set()
    for (stage, _), sizes in sorted(found.items(), key=lambda item: item[0]):
        new = {s: n for s, n in sizes.items() if (placement[stage], s) not in counted}
        counted.update((placement[stage], slot) for slot in new)
        most[stage] = max(most.get(stage, 0), sum(new.values()))
    return most


def total(variables: Sequence[Any]) -> int:
    """The bytes of variables."""
    return sum(map(_cheapest.nbytes, dict.fromkeys(variables)))


def _pending(program: Program, s: int, m: int) -> int:
    """The bytes that wait between the two halves of a backward."""
    first = next(
        n
        for n, i in enumerate(program.instructions)
        if i.label == Action(INPUT, s, m) and not i.is_move
    )
    before = program.instructions[: first + 1]
    made = {slot for i in before for slot in i.writes if i.label[0] != WEIGHT}
    ended = {slot for i in before for slot in i.frees}
    second = next(i for i in program.instructions if i.label == Action(WEIGHT, s, m))
    sums = set(second.donates)
    read = {*second.reads} - sums
    others = {
        slot
        for i in program.instructions
        if not isinstance(i.label, str) and i.label[1:] != (s, m)
        for slot in i.reads
        if not i.is_move
    }
    return sum(nbytes(program.specs[slot]) for slot in read & made - ended - others)
