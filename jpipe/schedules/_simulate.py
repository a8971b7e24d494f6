"""From an order that was timed to a timeline, and why one that cannot be is refused."""

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from ._action import BACKWARD, FORWARD, INPUT, Action
from ._costs import Costs, at, faults_of
from ._tables import Run, Tables
from ._timeline import Exchange, MemoryEvent, Timeline

# Of costs each of which is finite.
TOO_LONG = "costs: a step takes longer than a float can hold"


class ScheduleError(ValueError):
    """A schedule that cannot run; the message lists every fault."""


def check_costs(
    name: str, costs: Costs, num_microbatches: int, num_stages: int | None = None
) -> None:
    """Refuses what is no cost of so many stages and micro-batches, naming all of it."""
    if not isinstance(costs, Costs):
        kind = type(costs).__name__
        raise TypeError(f"{name}: costs is a {kind}, needs a jpipe.schedules.Costs")
    if faults := faults_of(costs, num_microbatches, num_stages):
        lines = "".join(f"\n  * {fault}" for fault in faults)
        raise ScheduleError(f"{name}: costs cannot be used:{lines}")


def predicted(schedule: Any, run: Run) -> Timeline:
    """The timeline of a `Schedule` whose rows were timed.

    One thread dispatches its actions in the order of the schedule, ahead of the
    devices: memory is taken and freed in this order, however long actions take.
    """
    tables, rows = run.tables, schedule.rows
    cells = chain.from_iterable(rows)
    actions = dict(zip(chain.from_iterable(run.rows), cells, strict=True))
    ran = [actions[number] for number in run.order]
    end = dict(zip(ran, run.ends, strict=True))
    memory = [MemoryEvent(0.0, *each) for each in enumerate(tables.at_start)]
    now = [0.0] * len(rows)
    for number, rank, live in tables.memory(map(tables.number, schedule.order())):
        now[rank] = max(now[rank], end[actions[number]])
        memory.append(MemoryEvent(now[rank], rank, live))
    return Timeline(
        schedule.name,
        tables.placement,
        rows,
        dict(zip(ran, run.starts, strict=True)),
        end,
        tuple(memory),
        tables.costs,
        schedule.replicas,
        tuple(_exchanges(tables, end)),
    )


def _exchanges(tables: Tables, ends: Mapping[Action, float]) -> Iterator[Exchange]:
    """The ranks of a stage add up its gradients after the last of them."""
    last: dict[int, float] = {}
    for (op, stage, _), end in ends.items():
        if op != FORWARD:
            last[stage] = max(last.get(stage, end), end)
    for stage, end in sorted(last.items()):
        if seconds := at(tables.costs.exchange, stage):
            yield Exchange(stage, tuple(tables.ranks_of[stage]), end, end + seconds)


def deadlock(run: Run) -> str:
    """Who waits for whom: from one rank that stands still to where the chain closes."""
    tables, end = run.tables, run.end
    runs: dict[int, tuple[int, Action]] = {}
    stuck: dict[int, int] = {}
    for rank, row in enumerate(run.rows):
        for number in reversed(row):
            result = tables.result[number]
            runs[result] = rank, tables.action(number)
            if end[result] < 0:
                stuck[rank] = number
    path: list[int] = []
    waits: dict[int, str] = {}
    rank = min(stuck)
    while rank not in waits:
        number = stuck[rank]
        need = next(read[number] for read, _ in tables.reads if end[read[number]] < 0)
        owner, action = runs.get(need, (None, tables.action(need)))
        if owner is None and all(label.op != INPUT for _, label in runs.values()):
            action = action._replace(op=BACKWARD)  # no backward is split
        path.append(rank)
        waits[rank] = f"rank {rank}: {tables.action(number)} waits for {action}, "
        if owner is None:
            return f"the schedule deadlocks: {waits[rank]}which nobody runs"
        first = tables.action(stuck[owner])
        after = "" if first == action else f" after {first}"
        waits[rank] += f"which rank {owner} runs{after}"
        rank = owner
    cycle = path[path.index(rank) :]
    return "the schedule deadlocks: " + "; ".join(waits[rank] for rank in cycle)
