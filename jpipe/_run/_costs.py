"""What a mini-batch moves and keeps, for predictions on paper."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax

from .._functions._batch import Batch
from .._functions._task import Task
from .._functions._weights import sum_spec
from .._instructions._bytes import nbytes, residuals
from .._instructions._program import Program
from ..schedules import Action, Costs
from ..schedules._action import FORWARD, INPUT, WEIGHT
from ..schedules._costs import Skip
from ._work import Works


def costs_of(
    program: Program, works: Works, batch: Batch, placement: Sequence[int]
) -> Costs:
    """The bytes that a mini-batch with a loss moves and keeps; times are left at one.

    Args:
      program: its instructions.
      works: what each stage does on each micro-batch.
      batch: the mini-batch.
      placement: the rank of each stage.

    Returns:
      Costs with one number per stage and micro-batch. A schedule that is simulated with
      them has the peaks of its program, unless stages share what is counted for each:
      an output that its stage keeps too, a leaf of the input without a batch axis, the
      keys of a step.
    """
    num_stages = len(placement)
    stages, count = range(num_stages), range(len(batch.sizes))
    ran = {i.label for i in program.instructions if not i.is_move}
    between, constants = residuals(program), _constants(program, placement)
    tasks = [[works.task(s, m) for m in count] for s in stages]

    def table(number: Any) -> list[list[int]]:
        return [[number(s, m) for m in count] for s in stages]

    def boundary(s: int, m: int) -> int:
        return total(entering(tasks[s][m])[-1])

    def cotangent(s: int, m: int) -> int:
        return total(entering(tasks[s][m], wanted=True)[-1])

    def residual(s: int, m: int) -> int:
        if Action(FORWARD, s, m) in ran:
            # What came with the batch counts as extra until the backward.
            return max(between.get((s, m), 0) - extra(s, m), 0)
        return total(tasks[s][m].x)  # it waits for the backward, which does all

    def pending(s: int, m: int) -> int:
        if Action(WEIGHT, s, m) not in ran:
            return 0
        if Action(INPUT, s, m) in ran:
            return _pending(program, s, m)
        after = cotangent(s + 1, m) if s + 1 < num_stages else 0
        return residual(s, m) + after

    def extra(s: int, m: int) -> int:
        return total(tasks[s][m].extra.get("targets", ()))

    sums = [
        [*map(sum_spec, row[0].weights.trainable_specs), *row[0].sum_specs]
        for row in tasks
    ]
    return Costs(
        boundary_bytes=table(boundary),
        cotangent_bytes=table(cotangent),
        residual_bytes=table(residual),
        pending_bytes=table(pending),
        extra_bytes=table(extra),
        emitted_bytes=table(
            lambda s, m: (
                total(jax.tree.leaves(tasks[s][m].y)) if tasks[s][m].has_loss else 0
            )
        ),
        parameter_bytes=[
            total(row[0].weights.specs) + constants.get(s, 0)
            for s, row in enumerate(tasks)
        ],
        accumulator_bytes=list(map(total, sums)),
        shared_bytes=[total(row[0].extra.get("rngs", ())) for row in tasks],
        skips=tuple(skip for row in tasks for skip in skips_into(row)),
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


def skips_into(row: Sequence[Task]) -> Iterator[Skip]:
    """The skip connections that end in a stage, given its tasks by micro-batch."""
    for number, route in enumerate(row[0].ports.incoming):
        sizes = [total(entering(task)[number]) for task in row]
        cotangents = [total(entering(task, wanted=True)[number]) for task in row]
        yield Skip(route.source, row[0].index, sizes, cotangents)


def total(specs: Any) -> int:
    """The bytes of arrays; one object stands for one array."""
    return sum(map(nbytes, {id(spec): spec for spec in specs}.values()))


def entering(task: Task, wanted: bool = False) -> list[list[Any]]:
    """The leaves of each skip connection that enters a stage, and of its input.

    Args:
      task: the stage.
      wanted: whether only those are meant that have a gradient.
    """
    pairs = list(zip(task.x, task.wanted.x, strict=True))
    arrived, x = (), jax.tree.unflatten(task.x_tree, range(len(pairs)))
    if task.ports.incoming:
        arrived, x = x
    return [
        [pairs[i][0] for i in jax.tree.leaves(part) if pairs[i][1] or not wanted]
        for part in [*arrived, x]
    ]


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
