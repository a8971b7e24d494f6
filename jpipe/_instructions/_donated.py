"""What is compiled of the calls in a graph: what they return, and what they overwrite.

A program is compiled for all calls of a function in a place. It returns what any of
them is asked for, and takes the memory of what all of them read last.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from .._jaxprs._function import Function
from .._processes._keys import is_key
from ._compile import Compiled, Spread, named, on_host
from ._graph import OUTSIDE, Graph, Operation, Value
from ._sharding import SubMesh
from ._transfer import Device

Key = tuple[Any, ...]
# Calls of one function, each with the number of its operation.
Calls = Sequence[tuple[int, Operation]]


def last_uses(
    operations: Sequence[Operation], outputs: Sequence[Value]
) -> dict[Value, int]:
    """The number of the last operation that reads each value."""
    last = {v: i for i, operation in enumerate(operations) for v in operation.reads}
    return last | dict.fromkeys(outputs, len(operations))


def compiled(
    graph: Graph,
    operations: Sequence[Operation],
    last: dict[Value, int],
    devices: Sequence[Device],
) -> dict[Key, Compiled]:
    """What is compiled: of the calls of a function in a place, what suits them all."""
    calls: dict[Key, list[tuple[int, Operation]]] = {}
    for number, operation in enumerate(operations):
        if operation.function:
            own = key(graph, operation, devices)
            calls.setdefault(own, []).append((number, operation))
    # A name for all places: JAX's persistent cache finds it for any, on a GPU.
    labels: dict[Any, list[Any]] = {}
    for (function, *_), own in calls.items():
        known = labels.setdefault(function, [])
        known += [operation.label for _, operation in own]
    names = {f: named(f.name, own) for f, own in labels.items()}
    owned = _owned(graph, operations)
    programs = {}
    for known, own in calls.items():
        function, place, *_ = known
        first = own[0][1]
        kept = _kept(function, own, last)
        programs[known] = Compiled(
            function,
            [graph.specs[v] for v in first.reads],
            kept,
            _donated(graph, own, last, owned, kept),
            devices[place],
            [graph.places[v] for v in first.reads],
            names[function],
            Spread(
                first.mapped,
                tuple(graph.shardings[v] for v in first.reads),
                tuple(graph.shardings[v] for v in first.writes),
            ),
        )
    return programs


def _owned(graph: Graph, operations: Sequence[Operation]) -> set[Value]:
    """The values whose memory a program may take."""
    owned = {v for operation in operations for v in _made(graph, operation)}
    owned |= graph.donated
    # What was sent to another process may not have left yet; what comes is watched.
    for operation in filter(graph.crosses, operations):
        owned -= {*operation.reads, *operation.writes}
    return owned


def _kept(function: Function, calls: Calls, last: dict[Value, int]) -> list[int]:
    """The results that some call is asked for; those on the host come last."""
    kept = [
        i
        for i in range(len(function.results))
        if i not in function.same
        and any(operation.writes[i] in last for _, operation in calls)
    ]
    return sorted(kept, key=lambda i: i in function.offloaded)


def _donated(
    graph: Graph,
    calls: Calls,
    last: dict[Value, int],
    owned: set[Value],
    kept: Sequence[int],
) -> list[int]:
    """The arguments whose memory results take: what all calls read last.

    Args:
      graph: what is computed where.
      calls: the calls of a function in a place, numbered.
      last: the number of the operation that reads each value last.
      owned: the values whose memory may be taken.
      kept: the results. Memory goes to the first that fit, never to those on the host.
    """
    first = calls[0][1]
    function = first.function
    assert function
    free = Counter(
        (_kind(function.results[i]), graph.shardings[first.writes[i]])
        for i in kept
        if i not in function.offloaded
    )
    free_after = [_read_last(*call, last) & owned for call in calls]
    # First what only an overwriting frees; then from the last, as sums are, which are
    # added to in place.
    reads = list(enumerate(first.reads))
    reads.sort(key=lambda pair: (pair[1] not in graph.donated, -pair[0]))
    donated = []
    for i, value in reads:
        kind = _kind(graph.specs[value]), graph.shardings[value]
        if not free[kind] or is_key(graph.specs[value]) or on_host(graph.specs[value]):
            continue
        if all(
            operation.reads[i] in own
            for (_, operation), own in zip(calls, free_after, strict=True)
        ):
            free[kind] -= 1
            donated.append(i)
    return sorted(donated)


def _read_last(number: int, operation: Operation, last: dict[Value, int]) -> set[Value]:
    """What a call reads once, and nobody after it."""
    times = Counter(operation.reads)
    return {v for v, count in times.items() if count == 1 and last[v] == number}


def key(graph: Graph, operation: Operation, devices: Sequence[Device]) -> Key:
    """What calls have in common that share a program.

    On several devices that is how their arguments and results lie too.
    """
    if not isinstance(devices[operation.place], SubMesh):
        return operation.function, operation.place
    lie = tuple(graph.shardings[v] for v in (*operation.reads, *operation.writes))
    return operation.function, operation.place, lie


def _made(graph: Graph, operation: Operation) -> Sequence[Value]:
    """The arrays that are new: what comes from outside may share the user's memory."""
    if operation.function is None:
        outside = graph.places[operation.reads[0]] == OUTSIDE
        return () if outside else operation.writes
    same = operation.function.same
    return [v for i, v in enumerate(operation.writes) if i not in same]


def _kind(spec: Any) -> Any:
    return spec.shape, spec.dtype
