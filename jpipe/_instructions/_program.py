"""A graph as one list of instructions over slots: what runs, and what is read off it.

A *slot* holds one leaf from the instruction that writes it to the last that reads it.
From the list alone follow the frees, what is donated, the bytes of each place, and the
executables to compile:

    slots:  arguments | constants | results of instruction 0 | of 1 | ...

    for instruction in local_instructions:
        slots[instruction.result_slots] = instruction.run(*instruction.take(slots))
        for slot in instruction.frees:
            slots[slot] = None
    return take_outputs(slots)
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import Any

import jax
from jax.sharding import NamedSharding

from .. import _compat
from .._jaxprs import _jaxpr, _nan_location
from .._processes._arrays import is_here, is_key, replicated_array, replicated_sharding
from .._processes._group import group
from .._processes._transport import Crossing
from . import _transfer
from ._agreement import agree
from ._compiler import compile_all
from ._executables import assign_executables, last_uses
from ._graph import Copies, Graph, Value
from ._instruction import OUTSIDE, Instruction, label_text
from ._sharding import Sharding, StageMesh
from ._transfer import Device

Slot = int
# A function that is called after each instruction with the slots.
Observer = Callable[[Instruction, list[Any]], None]


class Program:
    """A list of instructions; its first run compiles it.

    Args:
      graph: the calls, and where they run.
      outputs: the values that a run returns; of copies in several processes the one of
        this process, as one array of all of them.

    Attributes:
      devices: the device of each place.
      instructions: the instructions of all processes, in order.
      local_instructions: the instructions of this process.
      specs: the array in each slot; where a place is several devices, one shard of it.
      places: the place of each slot.
      inputs: the slots of arguments and constants, which come first.
      outputs: the slots of the values that a run returns.
      executables: all that is to compile.
      is_shared: True if there are other processes.
    """

    def __init__(self, graph: Graph, outputs: Sequence[Value | Copies]) -> None:
        self.devices = graph.devices
        self._facts = graph.facts
        self.is_shared = bool(graph.first_places)

        outputs = graph.copy_sent_outputs(outputs)
        output_values: list[Value] = jax.tree.leaves(outputs)
        over_values = graph.instructions(output_values)
        last = last_uses(over_values, output_values)
        self.executables = assign_executables(graph, over_values, last)

        slot_of = {v: i for i, v in enumerate([*graph.arguments, *graph.constants])}
        self._num_arguments = len(graph.arguments)
        self._argument_names = [*graph.arguments.values()]
        self.inputs = range(len(slot_of))
        self.instructions = _over_slots(graph, over_values, last, slot_of)
        self.specs = [graph.specs[v] for v in slot_of]
        self.places = [graph.places[v] for v in slot_of]
        self._shardings = [graph.shardings[v] for v in slot_of]

        self._set_outputs(graph, outputs, slot_of)
        self._set_initial_slots(graph, output_values, slot_of)

        # The places of this process.
        self._local_places = {
            place for place, device in enumerate(self.devices) if is_here(device)
        }
        self.local_instructions = [i for i in self.instructions if self._is_local(i)]
        # The first instruction that overwrites an argument.
        self._first_overwriting: Instruction | None = None
        for instruction in self.local_instructions:
            if any(slot < self._num_arguments for slot in instruction.donates):
                self._first_overwriting = instruction
                break
        self._is_compiled = False

    def _set_outputs(
        self,
        graph: Graph,
        outputs: Sequence[Value | Copies],
        slot_of: Mapping[Value, Slot],
    ) -> None:
        """Notes the slots of outputs, and which are copies in several processes."""
        processes = list(graph.first_places)
        process = jax.process_index()
        # The index of this process among the copies of an output.
        copy_index = processes.index(process) if process in processes else 0

        slots: list[Slot] = []
        # The indices of the outputs that each process has a copy of.
        self._copied_outputs: list[int] = []
        for i, output in enumerate(outputs):
            if isinstance(output, tuple):
                self._copied_outputs.append(i)
                output = output[copy_index]
            slots.append(slot_of[output])
        self.outputs = tuple(slots)
        self._take_outputs = _taking(self.outputs)

        self._copies_sharding: NamedSharding | None = None
        if self._copied_outputs:
            devices: list[Any] = []
            for place in graph.first_places.values():
                devices += _transfer.devices_of(graph.devices[place])
            self._copies_sharding = replicated_sharding(devices)

    def _set_initial_slots(
        self, graph: Graph, outputs: Sequence[Value], slot_of: Mapping[Value, Slot]
    ) -> None:
        """Fills the slots behind the arguments as they are before a run.

        They hold constants, and placeholders for outputs of other processes.
        """
        self._initial_slots: list[Any] = [None] * (len(slot_of) - self._num_arguments)
        computed = [value for value in outputs if slot_of[value] not in self.inputs]
        for value in [*graph.constants, *computed]:
            device = graph.devices[graph.places[value]]
            sharding = graph.shardings[value]
            if value in graph.constants:
                leaf = graph.constants[value]
            elif not is_here(device):
                leaf = _transfer.array_spec(graph.specs[value], device, sharding)
            else:
                continue
            index = slot_of[value] - self._num_arguments
            self._initial_slots[index] = _transfer.put_leaf(leaf, device, sharding)

    @functools.cached_property
    def nbytes(self) -> list[int]:
        """The bytes of each slot, on each device of its place."""
        slot_bytes: list[int] = []
        triples = zip(self.places, self.specs, self._shardings, strict=True)
        for place, spec, sharding in triples:
            device = self.devices[place] if place >= 0 else None
            slot_bytes.append(_nbytes(device, spec, sharding))
        return slot_bytes

    def _is_local(self, instruction: Instruction) -> bool:
        """True if this process has a part in an instruction."""
        if isinstance(instruction.run, Crossing):
            return instruction.run.is_local_part
        return instruction.place in self._local_places

    def compile(self) -> None:
        """Compiles all executables of this process ahead, unless they are.

        Several processes compare what they are about to run, and none goes on before
        all have compiled: one that waits for a transfer meanwhile would hold up the
        others.

        Raises:
          ValueError: if they run other programs.
          TimeoutError: if a process does not come.
        """
        if self._is_compiled:
            return
        local = [x for x in self.executables if is_here(x.device)]
        if self.is_shared:
            agree(self.instructions, self._facts, lambda: compile_all(local))
        else:
            compile_all(local)
        for instruction in self.local_instructions:
            if instruction.executable:
                # The loop calls what XLA returned, with nothing in between.
                instruction.run = instruction.executable.run
        self._is_compiled = True

    def initial_slots(self, leaves: Sequence[Any]) -> list[Any]:
        """The slots before the first instruction, for the arguments of a run."""
        return [*leaves, *self._initial_slots]

    def __call__(
        self,
        leaves: Sequence[Any],
        *,
        observe: Observer | None = None,
        overwriting: Callable[[], None] | None = None,
    ) -> tuple[Any, ...]:
        """Runs all instructions in order. Never waits.

        Args:
          leaves: the arguments.
          observe: a function called after each instruction with the slots.
          overwriting: a function called before the first instruction that overwrites an
            argument.

        Returns:
          The outputs.

        Raises:
          Exception: the error of a program, with a note that names the instruction.
        """
        if not self._is_compiled:
            self.compile()
        if self.is_shared:
            group().runs += 1
        slots = self.initial_slots(leaves)
        del leaves
        with _compat.explicit_transfers(), _nan_location.check_results():
            for instruction in self.local_instructions:
                try:
                    if overwriting and instruction is self._first_overwriting:
                        overwriting()
                    try:
                        slots[instruction.result_slots] = instruction.run(
                            *instruction.take(slots)
                        )
                    except ValueError:
                        if not _set_default_layouts(slots, instruction.reads):
                            raise
                        slots[instruction.result_slots] = instruction.run(
                            *instruction.take(slots)
                        )
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
        if self._copies_sharding is not None:
            outputs = [*outputs]
            for i in self._copied_outputs:
                outputs[i] = replicated_array(outputs[i], self._copies_sharding)
        return tuple(outputs)

    def _explained(
        self, error: Exception, failed: Instruction, slots: list[Any]
    ) -> Exception:
        """An error with its instruction; for a NaN, with its origin."""
        if failed.function and isinstance(error, FloatingPointError):
            with suppress(Exception):  # such as one shard of several
                located = self._find_invalid_argument(failed, slots)
                located = located or _nan_location.find_invalid_value(
                    failed.function.run, failed.take(slots)
                )
                error = located or error
        layers = f": {failed.layers}" if failed.layers else ""
        device = self.devices[failed.place]
        error.add_note(f"raised in {label_text(failed.label)} on {device}{layers}")
        return error

    def _find_invalid_argument(
        self, failed: Instruction, slots: list[Any]
    ) -> FloatingPointError | None:
        """An error that names the argument from which an instruction has a NaN.

        Results of other instructions were checked: they have none.
        """
        # slot of a copy -> the slot from which it was moved
        moved_from: dict[Slot, Slot] = {}
        for move in filter(lambda x: x.is_move, self.local_instructions):
            moved_from |= zip(move.writes, move.reads, strict=True)
        for slot, operand in zip(failed.reads, failed.take(slots), strict=True):
            origin = moved_from.get(slot, slot)
            if origin >= self._num_arguments:
                continue
            if invalid := _nan_location.invalid_value(operand):
                return FloatingPointError(
                    f"invalid value ({invalid}) encountered in "
                    f"{self._argument_names[origin]}, an argument of the call: no "
                    f"operation made it"
                )
        return None


def _set_default_layouts(slots: list[Any], reads: Sequence[Slot]) -> bool:
    """Brings arrays to the default layout; returns True if one was in another.

    What is compiled ahead refuses them. They are arguments that nobody has put in
    place: what is computed or moved is in the default layout.

    Args:
      slots: the slots.
      reads: the slots of the arrays.
    """
    has_changed = False
    for slot in reads:
        array = _transfer.in_default_layout(slots[slot])
        has_changed |= array is not slots[slot]
        slots[slot] = array
    return has_changed


def _over_slots(
    graph: Graph,
    instructions: Sequence[Instruction],
    last: Mapping[Value, int],
    slot_of: dict[Value, Slot],
) -> list[Instruction]:
    """Rewrites instructions over values as those over slots that a program runs.

    Args:
      graph: the graph of the instructions.
      instructions: all of them, over values.
      last: the index of the last instruction that reads each value.
      slot_of: the slots of arguments and constants; those of results are added.
    """
    sender = functools.cache(_transfer.make_sender)
    over_slots: list[Instruction] = []
    for index, instruction in enumerate(instructions):
        executable = instruction.executable
        writes = instruction.writes
        donated: Sequence[int] = ()
        if executable:
            writes = [instruction.writes[i] for i in executable.live_results]
            donated = executable.donated
            run = executable.run
        else:
            run = _move(graph, instruction, sender)

        first_slot = len(slot_of)
        slot_of |= {v: first_slot + i for i, v in enumerate(writes)}
        slots = slice(first_slot, len(slot_of))
        reads = tuple([slot_of[v] for v in instruction.reads])
        values = [*instruction.reads, *writes]
        ended = {slot_of[v] for v in values if last.get(v, -1) <= index}
        # What leaves for another process has no slot here.
        is_sent = isinstance(run, Crossing) and not run.is_received
        over_slots.append(
            Instruction(
                place=instruction.place,
                source=instruction.source,
                function=instruction.function,
                reads=reads,
                writes=range(first_slot, len(slot_of)),
                label=instruction.label,
                layers=instruction.layers,
                mapped=instruction.mapped,
                donates=tuple([reads[i] for i in donated]),
                frees=tuple(sorted(ended)),
                executable=executable,
                run=run,
                take=_taking(reads),
                result_slots=slice(0) if is_sent else slots,
            )
        )
    return over_slots


def _taking(slots: Sequence[Slot]) -> Callable[[list[Any]], Sequence[Any]]:
    """The function ``(slots) -> leaves`` that takes the leaves of some slots."""
    if len(slots) > 1:
        return itemgetter(*slots)
    # An `itemgetter` of one index would return the leaf by itself.
    start = slots[0] if slots else 0
    return itemgetter(slice(start, start + len(slots)))


def _move(graph: Graph, move: Instruction, sender: Callable[..., Any]) -> Any:
    """The function that a move runs, ``(*leaves) -> leaves``, or its `Crossing`.

    Args:
      graph: the graph of the move.
      move: over values.
      sender: `_transfer.make_sender`, cached.
    """
    assert move.source is not None
    target = graph.devices[move.place]
    shardings = [graph.shardings[v] for v in move.writes]
    if move.source == OUTSIDE:
        return lambda *leaves: _transfer.put(leaves, target, shardings)

    source = graph.devices[move.source]
    specs = [graph.specs[v] for v in move.writes]
    if not graph.crosses_processes(move):
        send = sender(
            source=source,
            target=target,
            has_keys=any(map(is_key, specs)),
            shardings=tuple(shardings),
            source_shardings=tuple(graph.shardings[v] for v in move.reads),
        )
        if graph.arguments.keys().isdisjoint(move.reads):
            return send
        # Arguments may be in any layout.
        return lambda *leaves: send(*map(_transfer.in_default_layout, leaves))
    pairs = list(zip(specs, shardings, strict=True))
    return Crossing(
        source=source,
        target=target,
        specs=[
            _transfer.array_spec(spec, target, sharding) for spec, sharding in pairs
        ],
        source_shardings=[
            _transfer.jax_sharding(source, sharding) for sharding in shardings
        ],
        index=move.writes[0],
        label=label_text(move.label),
    )


def _nbytes(device: Device | None, spec: Any, sharding: Sharding) -> int:
    """The bytes that each device of a place holds of a value."""
    count = _jaxpr.nbytes(spec)
    if isinstance(device, StageMesh):
        return device.local_bytes(count, sharding)
    return count
