"""Graphs: calls of computations on values, in places, before anything is compiled.

    a = call(f, place 0, [x])            call f on 0:       x      -> a
    b = call(g, place 1, [a])      ->    move from 0 to 1:  a      -> a'
    c = call(h, place 1, [a, b])         call g on 1:       a'     -> b
                                         call h on 1:       a', b  -> c

A value is a leaf. It is made once, in one place, by one call. A call that reads a value
of another place reads a copy of it there. Moves make the copies: they are derived from
what calls read, and each runs as soon as its values are made.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import jax

from .._jaxprs._computation import Argument, Computation, Result
from .._jaxprs._host_memory import is_on_host
from ._instruction import NOWHERE, OUTSIDE, Instruction, Place
from ._sharding import STACKED, WHOLE, MicrobatchSplit, Sharding, StageMesh
from ._transfer import Device, stack

Value = int
Key = TypeVar("Key", bound=Hashable)
# A value that each process reads: its copy in each, in the order of `first_places`.
Copies = tuple[Value, ...]


@dataclass
class Graph:
    """Calls of computations in the order in which they run, over values.

    Attributes:
      devices: the device of each place.
      facts: the facts that it follows from, in words; processes compare theirs.
      specs: the shape and dtype of each value; of one shard, if it is stacked.
      places: the place of each value.
      shardings: the sharding of each value there.
      arguments: the values that a caller passes to a run, in order, and their names in
        messages.
      donated: the arguments that a run may overwrite.
      constants: the values that stay from run to run, and their arrays.
      calls: the calls.
    """

    devices: Sequence[Device]
    facts: dict[str, str] = field(default_factory=dict)
    specs: list[Any] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    shardings: list[Sharding] = field(default_factory=list)
    arguments: dict[Value, str] = field(default_factory=dict)
    donated: set[Value] = field(default_factory=set)
    constants: dict[Value, Any] = field(default_factory=dict)
    calls: list[Instruction] = field(default_factory=list)
    # (value, place, split) -> its copy there
    _copies: dict[tuple[Value, Place, MicrobatchSplit | None], Value] = field(
        default_factory=dict
    )
    # copy -> the value that it is a copy of
    _originals: dict[Value, Value] = field(default_factory=dict)
    # argument -> its copy in the same place, which is sent to other processes
    _sent_copies: dict[Value, Value] = field(default_factory=dict)
    # result of `call_in_processes` -> process -> the result there
    _process_results: dict[Value, dict[int, Value]] = field(default_factory=dict)
    # (dtype, shape, contents, place, whether it is stacked) -> constant
    _constants: dict[Any, Value] = field(default_factory=dict)

    def _add_value(self, spec: Any, place: Place, sharding: Sharding = WHOLE) -> Value:
        sharding = sharding._replace(on_host=is_on_host(spec))
        if len(sharding.spec) and isinstance(device := self.devices[place], StageMesh):
            sharding = device.fitting(sharding, spec.shape)
        self.specs.append(spec)
        self.places.append(place)
        self.shardings.append(sharding)
        return len(self.specs) - 1

    def argument(
        self,
        spec: Any,
        place: Place,
        *,
        name: str = "",
        donated: bool = False,
        sharding: Sharding = WHOLE,
    ) -> Value:
        """Adds an argument: a value that a caller passes to each run.

        Args:
          spec: its shape and dtype.
          place: its place.
          name: its name in messages.
          donated: True if a run may overwrite it.
          sharding: its sharding in its place.
        """
        value = self._add_value(spec, place, sharding)
        self.arguments[value] = name
        if donated:
            self.donated.add(value)
        return value

    def constant(self, array: Any, place: Place, *, stacked: bool = False) -> Value:
        """Returns the constant of an array; equal arrays of NumPy are one constant.

        Args:
          array: the array; with ``stacked`` it has a first axis of shards.
          place: its place.
          stacked: True if each shard has a value of its own.
        """
        contents = id(array) if isinstance(array, jax.Array) else array.tobytes()
        key = array.dtype, array.shape, contents, place, stacked
        if key not in self._constants:
            shape = array.shape[1:] if stacked else array.shape
            spec = jax.ShapeDtypeStruct(shape, jax.typeof(array).dtype)
            value = self._add_value(spec, place, STACKED if stacked else WHOLE)
            self._constants[key] = value
            self.constants[value] = array
        return self._constants[key]

    def call(
        self,
        function: Computation,
        place: Place,
        reads: Sequence[Value],
        *,
        label: Any = "",
        layers: str = "",
        mapped: bool = False,
        shardings: Sequence[Sharding] | None = None,
    ) -> list[Value]:
        """Calls a function in a place, on values from anywhere.

        Args:
          function: the function.
          place: the place in which it runs.
          reads: its arguments.
          label: an action of the schedule, or words; default: the function's name.
          layers: the layers that run, for messages.
          mapped: True if each shard of the place calls it by itself.
          shardings: the shardings of its results; default: stacked if it is mapped,
            else whole.

        Returns:
          Its results.
        """
        if not shardings:
            shardings = [STACKED if mapped else WHOLE] * len(function.results)
        if function.used_args is not None:
            reads = [reads[i] for i in function.used_args]
        operands = [self.bring(value, place) for value in reads]

        writes: list[Value] = []
        for i, spec in enumerate(function.results):
            match function.aliases.get(i):
                case Argument(index):
                    writes.append(operands[index])
                case Result(index):
                    writes.append(writes[index])
                case None:
                    if shardings[i].stacked and not mapped:
                        spec = spec.update(shape=spec.shape[1:])  # that of one shard
                    writes.append(self._add_value(spec, place, shardings[i]))
        self.calls.append(
            Instruction(
                place=place,
                source=None,
                function=function,
                reads=operands,
                writes=writes,
                label=label or function.name,
                layers=layers,
                mapped=mapped,
            )
        )
        return writes

    @cached_property
    def processes(self) -> list[int]:
        """The process of each place."""
        return [device.process_index for device in self.devices]

    @cached_property
    def first_places(self) -> dict[int, Place]:
        """The first place of each process, in order; empty if there is one process."""
        processes = sorted(set(self.processes))
        if len(processes) == 1:
            return {}
        return {process: self.processes.index(process) for process in processes}

    def call_in_processes(
        self, function: Computation, place: Place, reads: Sequence[Value]
    ) -> list[Value]:
        """Calls a function in a place, or once in each process if there are several.

        A reader of a result reads that of its process: nothing is sent.
        """
        if not self.first_places:
            return self.call(function, place, reads)
        results = [
            self.call(function, first_place, reads)
            for first_place in self.first_places.values()
        ]
        for equal_results in zip(*results, strict=True):
            result_of = dict(zip(self.first_places, equal_results, strict=True))
            self._process_results |= dict.fromkeys(equal_results, result_of)
        return results[0]

    def bring_to_processes(self, value: Value) -> Value | Copies:
        """Returns the copies of a value in all processes; itself if there is one."""
        if not self.first_places:
            return value
        return tuple(self.bring(value, place) for place in self.first_places.values())

    def bring(self, value: Value, place: Place) -> Value:
        """Returns the value in a place: itself, or a copy."""
        if value in self._process_results:
            value = self._process_results[value].get(self.processes[place], value)
        if self.places[value] == place:
            return value
        value = self._originals.get(value, value)
        if self.places[value] in (place, NOWHERE):
            return value
        if value in self.arguments and self._is_far(value, place):
            value = self._copy_sent_argument(value)
        return self._copy(value, place, self.specs[value], self.shardings[value])

    def _copy_sent_argument(self, value: Value) -> Value:
        """Copies an argument in its place, before it is sent to another process.

        The next program may overwrite the argument before it has left.
        """
        if value not in self._sent_copies:
            (self._sent_copies[value],) = self._copy_some([value], [0])
        return self._sent_copies[value]

    def split_batch(self, value: Value, place: Place, split: MicrobatchSplit) -> Value:
        """Returns the micro-batches of a leaf of the mini-batch, in a place.

        They are spread over the shards of the place: each has ``[M, ..., size, ...]``.
        """
        spec = self.specs[value]
        shape = list(spec.shape)
        shape[split.axis] = split.size
        part = jax.ShapeDtypeStruct(
            (split.parts, *shape), spec.dtype, weak_type=spec.weak_type
        )
        if self.places[value] == place:
            num_shards = getattr(self.devices[place], "num_shards", 1)
            stacked = part.update(shape=(num_shards, *part.shape))
            function = Computation(
                "split", lambda leaf: [stack(leaf, split, num_shards)], [stacked]
            )
            return self.call(function, place, [value], shardings=[STACKED])[0]
        return self._copy(value, place, part, STACKED._replace(split=split))

    def _copy(self, value: Value, place: Place, spec: Any, sharding: Sharding) -> Value:
        key = value, place, sharding.split
        if key not in self._copies:
            copy = self._add_value(spec, place, sharding)
            self._copies[key] = copy
            self._originals[copy] = value
        return self._copies[key]

    def as_own_arrays(self, outputs: Sequence[Value]) -> list[Value]:
        """Returns outputs as those of `jax.jit`: arrays that share no memory.

        An output is copied if it is an argument, a copy of a value from outside, which
        may be the caller's array itself, or an earlier output: nobody deletes an array
        by deleting another.
        """
        taken = set(self.arguments) - self.donated
        for copy, source in self._originals.items():
            if self.places[source] == OUTSIDE:
                taken.add(copy)

        shared_indices = []
        for i, value in enumerate(outputs):
            if value in taken:
                shared_indices.append(i)
            taken.add(value)
        return self._copy_some(outputs, shared_indices)

    def copy_sent_outputs(self, outputs: Sequence[Value | Copies]) -> list[Any]:
        """Returns outputs with copies of those that are sent to another process.

        A caller may overwrite an output before it has left.
        """
        sent = {value for value, place, _ in self._copies if self._is_far(value, place)}
        sent_indices = [i for i, value in enumerate(outputs) if value in sent]
        return self._copy_some(outputs, sent_indices)

    def _copy_some(self, outputs: Sequence[Any], indices: Sequence[int]) -> list[Any]:
        """Returns outputs with copies of those of some indices, in their places."""
        new_outputs = list(outputs)
        copied = {i: outputs[i] for i in indices}
        for place, place_indices in self._group_by_place(copied).items():
            reads = [outputs[i] for i in place_indices]
            copy = Computation("copy", lambda *x: x, [self.specs[v] for v in reads])
            shardings = [self.shardings[v] for v in reads]
            copies = self.call(copy, place, reads, shardings=shardings)
            for i, value in zip(place_indices, copies, strict=True):
                new_outputs[i] = value
        return new_outputs

    def _group_by_place(self, values: Mapping[Key, Value]) -> dict[Place, list[Key]]:
        """The keys of values, by the places of these."""
        keys: dict[Place, list[Key]] = {}
        for key, value in values.items():
            keys.setdefault(self.places[value], []).append(key)
        return keys

    def crosses_processes(self, instruction: Instruction) -> bool:
        """True if an instruction is a move from one process to another."""
        return instruction.is_move and self._is_far(
            instruction.reads[0], instruction.place
        )

    def _is_far(self, value: Value, place: Place) -> bool:
        """True if a value is in a place of another process than ``place``."""
        source = self.places[value]
        if source < 0 or not self.first_places:
            return False
        return self.processes[source] != self.processes[place]

    def instructions(self, outputs: Sequence[Value]) -> list[Instruction]:
        """The calls that outputs need, or that have effects, and all moves.

        A move comes right after the call that makes its values.
        """
        needed: set[Value] = set()

        def need(values: Sequence[Value]) -> None:
            needed.update(values)
            needed.update(self._originals.get(value, value) for value in values)

        need(outputs)
        live_calls = []
        for call in reversed(self.calls):
            assert call.function
            new_values = set(call.writes) - set(call.reads)
            if call.function.has_effects or not needed.isdisjoint(new_values):
                live_calls.append(call)
                need(call.reads)

        # value -> its copies that no move has made yet
        copies: dict[Value, list[Value]] = {}
        for copy, value in self._originals.items():
            if copy in needed:
                copies.setdefault(value, []).append(copy)

        ordered = self._moves([*self.arguments, *self.constants], copies, "arguments")
        for call in reversed(live_calls):
            ordered.append(call)
            ordered += self._moves(call.writes, copies, call.label)
        return ordered

    def _moves(
        self, values: Iterable[Value], copies: dict[Value, list[Value]], label: Any
    ) -> list[Instruction]:
        """The moves that make the copies of values: one for each pair of places.

        Args:
          values: the values.
          copies: value -> its copies that no move has made yet; the values are removed.
          label: the label of the moves.
        """
        # (place of the values, place of the copies) -> copies
        copies_of_move: dict[tuple[Place, Place], list[Value]] = {}
        for value in values:
            for copy in copies.pop(value, ()):
                places = self.places[value], self.places[copy]
                copies_of_move.setdefault(places, []).append(copy)

        moves: list[Instruction] = []
        for (source, target), moved in copies_of_move.items():
            reads = [self._originals[copy] for copy in moved]
            moves.append(
                Instruction(target, source, None, reads, writes=moved, label=label)
            )
        return moves
