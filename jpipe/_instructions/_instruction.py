"""One instruction: a call of a compiled program, or a move to another place."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from .._processes._keys import is_key
from .._processes._transport import Crossing
from . import _transfer
from ._compile import Compiled
from ._donated import Key, key
from ._graph import OUTSIDE, Graph, Operation, Place, Value
from ._transfer import Device

Slot = int


@dataclass(frozen=True)
class Instruction:
    """A call of a compiled function, or a move to another place.

    Attributes:
      place: where it runs; of a move, where it goes.
      source: of a move where it comes from; of a call ``None``.
      run: what it calls; or, of a move, ``(leaves, ()) -> leaves``.
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


def listed(
    graph: Graph,
    operations: Sequence[Operation],
    last: Mapping[Value, int],
    programs: Mapping[Key, Compiled],
    devices: Sequence[Device],
    slot: dict[Value, Slot],
) -> list[Instruction]:
    """Operations as instructions, in the same order.

    Args:
      graph: what is computed where.
      operations: all of it.
      last: the number of the operation that reads each value last.
      programs: what is compiled of the calls.
      devices: the device of each place.
      slot: the slots of arguments and constants; those of results are added.
    """
    found = []
    for number, operation in enumerate(operations):
        new = [v for v in operation.writes if v not in slot]
        reads, donates, run = operation.reads, [], None
        if operation.function:
            run = programs[key(graph, operation, devices)]
            new = [operation.writes[i] for i in run.kept]
            donates = [reads[i] for i in run.donated]
            reads = [reads[i] for i in run.read]
        start = len(slot)
        slot |= {v: start + i for i, v in enumerate(new)}
        ended = dict.fromkeys([*operation.reads, *new])
        found.append(
            Instruction(
                operation.place,
                None if run else graph.places[reads[0]],
                run or _mover(graph, operation, devices),
                tuple(slot[v] for v in reads),
                tuple(slot[v] for v in donates),
                range(start, len(slot)),
                tuple(sorted(slot[v] for v in ended if last.get(v, -1) <= number)),
                operation.label,
                operation.layers,
            )
        )
    return found


def called(label: Any) -> str:
    """How messages call a label."""
    return label if isinstance(label, str) else f"action {label}"


def _mover(
    graph: Graph, operation: Operation, devices: Sequence[Device]
) -> Callable[[Any, Any], Sequence[Any]]:
    target, values = devices[operation.place], operation.reads
    source = graph.places[values[0]]
    how = [graph.shardings[value] for value in operation.writes]
    if source == OUTSIDE:
        return lambda leaves, _: _transfer.put(leaves, target, how)
    if graph.crosses(operation):
        return _crossing(graph, operation, devices, how)
    keys = any(is_key(graph.specs[value]) for value in values)
    source_how = [graph.shardings[value] for value in values]
    return _transfer.sender(devices[source], target, keys, how, source_how)


def _crossing(
    graph: Graph, operation: Operation, devices: Sequence[Device], how: Sequence[Any]
) -> Crossing:
    """A move to another process."""
    origin = graph.places[operation.reads[0]]
    source, target = devices[origin], devices[operation.place]
    of = f" of {graph.ranks[origin]}" if graph.ranks else ""
    pairs = list(zip([graph.specs[v] for v in operation.writes], how, strict=True))
    return Crossing(
        source=source,
        target=target,
        specs=[
            jax.ShapeDtypeStruct(_transfer.global_shape(x.shape, target, h), x.dtype)
            for x, h in pairs
        ],
        source_lies=[_transfer.on(source, each) for each in how],
        target_lies=[_transfer.on(target, each) for each in how],
        index=operation.writes[0],
        label=called(operation.label) + of,
    )
