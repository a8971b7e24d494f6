"""Executables for the calls in a graph: what they return, and what they overwrite.

One is compiled for all calls of a function in a place. It returns each result that
somebody reads in any of the calls, and takes over the memory of the arguments that all
of the calls are the last to read.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from .._jaxprs._computation import Computation
from .._jaxprs._host_memory import is_on_host
from .._processes._arrays import is_key
from ._compiler import PlacedExecutable, executable_name
from ._graph import Graph, Value
from ._instruction import OUTSIDE, Instruction
from ._sharding import StageMesh


class Call(NamedTuple):
    """A call of a function.

    Attributes:
      instruction: the call.
      ended: the values that no later instruction reads, and whose memory may be taken.
    """

    instruction: Instruction
    ended: set[Value]


def last_uses(
    instructions: Sequence[Instruction], outputs: Sequence[Value]
) -> dict[Value, int]:
    """The index of the last instruction that reads each value."""
    last: dict[Value, int] = {}
    for index, instruction in enumerate(instructions):
        last |= dict.fromkeys(instruction.reads, index)
    return last | dict.fromkeys(outputs, len(instructions))


def assign_executables(
    graph: Graph, instructions: Sequence[Instruction], last: dict[Value, int]
) -> list[PlacedExecutable]:
    """Sets the `executable` of each call: one for each function and place.

    Args:
      graph: the graph of the instructions.
      instructions: all of them.
      last: the index of the last instruction that reads each value.

    Returns:
      The executables.
    """
    takeable = _takeable(graph, instructions)
    # (function, place, shardings there) -> calls that share an executable
    calls: dict[Any, list[Call]] = {}
    # function -> labels of its calls in all places: with one name for all of them,
    # JAX's persistent cache finds an executable for any place, on a GPU
    labels: dict[Any, list[Any]] = {}
    for index, instruction in enumerate(instructions):
        if instruction.is_move:
            continue
        ended = set[Value]()
        for value, num_reads in Counter(instruction.reads).items():
            if num_reads == 1 and last[value] == index and value in takeable:
                ended.add(value)
        key = _call_key(graph, instruction)
        calls.setdefault(key, []).append(Call(instruction, ended))
        labels.setdefault(instruction.function, []).append(instruction.label)

    names = {
        function: executable_name(function.name, function_labels)
        for function, function_labels in labels.items()
    }
    executables: list[PlacedExecutable] = []
    for (function, *_), sharing in calls.items():
        first = sharing[0].instruction
        live_results = _live_results(function, sharing, last)
        executable = PlacedExecutable(
            function=function,
            arguments=[graph.specs[v] for v in first.reads],
            live_results=live_results,
            donated=_donated(graph, sharing, live_results),
            device=graph.devices[first.place],
            argument_places=[graph.places[v] for v in first.reads],
            name=names[function],
            mapped=first.mapped,
            argument_shardings=[graph.shardings[v] for v in first.reads],
            result_shardings=[graph.shardings[v] for v in first.writes],
        )
        for call in sharing:
            call.instruction.executable = executable
        executables.append(executable)
    return executables


def _call_key(graph: Graph, call: Instruction) -> tuple[Any, ...]:
    """A key that is equal for calls that share an executable."""
    if not isinstance(graph.devices[call.place], StageMesh):
        return call.function, call.place
    values = [*call.reads, *call.writes]
    return call.function, call.place, tuple(graph.shardings[v] for v in values)


def _takeable(graph: Graph, instructions: Sequence[Instruction]) -> set[Value]:
    """The values whose memory an executable may take."""
    takeable = set(graph.donated)
    for instruction in instructions:
        if instruction.source == OUTSIDE:  # it may be an array of the user's
            continue
        aliases = instruction.function.aliases if instruction.function else ()
        for i, value in enumerate(instruction.writes):
            if i not in aliases:
                takeable.add(value)
    # Values on the way to another process may not have left yet, or are watched there.
    for instruction in instructions:
        if graph.crosses_processes(instruction):
            takeable -= {*instruction.reads, *instruction.writes}
    return takeable


def _live_results(
    function: Computation, calls: Sequence[Call], last: dict[Value, int]
) -> list[int]:
    """The results that somebody reads in some call; those on the host come last."""
    live: list[int] = []
    for i in range(len(function.results)):
        is_read = any(call.instruction.writes[i] in last for call in calls)
        if is_read and i not in function.aliases:
            live.append(i)
    return sorted(live, key=lambda i: is_on_host(function.results[i]))


def _donated(
    graph: Graph, calls: Sequence[Call], live_results: Sequence[int]
) -> list[int]:
    """The arguments whose memory results take: all calls are the last to read them.

    Args:
      graph: the graph of the calls.
      calls: the calls of a function in a place.
      live_results: the results that it returns. Memory goes to the first that fit,
        never to those on the host.
    """

    def layout(value: Value) -> Hashable:
        spec = graph.specs[value]
        return spec.shape, spec.dtype, graph.shardings[value]

    first = calls[0].instruction
    writes = [first.writes[i] for i in live_results]
    # layout -> how many results have it and no memory yet
    unserved = Counter(layout(v) for v in writes if not is_on_host(graph.specs[v]))
    # First donated arguments, whose memory only an overwriting frees; then from the
    # last argument on, as sums are the last and are added to in place.
    reads = list(enumerate(first.reads))
    reads.sort(key=lambda pair: (pair[1] not in graph.donated, -pair[0]))

    donated: list[int] = []
    for i, value in reads:
        spec = graph.specs[value]
        if not unserved[layout(value)] or is_key(spec) or is_on_host(spec):
            continue
        if all(call.instruction.reads[i] in call.ended for call in calls):
            unserved[layout(value)] -= 1
            donated.append(i)
    return sorted(donated)
