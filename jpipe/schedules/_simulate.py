"""Builds the timeline of a simulated order; explains deadlocks."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

from ._action import BACKWARD, FORWARD, INPUT, Action
from ._action_tables import ActionTables, SimulatedOrder
from ._costs import Costs, find_faults, look_up
from ._formats import format_type
from ._timeline import Exchange, MemoryEvent, Timeline

# Sums of finite costs may still be infinite.
TOO_LONG = "costs: a step takes longer than a float can hold"


class ScheduleError(ValueError):
    """A schedule that cannot run; the message lists every fault."""


def check_costs(
    name: str, costs: Costs, num_microbatches: int, num_stages: int | None = None
) -> None:
    """Refuses costs that cannot be used, with every fault.

    Args:
      name: the name with which the error begins.
      costs: the costs.
      num_microbatches: the number of micro-batches of the schedule.
      num_stages: its number of stages; default: any.
    """
    if not isinstance(costs, Costs):
        raise TypeError(
            f"{name}: costs is {format_type(costs)}, needs a jpipe.schedules.Costs"
        )
    faults = find_faults(costs, num_microbatches, num_stages)
    if faults:
        lines = "".join(f"\n  * {fault}" for fault in faults)
        raise ScheduleError(f"{name}: costs cannot be used:{lines}")


def build_timeline(simulated: SimulatedOrder, dispatched: Iterable[Action]) -> Timeline:
    """Builds the timeline of a schedule whose rows were simulated.

    One thread dispatches its actions in the order of the schedule, ahead of the
    devices: memory is taken and freed in this order, however long actions take.
    """
    tables = simulated.tables
    schedule = tables.schedule
    ids = chain.from_iterable(simulated.rows)
    actions = dict(zip(ids, chain.from_iterable(schedule.rows), strict=True))
    order = [actions[action_id] for action_id in simulated.order]
    end = dict(zip(order, simulated.ends, strict=True))

    memory = [
        MemoryEvent(0.0, rank, num_bytes)
        for rank, num_bytes in enumerate(tables.initial_bytes)
    ]
    now = [0.0] * schedule.num_ranks
    for action_id, rank, live in tables.memory(map(tables.id_of, dispatched)):
        now[rank] = max(now[rank], end[actions[action_id]])
        memory.append(MemoryEvent(now[rank], rank, live))

    return Timeline(
        schedule=schedule,
        start=dict(zip(order, simulated.starts, strict=True)),
        end=end,
        memory=tuple(memory),
        costs=tables.costs,
        exchanges=tuple(_list_exchanges(tables, end)),
    )


def _list_exchanges(
    tables: ActionTables, ends: Mapping[Action, float]
) -> Iterator[Exchange]:
    """Yields the exchange of each stage: it starts after the last of its gradients."""
    last_end: dict[int, float] = {}
    for (op, stage, _), end in ends.items():
        if op != FORWARD:
            last_end[stage] = max(last_end.get(stage, end), end)
    for stage, start in sorted(last_end.items()):
        seconds = look_up(tables.costs.exchange, stage)
        if seconds:
            ranks = tuple(tables.schedule.ranks_of[stage])
            yield Exchange(stage, ranks, start=start, end=start + seconds)


def explain_deadlock(simulated: SimulatedOrder) -> str:
    """Tells who waits for whom, from a rank that is stuck to where the chain closes."""
    tables = simulated.tables
    end = simulated.end
    # result -> its rank and its action
    scheduled: dict[int, tuple[int, Action]] = {}
    # rank -> the first action that did not run
    stuck: dict[int, int] = {}
    for rank, row in enumerate(simulated.rows):
        for action_id in reversed(row):
            result_id = tables.result_ids[action_id]
            scheduled[result_id] = rank, tables.action(action_id)
            if end[result_id] < 0:
                stuck[rank] = action_id
    has_split = any(action.op == INPUT for _, action in scheduled.values())

    path: list[int] = []
    waits: dict[int, str] = {}  # rank -> sentence
    rank = min(stuck)
    while rank not in waits:
        action_id = stuck[rank]
        needed_id = next(
            ids[action_id] for ids, _ in tables.dependencies if end[ids[action_id]] < 0
        )
        path.append(rank)
        sentence = f"rank {rank}: {tables.action(action_id)} waits for"
        if needed_id not in scheduled:
            needed = tables.action(needed_id)
            if not has_split:
                # A backward is read by the ID of its input gradient.
                needed = needed._replace(op=BACKWARD)
            return f"the schedule deadlocks: {sentence} {needed}, which nobody runs"
        owner, needed = scheduled[needed_id]
        blocker = tables.action(stuck[owner])
        after = "" if blocker == needed else f" after {blocker}"
        waits[rank] = f"{sentence} {needed}, which rank {owner} runs{after}"
        rank = owner
    cycle = path[path.index(rank) :]
    return "the schedule deadlocks: " + "; ".join(waits[rank] for rank in cycle)
