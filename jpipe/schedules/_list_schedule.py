"""List scheduling: each rank, once free, starts the most urgent action that is ready.

Time passes from event to event. At each, the ranks that may have something new to do
look at the next action of each op of each of their stages, and start the one of lowest
priority number that has all inputs and fits into memory.

References:
  Graham, Bounds on multiprocessing timing anomalies (1969).
"""

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Sequence

from ._action import BACKWARD, FORWARD, INPUT, WEIGHT
from ._action_tables import ActionTables, IdRows
from ._placement import group_by_rank


def list_schedule(
    tables: ActionTables,
    priority: Sequence[float],
    max_bytes: Sequence[float] | None,
    *,
    has_whole_backwards: bool,
    reserves: bool,
) -> IdRows | None:
    """Orders all actions of a training step.

    Args:
      tables: the costs of the actions.
      priority: the priority of each action, by ID; a rank starts the lowest first.
      max_bytes: the most that each rank may hold; ``None``: no limit.
      has_whole_backwards: True leaves backwards whole, False splits them.
      reserves: True reserves memory for gradients that are still to arrive. Without,
        more fits, but ranks may come to wait for each other.

    Returns:
      The order of each rank; ``None`` if memory lets no rank go on.
    """
    reserved = None
    if max_bytes is not None:
        reserved = _reserve_bytes(tables, for_gradients=reserves)
    ops = (FORWARD, BACKWARD) if has_whole_backwards else (FORWARD, INPUT, WEIGHT)
    scheduler = _ListScheduler(tables, priority, ops, max_bytes, reserved)
    return scheduler.run()


class _ListScheduler:
    """The state of all ranks at some time.

    Args:
      tables: the costs of the actions.
      priority: the priority of each action, by ID.
      ops: the ops that stages run.
      max_bytes: the most that each rank may hold; ``None``: no limit.
      reserved: for each stage, the bytes of each rank that its forward may not use.
    """

    def __init__(
        self,
        tables: ActionTables,
        priority: Sequence[float],
        ops: Sequence[str],
        max_bytes: Sequence[float] | None,
        reserved: Sequence[Sequence[float]] | None,
    ) -> None:
        self._tables = tables
        self._priority = priority
        self._max_bytes = max_bytes
        self._reserved = reserved
        self._stages = group_by_rank(tables.placement, tables.num_ranks)
        self._op_index = {op: index for index, op in enumerate(ops)}
        # stage -> the next action of each op, or -1: micro-batches run in order.
        self._next = [
            [tables.first_id(op, stage) for op in ops]
            for stage in range(tables.num_stages)
        ]
        # By ID, when all inputs are there; one more for ID -1.
        self._arrival = [math.inf] * (len(tables.durations) + 1)
        self._end = [math.inf] * len(tables.durations) + [0.0]
        # result -> the actions that depend on it, both on micro-batch 0.
        self._dependents: dict[int, list[int]] = defaultdict(list)
        for first in itertools.chain.from_iterable(self._next):
            results = [ids[first] for ids, _ in tables.dependencies if ids[first] >= 0]
            for result_id in results:
                self._dependents[result_id].append(first)
            if not results:
                for i in range(tables.num_microbatches):
                    self._arrival[first + i] = 0.0
        self._rows: IdRows = [[] for _ in range(tables.num_ranks)]
        self._busy_until = [0.0] * tables.num_ranks
        self._live = [*tables.initial_bytes]
        # Events: a time, a rank that looks for work, and the action that ends there, or
        # -1 if inputs arrive.
        self._events = [(0.0, rank, -1) for rank in range(tables.num_ranks)]
        # Ranks that had too little memory for an action.
        self._blocked: set[int] = set()

    def run(self) -> IdRows | None:
        """Starts actions until nothing happens; ``None`` if some did not start."""
        events = self._events
        while events:
            now = events[0][0]
            awake = set[int]()
            while events and events[0][0] == now:
                _, rank, ended_id = heapq.heappop(events)
                awake.add(rank)
                if ended_id >= 0:
                    self._free(ended_id)
                    awake |= self._blocked
                    self._blocked.clear()
            for rank in sorted(awake):
                if self._busy_until[rank] <= now:
                    action_id = self._choose(rank, now)
                    if action_id is not None:
                        self._start(action_id, rank, now)
        is_done = max(itertools.chain.from_iterable(self._next)) < 0
        return self._rows if is_done else None

    def _choose(self, rank: int, now: float) -> int | None:
        """The action that a rank starts now."""
        priority = self._priority
        best: int | None = None
        for stage in self._stages[rank]:
            for action_id in self._next[stage]:
                if (
                    self._arrival[action_id] <= now
                    and (best is None or priority[action_id] < priority[best])
                    and self._fits(action_id, rank)
                ):
                    best = action_id
        return best

    def _fits(self, action_id: int, rank: int) -> bool:
        """True if memory lets an action start; if not, its rank is tried again."""
        if self._max_bytes is None or self._reserved is None:
            return True
        tables = self._tables
        is_forward = action_id < tables.first_id(BACKWARD, 0)
        for target, delta in tables.memory_deltas[action_id]:
            needed = self._live[target] + delta
            if is_forward:
                needed += self._reserved[tables.stage(action_id)][target]
            if delta > 0 and needed > self._max_bytes[target]:
                self._blocked.add(rank)
                return False
        return True

    def _start(self, action_id: int, rank: int, now: float) -> None:
        """Starts an action; notes when what depends on it can start."""
        tables = self._tables
        end = self._end
        result_id = tables.result_ids[action_id]
        stop = now + tables.durations[action_id]
        end[result_id] = stop
        self._busy_until[rank] = stop
        self._rows[rank].append(action_id)
        self._allocate(action_id)
        heapq.heappush(self._events, (stop, rank, action_id))

        op, stage, microbatch = tables.action(action_id)
        is_last = microbatch + 1 == tables.num_microbatches
        self._next[stage][self._op_index[op]] = -1 if is_last else action_id + 1

        for first in self._dependents[result_id - microbatch]:
            dependent = first + microbatch
            arrival = 0.0
            for ids, delays in tables.dependencies:
                arrival = max(arrival, end[ids[dependent]] + delays[dependent])
            self._arrival[dependent] = arrival
            target = tables.placement[tables.stage(dependent)]
            if target != rank and arrival < math.inf:
                heapq.heappush(self._events, (arrival, target, -1))

    def _allocate(self, action_id: int) -> None:
        """Takes the bytes that an action adds, when it starts."""
        for rank, delta in self._tables.memory_deltas[action_id]:
            if delta > 0:
                self._live[rank] += delta

    def _free(self, action_id: int) -> None:
        """Frees the bytes that an action removes, when it ends."""
        for rank, delta in self._tables.memory_deltas[action_id]:
            if delta < 0:
                self._live[rank] += delta


def _reserve_bytes(tables: ActionTables, *, for_gradients: bool) -> list[list[float]]:
    """The bytes that a forward leaves free, so that what has started can end.

    Returns:
      For each stage the bytes of each rank that its forward may not use: those that one
      micro-batch needs in the stages after it and, with ``for_gradients``, the largest
      of those that the gradients and second halves to come need.
    """
    ranks = range(tables.num_ranks)
    stages = range(tables.num_stages)

    def max_added(op: str, stage: int) -> list[float]:
        """The most that an op of a stage adds to each rank, over micro-batches."""
        added = [0.0 for _ in ranks]
        first = tables.first_id(op, stage)
        for i in range(tables.num_microbatches):
            for rank, delta in tables.memory_deltas[first + i]:
                added[rank] = max(added[rank], delta)
        return added

    needed = [0.0 for _ in ranks]
    if for_gradients:
        for stage in stages:
            needed = list(map(max, needed, max_added(INPUT, stage)))

    reserved: list[list[float]] = []  # from the last stage
    for stage in reversed(stages):
        reserved.append(needed)
        added = max_added(FORWARD, stage)
        needed = [a + b for a, b in zip(needed, added, strict=True)]
    return reserved[::-1]
