"""A graph as one list of instructions over slots: what runs, and what is read off it.

A *slot* holds one leaf from the instruction that makes it to the last that reads it.
From the list alone follow the frees, what is donated, the bytes of each place, and the
programs to compile.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import Any

import jax

from .. import _compat
from .._jaxprs import _invalid
from .._processes._elsewhere import copies, is_here, of_copies
from .._processes._group import group
from .._processes._keys import is_key
from .._processes._transport import Crossing
from . import _transfer
from ._agreed import agree
from ._compile import compile_all
from ._donated import compiled, last_uses
from ._graph import Copies, Graph, Value
from ._instruction import OUTSIDE, Instruction, called
from ._sharding import Sharding, SubMesh
from ._transfer import Device

Slot = int


class Program:
    """A list of instructions, compiled.

    Args:
      graph: what is computed where.
      outputs: the values that a run returns; of copies, that of this process, as one
        array of all of them.

    Attributes:
      devices: the device of each place.
      instructions: what runs, in order, in all processes.
      specs: what each slot holds; where a place is several devices, one shard of it.
      places: where.
      constants: the slots of what stays from run to run.
      outputs: the slots of what a run returns.
      programs: all that is compiled.
      own: the instructions of this process.
      is_shared: whether there are others.
    """

    def __init__(self, graph: Graph, outputs: Sequence[Value | Copies]) -> None:
        self.devices = devices = graph.devices
        self._facts = graph.facts
        self.is_shared = bool(graph.heads)
        outputs = graph.lasting(outputs)
        wanted = jax.tree.leaves(outputs)
        listed = graph.with_copies(wanted)
        last = last_uses(listed, wanted)
        self.programs = compiled(graph, listed, last)
        slot = {v: i for i, v in enumerate([*graph.arguments, *graph.constants])}
        self._num_arguments, given = len(graph.arguments), len(slot)
        self.constants = range(self._num_arguments, given)
        self.instructions = _over_slots(graph, listed, last, slot)
        self.specs = [graph.specs[v] for v in slot]
        self.places = [graph.places[v] for v in slot]
        self._shardings = [graph.shardings[v] for v in slot]
        heads = {process: i for i, process in enumerate(graph.heads)}
        mine = heads.get(jax.process_index(), 0)
        self.outputs = tuple(
            slot[each[mine] if isinstance(each, tuple) else each] for each in outputs
        )
        self._take_outputs = _taking(self.outputs)
        self._copied = [i for i, each in enumerate(outputs) if isinstance(each, tuple)]
        if self._copied:
            at = [_transfer.devices_of(devices[p]) for p in graph.heads.values()]
            self._copies = copies([device for own in at for device in own])
        # The slots behind the arguments, before the first instruction: constants, and
        # what stands for outputs of other processes.
        first = self._num_arguments
        self._rest: list[Any] = [None] * (len(slot) - first)
        for value in [*graph.constants, *(v for v in wanted if slot[v] >= given)]:
            where = devices[graph.places[value]], graph.shardings[value]
            if value in graph.constants or not is_here(where[0]):
                like = _transfer.located(graph.specs[value], *where)
                array = graph.constants.get(value, like)
                self._rest[slot[value] - first] = _transfer.put_one(array, *where)
        self.own = [each for each in self.instructions if self._is_own(each)]
        overwriting = (
            each
            for each in self.own
            if any(slot < self._num_arguments for slot in each.donates)
        )
        self._first_overwriting = next(overwriting, None)
        self._is_compiled = False

    @functools.cached_property
    def nbytes(self) -> list[int]:
        """The bytes of each slot, on each device of its place."""
        places = (self.devices[at] if at >= 0 else None for at in self.places)
        return [*map(_nbytes, places, self.specs, self._shardings)]

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
        local = [program for program in self.programs if is_here(program.device)]
        if self.is_shared:
            agree(self.instructions, self._facts, lambda: compile_all(local))
        else:
            compile_all(local)
        for instruction in self.own:
            if instruction.compiled:
                # The loop calls what was compiled, with nothing in between.
                instruction.run = instruction.compiled.run
        self._is_compiled = True

    def start(self, leaves: Sequence[Any]) -> list[Any]:
        """The slots before the first instruction, given the arguments of a run."""
        return [*leaves, *self._rest]

    def __call__(
        self,
        leaves: Sequence[Any],
        observe: Callable[[Instruction, list[Any]], None] | None = None,
        overwriting: Callable[[], None] | None = None,
    ) -> tuple[Any, ...]:
        """Runs all instructions in order. Never waits.

        Args:
          leaves: the arguments.
          observe: called after each instruction with the slots, by tests.
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
        with _compat.explicit_transfers():
            for instruction in self.own:
                try:
                    if overwriting and instruction is self._first_overwriting:
                        overwriting()
                    slots[instruction.into] = instruction.run(*instruction.take(slots))
                    for slot in instruction.frees:
                        slots[slot] = None
                    if observe is not None:
                        observe(instruction, slots)
                except Exception as error:
                    explained = self._explained(error, instruction, slots)
                    if explained is error:
                        raise
                    raise explained from None
        outputs = self._take_outputs(slots)
        if self._copied:  # what is wanted in each process is one array of all of them
            outputs = [*outputs]
            for i in self._copied:
                outputs[i] = of_copies(outputs[i], self._copies)
        return tuple(outputs)

    def _explained(
        self, error: Exception, failed: Instruction, slots: list[Any]
    ) -> Exception:
        """An error with its instruction; of what is no number, with its operation."""
        if failed.function and isinstance(error, FloatingPointError):
            with suppress(Exception):  # such as one shard of several
                found = _invalid.find(failed.function.run, failed.take(slots))
                error = found or error
        layers = f": {failed.layers}" if failed.layers else ""
        device = self.devices[failed.place]
        error.add_note(f"raised in {called(failed.label)} on {device}{layers}")
        return error


def _over_slots(
    graph: Graph,
    instructions: Sequence[Instruction],
    last: Mapping[Value, int],
    slot: dict[Value, Slot],
) -> list[Instruction]:
    """Instructions over values as those over slots that a program runs.

    Args:
      graph: what is computed where.
      instructions: all of it.
      last: the number of the instruction that reads each value last.
      slot: the slots of arguments and constants; those of results are added.
    """
    found, sender = [], functools.cache(_transfer.sender)
    for number, each in enumerate(instructions):
        program, new = each.compiled, each.writes
        if program:
            new = [each.writes[i] for i in program.live_results]
        start = len(slot)
        slot |= {v: start + i for i, v in enumerate(new)}
        reads = tuple([slot[v] for v in each.reads])
        ended = {slot[v] for v in (*each.reads, *new) if last.get(v, -1) <= number}
        run = program.run if program else _move(graph, each, sender)
        # What leaves for another process is written there.
        is_written = not isinstance(run, Crossing) or run.is_received
        found.append(
            Instruction(
                each.place,
                each.source,
                each.function,
                reads,
                range(start, len(slot)),
                each.label,
                each.layers,
                each.mapped,
                donates=tuple([reads[i] for i in program.donated]) if program else (),
                frees=tuple(sorted(ended)),
                compiled=program,
                run=run,
                take=_taking(reads),
                into=slice(start, len(slot)) if is_written else slice(0),
            )
        )
    return found


def _taking(slots: Sequence[Slot]) -> Callable[[list[Any]], Sequence[Any]]:
    """What takes the leaves of some slots out of all."""
    if len(slots) > 1:
        return itemgetter(*slots)
    start = slots[0] if slots else 0
    return itemgetter(slice(start, start + len(slots)))


def _move(graph: Graph, move: Instruction, sender: Callable[..., Any]) -> Any:
    """What a move runs; ``sender`` gives what those run that are alike."""
    devices, target = graph.devices, graph.devices[move.place]
    shardings = [graph.shardings[v] for v in move.writes]
    assert move.source is not None
    if move.source == OUTSIDE:
        return lambda *leaves: _transfer.put(leaves, target, shardings)
    source, specs = devices[move.source], [graph.specs[v] for v in move.writes]
    if not graph.crosses(move):
        own = tuple(graph.shardings[v] for v in move.reads)
        has_keys = any(map(is_key, specs))
        return sender(source, target, has_keys, tuple(shardings), own)
    pairs = list(zip(specs, shardings, strict=True))
    return Crossing(
        source=source,
        target=target,
        specs=[_transfer.located(spec, target, each) for spec, each in pairs],
        source_shardings=[_transfer.on(source, each) for each in shardings],
        index=move.writes[0],
        label=called(move.label),
    )


def _nbytes(device: Device | None, spec: Any, sharding: Sharding) -> int:
    """What each device of its place holds of a value."""
    count = spec.size * spec.dtype.itemsize
    is_mesh = isinstance(device, SubMesh)
    return device.local_bytes(count, sharding) if is_mesh else count
