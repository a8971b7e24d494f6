"""The bytes that each stage moves and stores, read off a list of instructions.

The writer and the readers of a value tell what it counts as. F, B, I and W are actions,
s is a stage, m a micro-batch, and a cell is a stage on a micro-batch. A value counts as
a field of `Costs`:

    written by               read by                     counts as
    ---------------------    ------------------------    -------------------------------
    the caller, in place     any action                  parameter_bytes
    the caller, elsewhere    actions of one cell         boundary_bytes of stage 0,
                                                         extra_bytes of other stages
    the caller, elsewhere    actions of several m        shared_bytes
    no one: zeros            the first B or W of s       accumulator_bytes
    F of s - 1, m            F or B of s, m              boundary_bytes
    F of a stage before      F or B of s, m              bytes of a skip
    F of s, m or before      F, then B or I of s, m      residual_bytes
    F or I of s, m           W of s, m                   pending_bytes
    B or I of s, m           B or I of s - 1, m          cotangent_bytes
    any action of s, m       no action                   emitted_bytes

The call that reads results of all micro-batches, between forwards and backwards, is not
seen through. What it reads of m waits in the last stage from F to the call, and what it
writes for m in its stage from the call to B: both count as residuals of their stages.

Between actions there are moves and short calls, such as those that split a mini-batch
or add the cotangents of several readers. They are seen through: a copy counts as its
original, and an action *uses* the operands of a call that made its arguments.
"""

import enum
import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property

from ..schedules import Action, Costs, Schedule
from ..schedules._action import FORWARD, INPUT, OPS, WEIGHT
from ..schedules._costs import Skip
from ._instruction import Instruction
from ._memory import residual_bytes
from ._program import Program, Slot

# A stage and a micro-batch.
Cell = tuple[int, int]


class Origin(enum.Enum):
    """The origin of a value that no action wrote."""

    PARAMETER = enum.auto()  # a parameter, a constant, or computed of these once a step
    BATCH = enum.auto()  # the mini-batch, or a part of it
    ZEROS = enum.auto()  # the initial value of a sum
    ACTIONS = enum.auto()  # computed between actions, of values that these wrote


def stage_costs(program: Program, schedule: Schedule) -> Costs:
    """The bytes that a mini-batch with a loss moves and stores; times are left at one.

    Args:
      program: the instructions of the mini-batch.
      schedule: the schedule that they were lowered from.

    Returns:
      Costs with one number per stage and micro-batch. A schedule that is simulated with
      them has the peaks of its program, unless stages share what is counted for each:
      an output that its stage stores too, a leaf of the input without a batch axis, the
      keys of a step.
    """
    stage_bytes = _StageBytes(program, schedule)
    stages = range(schedule.num_stages)

    def row(nbytes: Callable[[int, int], int], stage: int) -> list[int]:
        return [nbytes(stage, m) for m in range(schedule.num_microbatches)]

    def table(nbytes: Callable[[int, int], int]) -> list[list[int]]:
        return [row(nbytes, stage) for stage in stages]

    return Costs(
        boundary_bytes=table(stage_bytes.input_bytes),
        cotangent_bytes=table(stage_bytes.cotangent_bytes),
        residual_bytes=table(stage_bytes.residual_bytes),
        pending_bytes=table(stage_bytes.bytes_between_halves),
        extra_bytes=table(stage_bytes.batch_part_bytes),
        emitted_bytes=table(stage_bytes.epilogue_bytes),
        parameter_bytes=stage_bytes.parameter_bytes(),
        accumulator_bytes=[stage_bytes.accumulator_bytes(stage) for stage in stages],
        shared_bytes=[stage_bytes.shared_bytes(stage) for stage in stages],
        skips=tuple(stage_bytes.skips()),
    )


class _StageBytes:
    """The writer and the readers of each value of a program.

    Args:
      program: the instructions of a mini-batch.
      schedule: the schedule that they were lowered from.
    """

    def __init__(self, program: Program, schedule: Schedule) -> None:
        self._program = program
        self._schedule = schedule
        self._residuals = residual_bytes(program)
        # action -> the calls that run for it, in order
        self._calls: dict[Action, list[Instruction]] = {}
        # slot of a copy -> slot of what it is a copy of
        self._original: dict[Slot, Slot] = {}
        # slot -> the action that wrote the value
        self._writer: dict[Slot, Action | Origin] = {}
        # slot -> the actions that read it
        self._readers: dict[Slot, set[Action]] = {}
        # slot -> the actions that read it, a copy, or what was made of it in between
        self._users: dict[Slot, set[Action]] = {}
        # the call that reads results of all micro-batches, if there is one
        self._tail: Instruction | None = None
        # cell -> the slots that its actions use
        self._used_by: dict[Cell, list[Slot]] = {}

        self._find_writers()
        self._find_readers()

    def _find_writers(self) -> None:
        program = self._program
        writer = self._writer
        for slot in program.inputs:
            is_in_place = program.places[slot] >= 0
            writer[slot] = Origin.PARAMETER if is_in_place else Origin.BATCH

        for instruction in program.instructions:
            label = instruction.label
            if instruction.is_move:
                pairs = zip(instruction.writes, instruction.reads, strict=True)
                for copy, slot in pairs:
                    self._original[copy] = self._original.get(slot, slot)
                    writer[copy] = writer[slot]
                continue
            if isinstance(label, Action):
                self._calls.setdefault(label, []).append(instruction)
                origin = label
            else:
                origin = _origin_of_call([writer[slot] for slot in instruction.reads])
            if instruction.joins_batch:
                self._tail = instruction
            writer.update(dict.fromkeys(instruction.writes, origin))

    def _find_readers(self) -> None:
        for instruction in reversed(self._program.instructions):
            label = instruction.label
            if instruction.is_move:
                pairs = zip(instruction.writes, instruction.reads, strict=True)
                for copy, slot in pairs:
                    users = self._users.get(copy, set())
                    self._users.setdefault(slot, set()).update(users)
                continue
            users = set[Action]()
            if isinstance(label, Action):
                users.add(label)
                for slot in instruction.reads:
                    self._readers.setdefault(slot, set()).add(label)
            elif not instruction.joins_batch:
                for slot in instruction.writes:
                    users |= self._users.get(slot, set())
            for slot in instruction.reads:
                self._users.setdefault(slot, set()).update(users)

        for slot, users in self._users.items():
            for cell in set(map(_cell, users)):
                self._used_by.setdefault(cell, []).append(slot)

    # -------------------------------------------------------- per stage and micro-batch

    def input_bytes(self, stage: int, m: int) -> int:
        """The bytes of its input activation; in stage 0 of the input of the model."""
        if stage == 0:
            return self._total(self._model_inputs(m))
        return self._sent(stage - 1, stage, m)

    def cotangent_bytes(self, stage: int, m: int) -> int:
        """The bytes of the cotangent of its input, which it sends back."""
        return self._sent(stage, stage - 1, m) if stage else 0

    def batch_part_bytes(self, stage: int, m: int) -> int:
        """The bytes of parts of the mini-batch that it reads, besides `input_bytes`."""
        nbytes = self._total(self._batch_parts(stage, m))
        return nbytes if stage else nbytes - self._total(self._model_inputs(m))

    def residual_bytes(self, stage: int, m: int) -> int:
        """The bytes that it stores between its forward and its backward."""
        return self._residual_bytes(stage, m) + self._total(self._waiting(stage, m))

    def _residual_bytes(self, stage: int, m: int) -> int:
        """The bytes of residuals that only its backward reads."""
        if Action(FORWARD, stage, m) not in self._calls:
            # The forward is a part of the backward, for which its inputs wait.
            skipped = sum(self._sent(source, stage, m) for source in range(stage - 1))
            return self.input_bytes(stage, m) + skipped
        # Until the backward a part of the mini-batch counts as such.
        batch_bytes = self.batch_part_bytes(stage, m) if stage else 0
        return max(self._residuals.get((stage, m), 0) - batch_bytes, 0)

    def bytes_between_halves(self, stage: int, m: int) -> int:
        """The bytes that it stores between the two halves of its backward."""
        weight_grad = Action(WEIGHT, stage, m)
        if weight_grad not in self._calls:
            return 0
        if Action(INPUT, stage, m) not in self._calls:
            is_last = stage == self._schedule.num_stages - 1
            cotangent_bytes = 0 if is_last else self.cotangent_bytes(stage + 1, m)
            return self.residual_bytes(stage, m) + cotangent_bytes
        return self._total(
            slot
            for slot in self._reads(self._calls[weight_grad])
            if self._writer[slot] is not Origin.PARAMETER
            and not self._is_sum(slot, stage, m)
            and set(map(_cell, self._users[slot])) == {(stage, m)}
        )

    def epilogue_bytes(self, stage: int, m: int) -> int:
        """The bytes that it leaves for the end of the step, sums not counted."""
        calls = self._calls_of(stage, m)
        new_bytes = 0
        for slot in itertools.chain.from_iterable(call.writes for call in calls):
            users = self._users.get(slot, set())
            # A new sum, or a value that no action reads.
            is_of_others = all(a.stage == stage and a.microbatch != m for a in users)
            if is_of_others and slot not in self._read_by_tail:
                new_bytes += self._program.nbytes[slot]
        sums = [slot for slot in self._reads(calls) if self._is_sum(slot, stage, m)]
        # The last micro-batch drops sums that the caller does not ask for.
        return max(new_bytes - self._total(sums), 0)

    def _waiting(self, stage: int, m: int) -> Iterator[Slot]:
        """The slots that wait for the tail in the last stage, or for B after it."""
        if self._tail is None:
            return
        if stage == self._schedule.num_stages - 1:
            for slot in self._tail.reads:
                users = self._users[slot]
                is_residual = any(a.stage == stage and a.op != FORWARD for a in users)
                if not is_residual and self._microbatches_of(slot) == {m}:
                    yield slot
        else:
            for slot in self._used_by.get((stage, m), ()):
                if slot in self._tail.writes:
                    yield slot

    # ----------------------------------------------------------------- per stage, skips

    def skips(self) -> Iterator[Skip]:
        """The values that stages read of stages before the previous one."""
        microbatches = range(self._schedule.num_microbatches)
        for target in range(self._schedule.num_stages):
            for source in range(target - 1):
                sizes = [self._sent(source, target, m) for m in microbatches]
                if any(sizes):
                    grads = [self._sent(target, source, m) for m in microbatches]
                    yield Skip(source, target, bytes=sizes, cotangent_bytes=grads)

    def shared_bytes(self, stage: int) -> int:
        """The bytes that all micro-batches read, such as keys."""
        slots = set[Slot]()
        for m in range(self._schedule.num_microbatches):
            slots |= set(self._reads(self._calls_of(stage, m)))
        shared = {
            slot
            for slot in slots
            if self._writer[slot] is Origin.BATCH and self._is_shared(slot)
        }
        if stage == self._schedule.num_stages - 1:
            for slot in self._read_by_tail:
                is_of_batch = self._writer[slot] is Origin.BATCH
                if is_of_batch and not self._microbatches_of(slot):
                    shared.add(slot)
        return self._total(shared)

    def accumulator_bytes(self, stage: int) -> int:
        """The bytes of its sums: gradients, the loss, what micro-batches write."""
        by_place: dict[int, int] = {}
        for slot, readers in self._readers.items():
            is_of_stage = any(action.stage == stage for action in readers)
            if is_of_stage and self._writer[slot] is Origin.ZEROS:
                place = self._program.places[slot]
                by_place[place] = by_place.get(place, 0) + self._program.nbytes[slot]
        return max(by_place.values(), default=0)

    def parameter_bytes(self) -> list[int]:
        """The bytes of the parameters and constants of each stage.

        Stages of one rank may share some: they count for the first that reads them.
        Where several ranks run a stage, the one with the most bytes counts.
        """
        place_of = {action: calls[0].place for action, calls in self._calls.items()}
        first_stage: dict[int, int] = {}  # place -> the first stage there
        for action, place in place_of.items():
            first_stage[place] = min(first_stage.get(place, action.stage), action.stage)

        # stage -> place -> bytes
        nbytes: list[dict[int, int]] = [{} for _ in range(self._schedule.num_stages)]
        counted: set[tuple[int, Slot]] = set()  # (rank, original)
        for slot, writer in self._writer.items():
            place = self._program.places[slot]
            if writer is not Origin.PARAMETER or place not in first_stage:
                continue
            users = self._users.get(slot, set())
            stages = [a.stage for a in users if place_of[a] == place]
            stage = min(stages, default=first_stage[place])
            key = self._schedule.placement[stage], self._original.get(slot, slot)
            if key not in counted:
                counted.add(key)
                size = self._program.nbytes[slot]
                nbytes[stage][place] = nbytes[stage].get(place, 0) + size
        return [max(by_place.values(), default=0) for by_place in nbytes]

    # ----------------------------------------------------------------------- the values

    @cached_property
    def _read_by_tail(self) -> set[Slot]:
        """The slots that the tail reads, and those of which it reads copies."""
        reads = () if self._tail is None else self._tail.reads
        return {*reads, *(self._original.get(slot, slot) for slot in reads)}

    def _microbatches_of(self, slot: Slot) -> set[int]:
        """The micro-batch whose action wrote a value, or all that use it."""
        writer = self._writer[slot]
        actions = {writer} if isinstance(writer, Action) else self._users[slot]
        return {action.microbatch for action in actions}

    def _total(self, slots: Iterable[Slot]) -> int:
        """The bytes of values; those of copies of one another once."""
        # original -> bytes
        sizes = {
            self._original.get(slot, slot): self._program.nbytes[slot] for slot in slots
        }
        return sum(sizes.values())

    def _calls_of(self, stage: int, m: int) -> list[Instruction]:
        """The calls of all actions of a cell."""
        calls: list[Instruction] = []
        for op in OPS:
            calls += self._calls.get(Action(op, stage, m), ())
        return calls

    def _reads(self, calls: Iterable[Instruction]) -> Iterator[Slot]:
        return itertools.chain.from_iterable(call.reads for call in calls)

    def _sent(self, source: int, target: int, m: int) -> int:
        """The bytes that one stage writes and another one uses, of a micro-batch."""
        slots = []
        for slot in self._used_by.get((target, m), ()):
            writer = self._writer[slot]
            if isinstance(writer, Action) and writer.stage == source:
                slots.append(slot)
        return self._total(slots)

    def _batch_parts(self, stage: int, m: int) -> list[Slot]:
        """The parts of the mini-batch that a stage reads for one micro-batch alone."""
        return [
            slot
            for slot in self._reads(self._calls_of(stage, m))
            if self._writer[slot] is Origin.BATCH and not self._is_shared(slot)
        ]

    def _model_inputs(self, m: int) -> list[Slot]:
        """The parts that the first stage reads in its forward."""
        parts = self._batch_parts(0, m)
        forward = Action(FORWARD, 0, m)
        if forward not in self._calls:  # it is a part of the backward
            return parts
        return [slot for slot in parts if forward in self._readers[slot]]

    def _is_shared(self, slot: Slot) -> bool:
        """True if several micro-batches read a value."""
        return len({action.microbatch for action in self._readers[slot]}) > 1

    def _is_sum(self, slot: Slot, stage: int, m: int) -> bool:
        """True if a value that a cell reads is a sum that it adds to."""
        writer = self._writer[slot]
        if isinstance(writer, Action):  # only sums pass from micro-batch to micro-batch
            return writer.stage == stage and writer.microbatch != m
        return writer is Origin.ZEROS


def _cell(action: Action) -> Cell:
    return action.stage, action.microbatch


def _origin_of_call(writers: Iterable[Action | Origin]) -> Origin:
    """The origin of the results of a call between actions."""
    writers = set(writers)
    if not writers:
        return Origin.ZEROS
    if Origin.ACTIONS in writers or any(isinstance(w, Action) for w in writers):
        return Origin.ACTIONS
    return Origin.BATCH if Origin.BATCH in writers else Origin.PARAMETER
