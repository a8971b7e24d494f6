"""What a mini-batch moves and stores, for predictions on paper."""

from collections.abc import Iterator, Sequence
from typing import Any

from .._functions._batch import Batch
from .._functions._weights import sum_spec
from .._instructions._bytes import nbytes, residuals
from .._instructions._instruction import Instruction
from .._instructions._program import Program
from .._jaxprs._cheapest import total_bytes
from ..schedules import Action, Costs
from ..schedules._action import FORWARD, INPUT, WEIGHT
from ..schedules._costs import Skip
from ._slice import specs
from ._stages import Stages


def costs_of(
    program: Program, stages: Stages, batch: Batch, placement: Sequence[int]
) -> Costs:
    """The bytes that a mini-batch with a loss moves and stores; times are left at one.

    Args:
      program: its instructions.
      stages: what runs.
      batch: the mini-batch.
      placement: the rank of each stage.

    Returns:
      Costs with one number per stage and micro-batch. A schedule that is simulated with
      them has the peaks of its program, unless stages share what is counted for each:
      an output that its stage stores too, a leaf of the input without a batch axis, the
      keys of a step.
    """
    own, constants = _Bytes(program, stages, batch), _constants(program, placement)
    numbers, count = range(len(placement)), range(len(batch.sizes))

    def table(number: Any) -> list[list[int]]:
        return [[number(s, m) for m in count] for s in numbers]

    return Costs(
        boundary_bytes=table(own.boundary),
        cotangent_bytes=table(own.cotangent),
        residual_bytes=table(own.residual),
        pending_bytes=table(own.pending),
        extra_bytes=table(own.extra),
        emitted_bytes=table(own.emitted),
        parameter_bytes=[own.parameters(s) + constants.get(s, 0) for s in numbers],
        accumulator_bytes=[own.sums(s) for s in numbers],
        shared_bytes=[own.shared(s) for s in numbers],
        skips=tuple(own.skips()),
    )


class _Bytes:
    """What a stage moves and stores of a micro-batch.

    Args:
      program: the instructions of a mini-batch.
      stages: what runs.
      batch: the mini-batch.
    """

    def __init__(self, program: Program, stages: Stages, batch: Batch) -> None:
        self._program, self._stages, self._axes = program, stages, batch.axes
        self._count, self._last = range(len(batch.sizes)), stages.num_stages - 1
        self._ran = {i.label for i in program.instructions if not i.is_move}
        self._between = residuals(program)
        self._made = [_makers(stages, m) for m in self._count]

    def _arriving(self, source: int, s: int, m: int) -> list[Any]:
        arrives = self._stages.part(s, m).arrives
        return [var for var in arrives if self._made[m][var] == source]

    def _wanted(self, variables: Sequence[Any], m: int) -> int:
        return total_bytes([v for v in variables if self._stages.has_gradient(v, m)])

    def boundary(self, s: int, m: int) -> int:
        """What it reads of the stage before it, or of the input."""
        inputs = self._stages.part(0, m).inputs
        return total_bytes(self._arriving(s - 1, s, m) if s else inputs)

    def cotangent(self, s: int, m: int) -> int:
        """What it sends back of that."""
        return self._wanted(self._arriving(s - 1, s, m), m)

    def skips(self) -> Iterator[Skip]:
        """What stages read of those farther before them."""
        for s in range(self._last + 1):
            for source in range(s - 1):
                found = [self._arriving(source, s, m) for m in self._count]
                if any(found):
                    cotangents = [self._wanted(own, m) for m, own in enumerate(found)]
                    yield Skip(source, s, list(map(total_bytes, found)), cotangents)

    def _given(self, s: int, m: int, of_examples: bool) -> int:
        """What it is given besides the input, of examples or the same for all."""
        axes = dict(zip(self._stages.program(m).given, self._axes, strict=False))
        own = [v for v in self._stages.part(s, m).given if v in axes]
        rest = own if s else [v for v in own if v not in self._stages.part(0, m).inputs]
        return total_bytes([v for v in rest if (axes[v] is not None) == of_examples])

    def extra(self, s: int, m: int) -> int:
        """What a micro-batch brings to it besides the input."""
        return self._given(s, m, True)

    def shared(self, s: int) -> int:
        """What is the same for all micro-batches, such as keys."""
        return self._given(s, 0, False)

    def residual(self, s: int, m: int) -> int:
        """What it stores between its forward and its backward."""
        if Action(FORWARD, s, m) in self._ran:
            # What came with the batch counts as extra until the backward.
            return max(self._between.get((s, m), 0) - self.extra(s, m), 0)
        part = self._stages.part(s, m)  # it waits for the backward, which does all
        return total_bytes([*part.arrives, *part.inputs])

    def pending(self, s: int, m: int) -> int:
        """What it stores between the two halves of its backward."""
        if Action(WEIGHT, s, m) not in self._ran:
            return 0
        if Action(INPUT, s, m) in self._ran:
            return _pending(self._program, s, m)
        after = self.cotangent(s + 1, m) if s < self._last else 0
        return self.residual(s, m) + after

    def emitted(self, s: int, m: int) -> int:
        """What it returns besides the loss, but for what it writes."""
        program, states = self._stages.program(m), self._stages.states
        written = {i for state in states for i in state.leaves}
        leaves = [v for i, v in enumerate(program.aux_vars) if i not in written]
        made = [v for v in leaves if v not in program.params]
        return total_bytes(made) * (s == self._last)

    def parameters(self, s: int) -> int:
        """What it reads in each micro-batch, and what stays there; no constants."""
        stages, count = self._stages, self._stages.first.num_params
        constants = range(count - len(stages.first.constants), count)
        weights = [weight for weight in stages.weights_on(s) if weight not in constants]
        return sum(nbytes(stages.spec_of(weight)) for weight in weights)

    def sums(self, s: int) -> int:
        """Its sums of gradients, of the loss and of what micro-batches write."""
        stages = self._stages
        trained = [stages.spec_of(weight) for weight in stages.trained_by(s)]
        loss = specs(stages.first.loss) * (s == self._last)
        found = [*map(sum_spec, [*trained, *loss]), *stages.states[s].sum_specs]
        return sum(map(nbytes, found))


def _makers(stages: Stages, m: int) -> dict[Any, int]:
    """The stage that makes what others read."""
    parts = [stages.part(s, m) for s in range(stages.num_stages)]
    return {v: s for s, part in enumerate(parts) for v in [*part.leaves, *part.aux]}


def _constants(program: Program, placement: Sequence[int]) -> dict[int, int]:
    """The bytes of the constants that each stage reads, or that its batch is split by.

    What stages of one rank share is that of the first. Where several ranks run a stage,
    of the one that reads most.
    """
    stages: dict[int, int] = {}  # of each slot, the stage that it is read for
    found: dict[tuple[int, int], dict[int, int]] = {}
    for instruction in reversed(program.instructions):
        label, reads = instruction.label, instruction.reads
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


def _pending(program: Program, s: int, m: int) -> int:
    """The bytes that wait between the two halves of a backward."""
    first = next(
        n
        for n, i in enumerate(program.instructions)
        if i.label == Action(INPUT, s, m) and not i.is_move
    )
    before = program.instructions[: first + 1]
    made = {slot for i in before for slot in i.writes if not _is_weight_grad(i)}
    ended = {slot for i in before for slot in i.frees}
    second = next(i for i in program.instructions if i.label == Action(WEIGHT, s, m))
    sums = set(second.donates)
    read = {*second.reads} - sums
    others = {
        slot
        for i in program.instructions
        if not i.is_move and _is_of_another(i, s, m)
        for slot in {*i.reads} - {*i.donates}
    }
    return sum(nbytes(program.specs[slot]) for slot in read & made - ended - others)


def _is_weight_grad(instruction: Instruction) -> bool:
    """Whether it is, or sends what was made by, a weight gradient of the schedule."""
    label = instruction.label
    return isinstance(label, Action) and label.op == WEIGHT


def _is_of_another(instruction: Instruction, stage: int, microbatch: int) -> bool:
    """Whether it is an action of another stage or of another micro-batch."""
    label = instruction.label
    if not isinstance(label, Action):
        return False
    return (label.stage, label.microbatch) != (stage, microbatch)
