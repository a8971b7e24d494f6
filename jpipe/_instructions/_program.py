"""A graph as one list of instructions over slots: what runs, and what is read off it.

A *slot* holds one leaf from the instruction that makes it to the last that reads it.
From the list alone follow the frees, what is donated, the bytes of each place, and the
programs to compile.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import jax

from .. import _compat
from .._processes._elsewhere import copies, ghost, is_here, of_copies
from .._processes._group import group
from .._processes._transport import Crossing
from . import _transfer
from ._agreed import agree
from ._compile import Compiled, compile_all
from ._donated import compiled, last_uses
from ._graph import Copies, Graph, Place, Value
from ._instruction import Instruction, Slot, called, listed
from ._sharding import Sharding, SubMesh
from ._transfer import Device


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
      outputs: the values that a run returns; of copies, that of this process, as one
        array of all of them.
      devices: the device of each place.

    Attributes:
      instructions: what runs, in order, in all processes.
      specs: what each slot holds; where a place is several devices, one shard of it.
      nbytes: the bytes of each slot, on each device of its place.
      places: where.
      constants: the slots of what stays from run to run.
      programs: all that is compiled.
      own: the instructions of this process.
      is_shared: whether there are others.
    """

    def __init__(
        self,
        graph: Graph,
        outputs: Sequence[Value | Copies],
        devices: Sequence[Device],
    ) -> None:
        self.devices = devices
        self._facts = graph.facts
        self.is_shared = bool(graph.heads)
        outputs = graph.lasting(outputs)
        wanted: list[Value] = []
        for each in outputs:
            wanted += each if isinstance(each, tuple) else [each]
        operations = graph.with_copies(wanted)
        self._num_arguments = len(graph.arguments)
        last = last_uses(operations, wanted)
        self.programs = compiled(graph, operations, last, devices)
        slot = {v: i for i, v in enumerate([*graph.arguments, *graph.constants])}
        self.instructions = listed(
            graph, operations, last, self.programs, devices, slot
        )
        by_slot = sorted(slot, key=slot.__getitem__)
        self.specs = [graph.specs[v] for v in by_slot]
        self.places = [graph.places[v] for v in by_slot]
        self.nbytes = [_nbytes(graph, v, devices) for v in by_slot]
        heads = {process: i for i, process in enumerate(graph.heads)}
        mine = heads.get(jax.process_index(), 0)
        self.outputs = tuple(
            slot[each[mine] if isinstance(each, tuple) else each] for each in outputs
        )
        self._read_outputs = _getter(self.outputs)
        self._copied = [i for i, each in enumerate(outputs) if isinstance(each, tuple)]
        if self._copied:
            at = [_transfer.devices_of(devices[p]) for p in graph.heads.values()]
            self._copies = copies([device for own in at for device in own])
        self._constants = [
            self._constant(array, graph.places[v], graph.shardings[v])
            for v, array in graph.constants.items()
        ]
        self._blank = [None] * (len(slot) - self._num_arguments - len(self._constants))
        given = len(slot) - len(self._blank)
        self.constants = range(self._num_arguments, given)
        for value in wanted:
            place = graph.places[value]
            if slot[value] >= given and place >= 0 and not is_here(devices[place]):
                self._blank[slot[value] - given] = _elsewhere(graph, value, devices)
        # Those of this process.
        self.own = [i for i in self.instructions if self._is_own(i)]
        self.steps = [_step(instruction) for instruction in self.own]
        self._overwrites = next(
            (
                number
                for number, instruction in enumerate(self.own)
                if any(slot < self._num_arguments for slot in instruction.donates)
            ),
            -1,
        )
        self._is_compiled = False

    def _constant(self, array: Any, place: Place, how: Sharding) -> Any:
        device = self.devices[place]
        return _transfer.put([array], device, [how])[0] if is_here(device) else None

    def _is_own(self, instruction: Instruction) -> bool:
        """Whether this process has a part in it."""
        if isinstance(instruction.run, Crossing):
            return instruction.run.concerns
        return is_here(self.devices[instruction.place])

    def compile(self) -> None:
        """Compiles all programs of this process ahead, unless they are.

        Where there are several processes they compare what they are about to run, and
        none goes on before all have compiled: one that waits for a transfer meanwhile
        would hold up the others.

        Raises:
          ValueError: if they run other programs.
          TimeoutError: if a process does not come.
        """
        if self._is_compiled:
            return
        own = [p for p in self.programs.values() if is_here(p.device)]
        if self.is_shared:
            functions = (program.function for program in self.programs.values())
            compile_own = functools.partial(compile_all, own)
            agree(self.instructions, functions, self._facts, compile_own)
        else:
            compile_all(own)
        # The loop calls what was compiled, with nothing in between.
        self.steps = [_step(instruction) for instruction in self.own]
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
        if self.is_shared:
            group().runs += 1
        slots = self.start(leaves)
        del leaves
        number = -1
        try:
            with _compat.explicit_transfers():
                for number, (run, reads, donates, writes, frees) in enumerate(
                    self.steps
                ):
                    if number == self._overwrites and overwriting is not None:
                        overwriting()
                    slots[writes] = run(reads(slots), donates(slots))
                    for ended, nothing in frees:
                        slots[ended] = nothing
                    if observe is not None:
                        observe(self.own[number], slots)
        except Exception as error:
            failed = self.own[number]
            explained = _explained(error, failed, self.steps[number], slots)
            explained.add_note(
                f"raised in {called(failed.label)} on {self.devices[failed.place]}"
                + (f": {failed.layers}" if failed.layers else "")
            )
            if explained is error:
                raise
            raise explained from None
        outputs = self._read_outputs(slots)
        return self._as_copies(outputs) if self._copied else outputs

    def _as_copies(self, outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """The outputs, what is wanted in each process as one array of all of them."""
        found = list(outputs)
        for i in self._copied:
            found[i] = of_copies(found[i], self._copies)
        return tuple(found)


def _explained(
    error: Exception, failed: Instruction, step: Step, slots: list[Any]
) -> Exception:
    """The error of an instruction; of a value that is no number, with who made it."""
    run = failed.run
    if not (isinstance(error, FloatingPointError) and isinstance(run, Compiled)):
        return error
    with suppress(Exception):  # such as one shard of several, which has no such run
        return run.invalid(step.reads(slots), step.donates(slots)) or error
    return error


def _elsewhere(graph: Graph, value: Value, devices: Sequence[Device]) -> Any:
    """What stands for a value of another process."""
    device, how = devices[graph.places[value]], graph.shardings[value]
    shape = _transfer.global_shape(graph.specs[value].shape, device, how)
    return ghost(shape, graph.specs[value].dtype, _transfer.on(device, how))


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
    # What leaves for another process is written there.
    is_written = not isinstance(run, Crossing) or run.is_received
    return Step(
        run.run if isinstance(run, Compiled) else run,
        _getter(instruction.reads),
        _getter(instruction.donates),
        slice(writes.start, writes.stop) if is_written else slice(0, 0),
        frees,
    )


def _getter(slots: Sequence[Slot]) -> Callable[[list[Any]], tuple[Any, ...]]:
    if len(slots) > 1:
        return itemgetter(*slots)
    if not slots:
        return lambda _: ()
    (only,) = slots
    return lambda values: (values[only],)


def _nbytes(graph: Graph, value: Value, devices: Sequence[Device]) -> int:
    """What each device of its place holds of a value."""
    spec, place = graph.specs[value], graph.places[value]
    count = spec.size * spec.dtype.itemsize
    if place >= 0 and isinstance(device := devices[place], SubMesh):
        return device.local_bytes(count, graph.shardings[value])
    return count
