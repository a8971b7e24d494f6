"""What is compiled of the calls in a graph: what they return, and what they overwrite.

A program is compiled for all calls of a function in a place. It returns what is
read of any of them, and takes the memory of what all of them read last.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from .._jaxprs._function import Function
from .._processes._keys import is_key
from ._compile import Compiled, named, on_host
from ._graph import Graph, Value
from ._instruction import OUTSIDE, Instruction
from ._sharding import SubMesh

# A call, with those of the values that it reads last whose memory may be taken.
Call = tuple[Instruction, set[Value]]


def last_uses(
    instructions: Sequence[Instruction], outputs: Sequence[Value]
) -> dict[Value, int]:
    """The number of the last instruction that reads each value."""
    last = {v: i for i, each in enumerate(instructions) for v in each.reads}
    return last | dict.fromkeys(outputs, len(instructions))


def compiled(
    graph: Graph, instructions: Sequence[Instruction], last: dict[Value, int]
) -> list[Compiled]:
    """Notes in each call what it runs, of a function in a place what suits all."""
    owned = _owned(graph, instructions)
    calls: dict[Any, list[Call]] = {}
    # A name for all places: JAX's persistent cache finds it for any, on a GPU.
    labels: dict[Any, list[Any]] = {}
    for number, each in enumerate(instructions):
        if each.is_move:
            continue
        key = each.function, each.place
        if isinstance(graph.devices[each.place], SubMesh):
            key += tuple(graph.shardings[v] for v in (*each.reads, *each.writes))
        ended = {v for v in each.reads if last[v] == number and v in owned}
        if len(set(each.reads)) < len(each.reads):
            ended = {v for v in ended if each.reads.count(v) == 1}
        calls.setdefault(key, []).append((each, ended))
        labels.setdefault(each.function, []).append(each.label)
    names = {function: named(function.name, own) for function, own in labels.items()}
    programs = []
    for (function, *_), own in calls.items():
        first, live = own[0][0], _live(function, own, last)
        program = Compiled(
            function,
            [graph.specs[v] for v in first.reads],
            live,
            _donated(graph, own, live),
            graph.devices[first.place],
            [graph.places[v] for v in first.reads],
            names[function],
            first.mapped,
            [graph.shardings[v] for v in first.reads],
            [graph.shardings[v] for v in first.writes],
        )
        for call, _ in own:
            call.compiled = program
        programs.append(program)
    return programs


def _owned(graph: Graph, instructions: Sequence[Instruction]) -> set[Value]:
    """The values whose memory a program may take."""
    owned = set(graph.donated)
    for each in instructions:
        if each.source != OUTSIDE:  # what comes from there may be the user's
            same = each.function.same if each.function else ()
            owned.update(v for i, v in enumerate(each.writes) if i not in same)
    # What was sent to another process may not have left yet; what comes is watched.
    for move in filter(graph.crosses, instructions):
        owned -= {*move.reads, *move.writes}
    return owned


def _live(
    function: Function, calls: Sequence[Call], last: dict[Value, int]
) -> list[int]:
    """The results that are read of some call; those on the host come last."""
    live = [
        i
        for i in range(len(function.results))
        if i not in function.same and any(call.writes[i] in last for call, _ in calls)
    ]
    return sorted(live, key=lambda i: on_host(function.results[i]))


def _donated(graph: Graph, calls: Sequence[Call], live: Sequence[int]) -> list[int]:
    """The arguments whose memory results take: what all calls read last.

    Args:
      graph: what is computed where.
      calls: the calls of a function in a place.
      live: the results. Memory goes to the first that fit, never to those on the host.
    """

    def kind(value: Value) -> Any:
        spec = graph.specs[value]
        return spec.shape, spec.dtype, graph.shardings[value]

    first, _ = calls[0]
    made = [first.writes[i] for i in live]
    free = Counter(kind(v) for v in made if not on_host(graph.specs[v]))
    # First what only an overwriting frees; then from the last, as sums are, which are
    # added to in place.
    reads = list(enumerate(first.reads))
    reads.sort(key=lambda pair: (pair[1] not in graph.donated, -pair[0]))
    donated = []
    for i, value in reads:
        spec = graph.specs[value]
        if not free[kind(value)] or is_key(spec) or on_host(spec):
            continue
        if all(call.reads[i] in ended for call, ended in calls):
            free[kind(value)] -= 1
            donated.append(i)
    return sorted(donated)
