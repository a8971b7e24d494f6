"""What a mini-batch moves and keeps, for predictions on paper."""

from collections.abc import Iterator, Sequence
from typing import Any

from .._functions._weights import sum_spec
from .._instructions._bytes import nbytes, residuals
from .._instructions._program import Program
from .._jaxprs import _cheapest
from ..schedules import Action, Costs
from ..schedules._action import FORWARD, INPUT, WEIGHT
from ..schedules._costs import Skip
from ._listed import Listed
from ._slice import specs


def costs_of(program: Program, listed: Listed, placement: Sequence[int]) -> Costs:
    """The bytes that a mini-batch with a loss moves and keeps; times are left at one.

    Args:
      program: its instructions.
      listed: the layers on it.
      placement: the rank of each stage.

    Returns:
      Costs with one number per stage and micro-batch. A schedule that is simulated with
      them has the peaks of its program, unless stages share what is counted for each:
      an output that its stage keeps too, a leaf of the input without a batch axis, the
      keys of a step.
    """
    num_stages, own = len(placement), listed.stages
    stages, count = range(num_stages), range(len(listed.batch.sizes))
    ran = {i.label for i in program.instructions if not i.is_move}
    between, constants = residuals(program), _constants(program, placement)

    def table(number: Any) -> list[list[int]]:
        return [[number(s, m) for m in count] for s in stages]

    def boundary(s: int, m: int) -> int:
        return total(listed.entering(s, m))

    def cotangent(s: int, m: int) -> int:
        return total(listed.wanted(listed.entering(s, m), m))

    def residual(s: int, m: int) -> int:
        if Action(FORWARD, s, m) in ran:
            # What came with the batch counts as extra until the backward.
            return max(between.get((s, m), 0) - extra(s, m), 0)
        part = own.part(s, m)  # what it reads waits for the backward, which does all
        return total([*part.arrives, *part.inputs])

    def pending(s: int, m: int) -> int:
        if Action(WEIGHT, s, m) not in ran:
            return 0
        if Action(INPUT, s, m) in ran:
            return _pending(program, s, m)
        after = cotangent(s + 1, m) if s + 1 < num_stages else 0
        return residual(s, m) + after

    def extra(s: int, m: int) -> int:
        return total(listed.given(s, 1, m))

    def emitted(s: int, m: int) -> int:
        return total(own.program(m).beside[: listed.num_aux]) * (s == stages[-1])

    def sums(s: int) -> list[Any]:
        trained = specs([own.first.params[i] for i in own.trained_by(s)])
        loss = specs(own.first.loss) * (s == stages[-1])
        return [*map(sum_spec, [*trained, *loss]), *own.states[s].sum_specs]

    return Costs(
        boundary_bytes=table(boundary),
        cotangent_bytes=table(cotangent),
        residual_bytes=table(residual),
        pending_bytes=table(pending),
        extra_bytes=table(extra),
        emitted_bytes=table(emitted),
        parameter_bytes=[
            sum(map(nbytes, {id(x): x for x in weights.specs}.values()))
            + constants.get(s, 0)
            for s, weights in enumerate(listed.layout.weights)
        ],
        accumulator_bytes=[sum(map(nbytes, sums(s))) for s in stages],
        shared_bytes=[total(listed.given(s, 2)) for s in stages],
        skips=tuple(skip for s in stages for skip in skips_into(listed, s, count)),
    )


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


def skips_into(listed: Listed, stage: int, count: Sequence[int]) -> Iterator[Skip]:
    """The skip connections that end in a stage, with the bytes of micro-batches."""
    each = [listed.skips_into(stage, m) for m in count]
    for row in zip(*each, strict=True):
        route = row[0][0]
        sizes = [total(found) for _, found in row]
        pairs = zip(row, count, strict=True)
        cotangents = [total(listed.wanted(found, m)) for (_, found), m in pairs]
        yield Skip(route.source, stage, sizes, cotangents)


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
