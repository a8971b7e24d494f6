"""A schedule run on paper: each rank in its order, each action once it can."""

import dataclasses
import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ._action import BACKWARD, FORWARD, INPUT, Action, Needs
from ._costs import Costs, at, faults_of
from ._homes import Homes
from ._timeline import Exchange, MemoryEvent, Timeline

Rows = tuple[tuple[Action, ...], ...]
# Of costs each of which is finite.
TOO_LONG = "costs: a step takes longer than a float can say"


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


def with_memory(timeline: Timeline, order: Sequence[Action]) -> Timeline:
    """A prediction with what each rank holds, and when gradients are exchanged.

    Args:
      timeline: see `times`.
      order: that in which its actions are dispatched; see `memory_events`.
    """
    assert timeline.costs is not None
    return dataclasses.replace(
        timeline,
        memory=tuple(memory_events(timeline, timeline.costs, order)),
        exchanges=tuple(exchanges(timeline, timeline.costs)),
    )


def times(
    name: str,
    rows: Rows,
    placement: tuple[int, ...],
    costs: Costs,
    replicas: tuple[tuple[int, ...], ...] = (),
) -> Timeline:
    """Predicts when each action runs.

    Args:
      name: of the schedule.
      rows: the actions of each rank, in order.
      placement: the rank of each stage.
      costs: what each action costs.
      replicas: the ranks of each stage, where several take turns.

    Returns:
      The timeline, without what ranks hold.

    Raises:
      ScheduleError: if the schedule deadlocks; the message shows the cycle. Or if the
        sum of its costs is not finite.
    """
    needs, homes = Needs(rows, len(placement)), Homes(placement, rows, replicas)
    start: dict[Action, float] = {}
    end: dict[Action, float] = {}
    free = [0.0] * len(rows)
    position = [0] * len(rows)

    lasts, transfer = _by_kind(costs, costs.of), _by_kind(costs, costs.transfer)

    def skips(action: Action, rank: int) -> list[float]:
        """When the skip connections of an action arrive; their senders have run."""
        return [
            end[sender if sender in end else sender._replace(op=INPUT)] + seconds
            for sender, seconds in costs.skip_transfers(action)
            if homes[sender.microbatch][sender.stage] != rank
        ]

    # Ranks are looked at in rounds, in their order; one that waits for an action is
    # looked at again when that has run: in this round, if its turn is still to come.
    waiting: dict[Action, list[int]] = {}
    turns = list(range(len(rows)))
    while turns:
        later: list[int] = []
        while turns:
            rank = heapq.heappop(turns)
            row = rows[rank]
            while position[rank] < len(row):
                action = row[position[rank]]
                begins, missing = free[rank], None
                for need in needs(action):
                    ready = end.get(need)
                    if ready is None:
                        missing = need
                        break
                    if homes[need.microbatch][need.stage] != rank:
                        ready += transfer(need)
                    begins = max(begins, ready)
                if missing is not None:
                    waiting.setdefault(missing, []).append(rank)
                    break
                if costs.skips:
                    begins = max([begins, *skips(action, rank)])
                start[action], end[action] = begins, begins + lasts(action)
                # What takes no time, such as a forward that its backward does on the
                # way, holds nobody up.
                if end[action] > begins:
                    free[rank] = end[action]
                position[rank] += 1
                for other in waiting.pop(action, ()):
                    heapq.heappush(turns if other > rank else later, other)
        turns = later
    _check_ended(rows, position, needs, end)
    if max(end.values(), default=0.0) == math.inf:
        raise ScheduleError(f"{name}: {TOO_LONG}")
    return Timeline(name, placement, rows, start, end, (), costs, replicas)


def _by_kind(costs: Costs, find: Callable[[Action], Any]) -> Callable[[Action], Any]:
    """What actions cost, found once for each op of a stage where that tells it."""
    if not costs.is_uniform:
        return find
    known: dict[tuple[str, int], Any] = {}

    def found(action: Action) -> Any:
        kind = action[:2]
        if kind not in known:
            known[kind] = find(action)
        return known[kind]

    return found


def _check_ended(
    rows: Rows, position: list[int], needs: Needs, end: Mapping[Action, float]
) -> None:
    """Checks that no rank stands before its end."""
    stuck = {
        r: row[n]
        for r, (row, n) in enumerate(zip(rows, position, strict=True))
        if n < len(row)
    }
    if stuck:
        raise ScheduleError(_cycle(rows, needs, stuck, end))


def exchanges(timeline: Timeline, costs: Costs) -> Iterable[Exchange]:
    """The replicas of a stage add up their gradients after the last of them."""
    seconds = [at(costs.exchange, stage) for stage in range(timeline.num_stages)]
    last: dict[int, float] = {}
    for (op, stage, _), end in timeline.end.items() if any(seconds) else ():
        if op != FORWARD:
            last[stage] = max(last.get(stage, end), end)
    for stage, end in sorted(last.items()):
        if seconds[stage]:
            ranks = tuple(timeline.homes.ranks(stage))
            yield Exchange(stage, ranks, end, end + seconds[stage])


def memory_events(
    timeline: Timeline, costs: Costs, order: Sequence[Action]
) -> Iterable[MemoryEvent]:
    """The bytes of each rank before the first action, then as they change.

    What an action reads is freed when it ends; what it sends to another rank is held by
    both until it has been sent, then by the receiver. Memory is taken and freed in the
    order in which one thread dispatches the actions, ahead of the devices: the bytes
    are those of that order, however long actions take.
    """
    homes = timeline.homes
    training = any(action.op != FORWARD for action in order)
    held = [0.0] * len(timeline.rows)
    # Of what the micro-batches of a stage share on a rank.
    last_reader: dict[tuple[int, int], Action] = {}
    for action in order:
        if action.op in (BACKWARD, INPUT) or not training:
            rank = homes[action.microbatch][action.stage]
            last_reader[action.stage, rank] = action
    # By number, so that a sum does not depend on who runs first.
    for _, stage, i in sorted(action for action in order if action.op == FORWARD):
        rank = homes[i][stage]
        held[rank] += at(costs.extra_bytes, stage, i)
        held[rank] += 0 if stage else at(costs.boundary_bytes, stage, i)
    for stage in range(timeline.num_stages):
        for size in (
            costs.parameter_bytes,
            costs.accumulator_bytes if training else 0,
            costs.shared_bytes,
        ):
            for rank in homes.ranks(stage):
                held[rank] += at(size, stage)
    yield from (MemoryEvent(0.0, rank, size) for rank, size in enumerate(held))

    last = timeline.num_stages - 1
    changed = _by_kind(costs, lambda action: changes_of(action, costs, last, training))
    now = [0.0] * len(timeline.rows)
    for action in order:
        own, sent = changed(action)
        placement = homes[action.microbatch]
        home = placement[action.stage]
        if last_reader.get((action.stage, home)) == action:
            own -= at(costs.shared_bytes, action.stage)
        for rank, change in changes_by_rank(home, own, sent, placement):
            held[rank] += change
            now[rank] = max(now[rank], timeline.end[action])
            yield MemoryEvent(now[rank], rank, held[rank])


def changes_by_rank(
    home: int,
    own: float,
    sent: Sequence[tuple[int, float]],
    placement: Sequence[int],
) -> list[tuple[int, float]]:
    """The bytes by which an action changes what ranks hold, one after the other.

    Args:
      home: the rank that runs it.
      own: what it adds there, without what it sends; see `changes_of`.
      sent: to which stages it sends how many bytes.
      placement: the rank of each stage.
    """
    away: dict[int, float] = {}
    for stage, size in sent:
        if placement[stage] != home and size:
            away[placement[stage]] = away.get(placement[stage], 0) + size
    changes = [(home, own + sum(size for _, size in sent)), *away.items()]
    return [*changes, (home, -sum(away.values()))] if away else changes


def changes_of(
    action: Action, costs: Costs, last: int, training: bool
) -> tuple[float, list[tuple[int, float]]]:
    """The bytes that an action adds to its stage, and those that it sends to others."""
    op, stage, i = action
    residual, extra = (
        at(costs.residual_bytes, stage, i),
        at(costs.extra_bytes, stage, i),
    )
    pending = at(costs.pending_bytes, stage, i)
    arrived = [skip for skip in costs.skips if skip.target == stage]
    left = [skip for skip in costs.skips if skip.source == stage]
    if op == FORWARD:
        kept = residual if training else -extra
        kept += at(costs.emitted_bytes, stage, i) - at(costs.boundary_bytes, stage, i)
        kept -= sum(at(skip.bytes, i) for skip in arrived)
        sent = [(skip.target, at(skip.bytes, i)) for skip in left]
        if stage < last:
            sent.append((stage + 1, at(costs.boundary_bytes, stage + 1, i)))
        return kept, sent
    if op not in (BACKWARD, INPUT):
        return -pending, []
    freed = residual + extra + (costs.cotangent(stage + 1, i) if stage < last else 0)
    freed += sum(at(skip.cotangent_bytes, i) for skip in left)
    sent = [(skip.source, at(skip.cotangent_bytes, i)) for skip in arrived]
    if stage:
        sent.append((stage - 1, costs.cotangent(stage, i)))
    return (pending if op == INPUT else 0) - freed, sent


def _cycle(
    rows: Rows,
    needs: Needs,
    stuck: Mapping[int, Action],
    done: Mapping[Action, float],
) -> str:
    """Who waits for whom: from one rank that stands still to where the chain closes."""
    rank_of = {action: rank for rank, row in enumerate(rows) for action in row}
    absent = []
    for rank, action in stuck.items():
        missing = [str(n) for n in needs(action) if n not in rank_of]
        absent += [
            f"rank {rank}: {action} waits for {n}, which nobody runs" for n in missing
        ]
    if absent:
        return "the schedule deadlocks: " + "; ".join(absent)
    chain: list[int] = []
    wait: dict[int, str] = {}
    rank = next(iter(stuck))
    while rank not in wait:
        action = stuck[rank]
        need = next(n for n in needs(action) if n not in done)
        owner = rank_of[need]
        after = "" if stuck[owner] == need else f" after {stuck[owner]}"
        wait[rank] = (
            f"rank {rank}: {action} waits for {need}, which rank {owner} runs{after}"
        )
        chain.append(rank)
        rank = owner
    cycle = chain[chain.index(rank) :]
    return "the schedule deadlocks: " + "; ".join(wait[r] for r in cycle)
