"""What a program computes and where, before anything is compiled.

Values are leaves: each is made once, in one place. Whoever reads a value elsewhere
gets a copy, which leaves as soon as the value is made; so transfers are written by
nobody.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import jax

from .._jaxprs._computation import ArgumentSource, Computation, ResultSource
from ._instruction import NOWHERE, OUTSIDE, Instruction, Place
from ._sharding import STACKED, WHOLE, MicrobatchCut, Sharding, StageMesh
from ._transfer import Device

Value = int
Key = TypeVar("Key", bound=Hashable)
# What is wanted in each process: its copy there.
Copies = tuple[Value, ...]


@dataclass
class Graph:
    """Calls of functions in the order in which they run, over values.

    Attributes:
      devices: the device of each place.
      facts: what it was made of, in words, by which processes compare theirs.
      specs: the shape and dtype of each value; of what is stacked, of one shard.
      places: where each value is made.
      shardings: of each value there.
      arguments: the values that a run is given, in order.
      donated: those of them that it may overwrite.
      constants: the values that stay from run to run.
      calls: the calls.
    """

    devices: Sequence[Device]
    facts: dict[str, str] = field(default_factory=dict)
    specs: list[Any] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    shardings: list[Sharding] = field(default_factory=list)
    arguments: dict[Value, None] = field(default_factory=dict)
    donated: set[Value] = field(default_factory=set)
    constants: dict[Value, Any] = field(default_factory=dict)
    calls: list[Instruction] = field(default_factory=list)
    _copies: dict[tuple[Value, Place, MicrobatchCut | None], Value] = field(
        default_factory=dict
    )
    _source: dict[Value, Value] = field(default_factory=dict)
    _sent: dict[Value, Value] = field(default_factory=dict)
    _alike: dict[Value, dict[int, Value]] = field(default_factory=dict)
    _constants: dict[Any, Value] = field(default_factory=dict)

    def _make(self, spec: Any, place: Place, sharding: Sharding = WHOLE) -> Value:
        if len(sharding.spec) and isinstance(device := self.devices[place], StageMesh):
            sharding = device.fitting(sharding, spec.shape)
        self.specs.append(spec)
        self.places.append(place)
        self.shardings.append(sharding)
        return len(self.specs) - 1

    def argument(
        self, spec: Any, place: Place, donated: bool = False, sharding: Sharding = WHOLE
    ) -> Value:
        """A value that each run is given."""
        value = self._make(spec, place, sharding)
        self.arguments[value] = None
        if donated:
            self.donated.add(value)
        return value

    def constant(self, array: Any, place: Place, stacked: bool = False) -> Value:
        """A value that is the same in each run: an array, maybe of all shards.

        Of arrays of NumPy equal ones are one.
        """
        text = id(array) if isinstance(array, jax.Array) else array.tobytes()
        key = array.dtype, array.shape, text, place, stacked
        if key not in self._constants:
            shape = array.shape[1:] if stacked else array.shape
            dtype = jax.dtypes.canonicalize_dtype(array.dtype)
            spec = jax.ShapeDtypeStruct(shape, dtype)
            value = self._make(spec, place, STACKED if stacked else WHOLE)
            self._constants[key] = value
            self.constants[value] = array
        return self._constants[key]

    def call(
        self,
        function: Computation,
        place: Place,
        reads: Sequence[Value],
        label: Any = "",
        layers: str = "",
        mapped: bool = False,
        shardings: Sequence[Sharding] | None = None,
    ) -> list[Value]:
        """Calls a function in a place, on values from anywhere.

        Args:
          function: the function.
          place: where it runs.
          reads: its arguments.
          label: what the call is: an action of the schedule, or words.
          layers: what runs, for messages.
          mapped: whether each shard of the place calls it by itself.
          shardings: of its results; default: stacked if it is mapped, else whole.

        Returns:
          Its results.
        """
        shardings = shardings or [STACKED if mapped else WHOLE] * len(function.results)
        if function.reads is not None:
            reads = [reads[i] for i in function.reads]
        here = [self.at(value, place) for value in reads]
        writes: list[Value] = []
        for i, spec in enumerate(function.results):
            match function.aliases.get(i):
                case ArgumentSource(index):
                    writes.append(here[index])
                case ResultSource(index):
                    writes.append(writes[index])
                case None:
                    writes.append(self._make(spec, place, shardings[i]))
        label = label or function.name
        self.calls.append(
            Instruction(place, None, function, here, writes, label, layers, mapped)
        )
        return writes

    @cached_property
    def processes(self) -> list[int]:
        """The process of each place."""
        return [device.process_index for device in self.devices]

    @cached_property
    def heads(self) -> dict[int, Place]:
        """The first place of each process, in order; empty if there is one."""
        found = {p: self.processes.index(p) for p in sorted(set(self.processes))}
        return found if len(found) > 1 else {}

    def call_everywhere(
        self, function: Computation, place: Place, reads: Sequence[Value]
    ) -> list[Value]:
        """Calls a function in a place, or in each process once.

        Whoever reads a result has the one of its process: nothing is sent.
        """
        if not self.heads:
            return self.call(function, place, reads)
        every = [self.call(function, head, reads) for head in self.heads.values()]
        for alike in zip(*every, strict=True):
            of_process = dict(zip(self.heads, alike, strict=True))
            self._alike |= dict.fromkeys(alike, of_process)
        return every[0]

    def everywhere(self, value: Value) -> Value | Copies:
        """The value in each process; itself where there is one."""
        found = tuple(self.at(value, head) for head in self.heads.values())
        return found or value

    def at(self, value: Value, place: Place) -> Value:
        """The value in a place: itself, or a copy."""
        if value in self._alike:
            value = self._alike[value].get(self.processes[place], value)
        if self.places[value] == place:
            return value
        value = self._source.get(value, value)
        if self.places[value] in (place, NOWHERE):
            return value
        value = self._lasting(value, place)
        return self._copy(value, place, self.specs[value], self.shardings[value])

    def _lasting(self, value: Value, place: Place) -> Value:
        """What is sent to another process: of an argument a copy.

        The next program may overwrite the argument before it has left.
        """
        if value not in self.arguments or not self._is_far(value, place):
            return value
        if value not in self._sent:
            (self._sent[value],) = self._with_copies_of([value], [0])
        return self._sent[value]

    def cut(self, value: Value, place: Place, cut: MicrobatchCut) -> Value:
        """Micro-batches of a leaf of the mini-batch, spread over the shards of a place.

        For each shard it is ``[M, ..., size, ...]``.
        """
        spec = self.specs[value]
        shape = list(spec.shape)
        shape[cut.axis] = cut.size
        part = jax.ShapeDtypeStruct(
            (cut.parts, *shape), spec.dtype, weak_type=spec.weak_type
        )
        return self._copy(value, place, part, STACKED._replace(cut=cut))

    def _copy(self, value: Value, place: Place, spec: Any, sharding: Sharding) -> Value:
        key = value, place, sharding.cut
        if key not in self._copies:
            copy = self._make(spec, place, sharding)
            self._copies[key], self._source[copy] = copy, value
        return self._copies[key]

    def own(self, outputs: Sequence[Value]) -> list[Value]:
        """Outputs as `jax.jit` gives them: arrays of their own.

        What is an argument, or comes from outside and may have been here already, is
        copied, and what stands there twice: nobody deletes one by deleting another.
        """
        taken = set(self.arguments) - self.donated
        taken |= {v for v, own in self._source.items() if self.places[own] == OUTSIDE}
        shared = []
        for i, value in enumerate(outputs):
            if value in taken:
                shared.append(i)
            taken.add(value)
        return self._with_copies_of(outputs, shared)

    def lasting(self, outputs: Sequence[Value | Copies]) -> list[Any]:
        """Outputs of which none is sent to another process: see `_lasting`."""
        sent = {value for value, place, _ in self._copies if self._is_far(value, place)}
        return self._with_copies_of(
            outputs, [i for i, value in enumerate(outputs) if value in sent]
        )

    def _with_copies_of(self, outputs: Sequence[Any], at: Sequence[int]) -> list[Any]:
        """Outputs, with a copy in place of those at some positions."""
        found = list(outputs)
        for place, own in self.by_place({i: outputs[i] for i in at}).items():
            reads = [outputs[i] for i in own]
            copy = Computation("copy", lambda *x: x, [self.specs[v] for v in reads])
            shardings = [self.shardings[v] for v in reads]
            copies = self.call(copy, place, reads, shardings=shardings)
            for i, value in zip(own, copies, strict=True):
                found[i] = value
        return found

    def by_place(self, values: Mapping[Key, Value]) -> dict[Place, list[Key]]:
        """The keys of some values, grouped by the places of these."""
        keys: dict[Place, list[Key]] = {}
        for key, value in values.items():
            keys.setdefault(self.places[value], []).append(key)
        return keys

    def crosses(self, instruction: Instruction) -> bool:
        """Whether it is a move from one process to another."""
        place, reads = instruction.place, instruction.reads
        return instruction.is_move and self._is_far(reads[0], place)

    def _is_far(self, value: Value, place: Place) -> bool:
        """Whether a place is of another process than a value, which is somewhere."""
        source = self.places[value]
        if source < 0 or not self.heads:
            return False
        return self.processes[source] != self.processes[place]

    def with_copies(self, outputs: Sequence[Value]) -> list[Instruction]:
        """The calls that the outputs need, or that have effects, and all moves.

        A move comes right after what makes its values.
        """
        needed: set[Value] = set()

        def need(values: Sequence[Value]) -> None:
            needed.update(values)
            needed.update(self._source.get(value, value) for value in values)

        need(outputs)
        live = []
        for call in reversed(self.calls):
            assert call.function
            made = set(call.writes) - set(call.reads)
            if call.function.has_effects or not needed.isdisjoint(made):
                live.append(call)
                need(call.reads)
        copies: dict[Value, list[Value]] = {}
        for copy, value in self._source.items():
            if copy in needed:
                copies.setdefault(value, []).append(copy)

        def moves(values: Iterable[Value], label: Any) -> list[Instruction]:
            """One from each place to each where some of the values are wanted."""
            ways: dict[tuple[Place, Place], list[Value]] = {}
            for value in values:
                for copy in copies.pop(value, ()):
                    way = self.places[value], self.places[copy]
                    ways.setdefault(way, []).append(copy)
            return [
                Instruction(
                    place, source, None, [self._source[v] for v in own], own, label
                )
                for (source, place), own in ways.items()
            ]

        done = moves([*self.arguments, *self.constants], "arguments")
        for call in reversed(live):
            done += [call, *moves(call.writes, call.label)]
        return done
