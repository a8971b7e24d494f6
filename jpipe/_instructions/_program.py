"""A graph as one list of instructions over slots: what runs, and what is read off it.

A *slot* holds one leaf from the instruction that makes it to the last that reads it.
From the list alone follow the frees, what is donated, the bytes of each place, and the
programs to compile.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._jaxprs._function import Function
from . import _transfer
from ._compile import Compiled, compile_all, on_host
from ._graph import OUTSIDE, Graph, Operation, Place, Value
from ._transfer import Device

Slot = int


@dataclass(frozen=True)
class Instruction:
    """A call of a compiled function, or a move to another place.

    Attributes:
      place: where it runs; of a move, where it goes.
      source: of a move where it comes from; of a call ``None``.
      run: ``(leaves read, leaves donated) -> leaves``.
      reads: the slots that it reads.
      donates: the slots that it reads and whose memory its results take over.
      writes: the slots of its results, neighbours.
      frees: the slots that nobody reads after it.
      label: what it is: an action of the schedule, or words.
      layers: what runs, for messages.
    """

    place: Place
    source: Place | None
    run: Callable[[Any, Any], Sequence[Any]]
    reads: tuple[Slot, ...]
    donates: tuple[Slot, ...]
    writes: range
    frees: tuple[Slot, ...]
    label: Any
    layers: str

    @property
    def is_move(self) -> bool:
        """Whether it is a move; else it is a call."""
        return self.source is not None


class Step(NamedTuple):
    """An instruction, as the loop reads it."""

    run: Callable[[Any, Any], Sequence[Any]]
    reads: Callable[[list[Any]], tuple[Any, ...]]
    donates: Callable[[list[Any]], tuple[Any, ...]]
    writes: slice
    frees: Sequence[tuple[slice, tuple[None, ...]]]


class Program:
    """A list of instructions, compiled.

    Args:
      graph: what is computed where.
      outputs: the values that a run returns.
      devices: the device of each place.

    Attributes:
      instructions: what runs, in order.
      specs: what each slot holds.
      places: where.
      programs: all that is compiled.
    """

    def __init__(
        self, graph: Graph, outputs: Sequence[Value], devices: Sequence[Device]
    ) -> None:
        self.devices = devices
        operations = graph.with_copies(outputs)
        slot = {v: i for i, v in enumerate([*graph.arguments, *graph.constants])}
        self._num_arguments = len(graph.arguments)
        last = _last_uses(operations, outputs)
        self.programs = _programs(graph, operations, last, devices)
        self.instructions: list[Instruction] = []
        for number, operation in enumerate(operations):
            new = [v for v in operation.writes if v not in slot]
            reads, donates, run = operation.reads, [], None
            if operation.function:
                program = self.programs[operation.function, operation.place]
                new = [operation.writes[i] for i in program.kept]
                donates = [reads[i] for i in program.donated]
                reads = [v for i, v in enumerate(reads) if i not in program.donated]
                run = program
            start = len(slot)
            slot |= {v: start + i for i, v in enumerate(new)}
            ended = dict.fromkeys([*operation.reads, *new])
            self.instructions.append(
                Instruction(
                    operation.place,
                    None if run else graph.places[reads[0]],
                    run or _mover(graph, reads, devices, operation.place),
                    tuple(slot[v] for v in reads),
                    tuple(slot[v] for v in donates),
                    range(start, len(slot)),
                    tuple(sorted(slot[v] for v in ended if last.get(v, -1) <= number)),
                    operation.label,
                    operation.layers,
                )
            )
        by_slot = sorted(slot, key=slot.__getitem__)
        self.specs = [graph.specs[v] for v in by_slot]
        self.places = [graph.places[v] for v in by_slot]
        self.outputs = tuple(slot[v] for v in outputs)
        self._read_outputs = _getter(self.outputs)
        self._constants = [
            _transfer.put([array], devices[graph.places[v]])[0]
            for v, array in graph.constants.items()
        ]
        self._blank = [None] * (len(slot) - self._num_arguments - len(self._constants))
        self.steps = [_step(instruction) for instruction in self.instructions]
        self._overwrites = next(
            (
                number
                for number, instruction in enumerate(self.instructions)
                if any(slot < self._num_arguments for slot in instruction.donates)
            ),
            -1,
        )
        self._is_compiled = False

    def compile(self) -> None:
        """Compiles all programs ahead."""
        compile_all(self.programs.values())
        # The loop calls what was compiled, with nothing in between.
        self.steps = [_step(instruction) for instruction in self.instructions]
        self._is_compiled = True

    def start(self, leaves: Sequence[Any]) -> list[Any]:
        """The slots before the first instruction, given the arguments of a run."""
        return [*leaves, *self._constants, *self._blank]

    def __call__(
        self,
        leaves: Sequence[Any],
        observe: Callable[[Instruction, list[Any]], None] | None = None,
        overwriting: Callable[[], None] | None = None,
    ) -> tuple[Any, ...]:
        """Runs all instructions in order. Never waits.

        Args:
          leaves: the arguments.
          observe: called after each instruction with the slots, for measurements.
          overwriting: called before the first instruction that overwrites one of them.

        Returns:
          The outputs.

        Raises:
          Exception: what a program raised, with a note that names the instruction.
        """
        if not self._is_compiled:
            self.compile()
        slots = self.start(leaves)
        del leaves
        number = -1
        try:
            for number, (run, reads, donates, writes, frees) in enumerate(self.steps):
                if number == self._overwrites and overwriting is not None:
                    overwriting()
                slots[writes] = run(reads(slots), donates(slots))
                for ended, nothing in frees:
                    slots[ended] = nothing
                if observe is not None:
                    observe(self.instructions[number], slots)
        except Exception as error:
            failed = self.instructions[number]
            error.add_note(
                f"raised in {_called(failed.label)} on {self.devices[failed.place]}"
                + (f": {failed.layers}" if failed.layers else "")
            )
            raise
        return self._read_outputs(slots)


def _called(label: Any) -> str:
    return label if isinstance(label, str) else f"action {label}"


def _step(instruction: Instruction) -> Step:
    writes = instruction.writes
    runs = groupby(
        enumerate(instruction.frees), key=lambda pair: pair[1] - pair[0]
    )  # neighbours are freed at one stroke
    frees = []
    for _, pairs in runs:
        ended = [slot for _, slot in pairs]
        frees.append((slice(ended[0], ended[-1] + 1), (None,) * len(ended)))
    run = instruction.run
    return Step(
        run.run if isinstance(run, Compiled) else run,
        _getter(instruction.reads),
        _getter(instruction.donates),
        slice(writes.start, writes.stop),
        frees,
    )


def _getter(slots: Sequence[Slot]) -> Callable[[list[Any]], tuple[Any, ...]]:
    if len(slots) > 1:
        return itemgetter(*slots)
    if not slots:
        return lambda _: ()
    (only,) = slots
    return lambda values: (values[only],)


def _last_uses(
    operations: Sequence[Operation], outputs: Sequence[Value]
) -> dict[Value, int]:
    """The number of the last operation that reads each value."""
    last = {v: i for i, operation in enumerate(operations) for v in operation.reads}
    return last | dict.fromkeys(outputs, len(operations))


def _mover(
    graph: Graph, values: Sequence[Value], devices: Sequence[Device], target: Place
) -> Callable[[Any, Any], Sequence[Any]]:
    source = graph.places[values[0]]
    if source == OUTSIDE:
        return lambda leaves, _: _transfer.put(leaves, devices[target])
    keys = any(_is_key(graph.specs[value]) for value in values)
    send = _transfer.sender(devices[source], devices[target], keys)
    return lambda leaves, _: send(leaves)


def _is_key(spec: Any) -> bool:
    return jnp.issubdtype(spec.dtype, jax.dtypes.prng_key)


def _programs(
    graph: Graph,
    operations: Sequence[Operation],
    last: dict[Value, int],
    devices: Sequence[Device],
) -> dict[tuple[Function, Place], Compiled]:
    """What is compiled: of the calls of a function in a place, what suits them all."""
    calls: dict[tuple[Function, Place], list[tuple[int, Operation]]] = {}
    for number, operation in enumerate(operations):
        if operation.function:
            key = operation.function, operation.place
            calls.setdefault(key, []).append((number, operation))
    # A name for all places: JAX's persistent cache finds it for any, on a GPU.
    labels: dict[Function, list[Any]] = {}
    for (function, _), own in calls.items():
        known = labels.setdefault(function, [])
        known += [operation.label for _, operation in own]
    owned = {v for operation in operations for v in _made(graph, operation)}
    owned |= graph.donated
    programs = {}
    for (function, place), own in calls.items():
        kept = [
            i
            for i in range(len(function.results))
            if i not in function.same
            and any(operation.writes[i] in last for _, operation in own)
        ]
        # Memory goes to the first results that fit: never to what is on the host.
        kept.sort(key=lambda i: i in function.offloaded)
        free = Counter(
            _kind(function.results[i]) for i in kept if i not in function.offloaded
        )
        donated = []
        first = own[0][1]
        # First what only an overwriting frees; then from the last, as sums are, which
        # are added to in place.
        reads = list(enumerate(first.reads))
        reads.sort(key=lambda pair: (pair[1] not in graph.donated, -pair[0]))
        for i, value in reads:
            kind = _kind(graph.specs[value])
            if free[kind] and all(
                operation.reads[i] in owned
                and last[operation.reads[i]] == number
                and operation.reads.count(operation.reads[i]) == 1
                and not _is_key(graph.specs[value])
                and not on_host(graph.specs[value])
                for number, operation in own
            ):
                free[kind] -= 1
                donated.append(i)
        programs[function, place] = Compiled(
            function,
            [graph.specs[v] for v in first.reads],
            kept,
            sorted(donated),
            devices[place],
            [graph.places[v] for v in first.reads],
            labels[function],
        )
    return programs


def _made(graph: Graph, operation: Operation) -> Sequence[Value]:
    """The arrays that are new: what comes from outside may share the user's memory."""
    if operation.function is None:
        outside = graph.places[operation.reads[0]] == OUTSIDE
        return () if outside else operation.writes
    same = operation.function.same
    return [v for i, v in enumerate(operation.writes) if i not in same]


def _kind(spec: Any) -> Any:
    return spec.shape, spec.dtype
