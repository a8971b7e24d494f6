"""The simulator: each rank runs its actions in order, each once its inputs are there.

    start[a] = max(end of the action before it on its rank,
                   max over d of (end[d] + delay[a, d]))       d: what a depends on
    end[a]   = start[a] + duration[a]

Actions are ints here, and their costs are looked up once, since a search simulates many
orders of the same actions.
"""

import dataclasses
import functools
import heapq
import itertools
import operator
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ._action import BACKWARD, FORWARD, INPUT, LOCAL_READS, OPS, WEIGHT, Action
from ._costs import Costs, Numbers, look_up
from ._schedule_data import ScheduleData

Rows = tuple[tuple[Action, ...], ...]
# The IDs of the actions of each rank, in order.
IdRows = list[list[int]]
# Ranks, and the bytes by which what each holds changes.
MemoryDeltas = list[tuple[int, float]]
# Stages, and the bytes that go from or to each: one number, or one per micro-batch.
Messages = list[tuple[int, Numbers]]
# The end of what did not run.
NEVER = -1.0


class Dependencies(NamedTuple):
    """One dependency of each action that has as many.

    Attributes:
      ids: the action that each action depends on, by result; -1 for none.
      delays: the time from the end of that action to its arrival.
    """

    ids: list[int]
    delays: list[float]


class ActionTables:
    """The costs, dependencies and bytes of every action of a schedule, by its ID.

    The ID of an action is ``(op_index * S + stage) * M + microbatch``, with S stages, M
    micro-batches and the index of its op in `OPS`. All lists below are by ID.

    Args:
      costs: the costs of each action.
      schedule: the schedule. Its rows are read only where several ranks take turns at a
        stage: the order of actions is an argument of `simulate`.

    Attributes:
      durations: the time of each action, with what it receives and sends.
      receive_times: the time for which the rank of an action receives before it
        computes; 0 where transfers overlap.
      send_times: the time for which it sends after it has computed, likewise.
      dependencies: the first dependency of each action, the second, ...
      exchange_times: the time that the exchange of its stage takes after an action.
      result_ids: the ID under which others depend on an action: its own; of a whole
        backward that of the input gradient.
      memory_deltas: the bytes that an action adds to ranks, one after the other.
      initial_bytes: the bytes of each rank (not by ID) before the first action.
    """

    def __init__(self, costs: Costs, schedule: ScheduleData) -> None:
        self.costs = costs
        self.schedule = schedule
        self.placement = schedule.placement
        self.rank_of = schedule.rank_of
        self.has_backwards = not schedule.forward_only
        self.num_ranks = schedule.num_ranks
        self.num_microbatches = schedule.num_microbatches
        self.num_stages = schedule.num_stages

        # (op, stage) -> what the op receives from other stages, and sends to them.
        incoming: dict[tuple[str, int], Messages] = defaultdict(list)
        outgoing: dict[tuple[str, int], Messages] = defaultdict(list)
        for source, target, num_bytes, cotangent_bytes in costs.links(self.num_stages):
            incoming[FORWARD, target].append((source, num_bytes))
            outgoing[FORWARD, source].append((target, num_bytes))
            for op in (BACKWARD, INPUT):
                incoming[op, source].append((target, cotangent_bytes))
                outgoing[op, target].append((source, cotangent_bytes))

        self.durations: list[float] = []
        self.receive_times: list[float] = []
        self.send_times: list[float] = []
        self.exchange_times: list[float] = []
        self.result_ids: list[int] = []
        self.memory_deltas: list[MemoryDeltas] = []
        self.dependencies: list[Dependencies] = []
        # If all micro-batches cost the same, only the first is looked up.
        is_uniform = costs.is_uniform and not schedule.replicas
        self._looked_up = range(1 if is_uniform else self.num_microbatches)
        num_copies = self.num_microbatches // len(self._looked_up)
        for op, stage in itertools.product(OPS, range(self.num_stages)):
            actions = [Action(op, stage, i) for i in self._looked_up]
            received = incoming[op, stage]
            sent = outgoing[op, stage]
            receive_times = [self._transfer_time(a, received) for a in actions]
            send_times = [self._transfer_time(a, sent) for a in actions]
            self.receive_times += receive_times * num_copies
            self.send_times += send_times * num_copies
            times = zip(actions, receive_times, send_times, strict=True)
            self.durations += [
                costs.of(action) + (receive_time + send_time)
                for action, receive_time, send_time in times
            ] * num_copies
            self.memory_deltas += [
                self._deltas(action, received, sent) for action in actions
            ] * num_copies
            exchange = 0.0 if op == FORWARD else look_up(costs.exchange, stage)
            self.exchange_times += [exchange] * self.num_microbatches
            first = self.first_id(INPUT if op == BACKWARD else op, stage)
            self.result_ids += range(first, first + self.num_microbatches)
            self._add_dependencies(op, stage, received, num_copies)
        self.initial_bytes = self._sum_initial_bytes()

    def first_id(self, op: str, stage: int) -> int:
        """The ID of an op of a stage on micro-batch 0; the other IDs follow."""
        return (OPS.index(op) * self.num_stages + stage) * self.num_microbatches

    def id_of(self, action: Action) -> int:
        """The ID of an action."""
        return self.first_id(action.op, action.stage) + action.microbatch

    def action(self, action_id: int) -> Action:
        """The action of an ID."""
        op_and_stage, microbatch = divmod(action_id, self.num_microbatches)
        op_index, stage = divmod(op_and_stage, self.num_stages)
        return Action(OPS[op_index], stage, microbatch)

    def stage(self, action_id: int) -> int:
        """The stage of an ID."""
        return action_id // self.num_microbatches % self.num_stages

    def to_ids(self, rows: Rows) -> IdRows:
        """The IDs of rows of actions."""
        return [[self.id_of(action) for action in row] for row in rows]

    def to_actions(self, rows: IdRows) -> Rows:
        """The actions of rows of IDs."""
        return tuple(tuple(map(self.action, row)) for row in rows)

    def _transfer_time(self, action: Action, messages: Messages) -> float:
        """The time for which transfers keep the rank of an action from computing.

        Args:
          action: the action.
          messages: the arrays that it receives from other stages, or sends to them.
        """
        if self.costs.overlap:
            return 0.0
        _, stage, microbatch = action
        rank_of = self.rank_of[microbatch]
        times = [
            self._time_between_ranks(look_up(num_bytes, microbatch))
            for other, num_bytes in messages
            if rank_of[other] != rank_of[stage]
        ]
        return sum(times) / 2

    def _time_between_ranks(self, num_bytes: float) -> float:
        """The time of a transfer."""
        return self.costs.latency + num_bytes / self.costs.bandwidth

    def _deltas(
        self, action: Action, received: Messages, sent: Messages
    ) -> MemoryDeltas:
        """The bytes that an action adds to ranks, one after the other.

        On its own rank it stores what it leaves and its outputs, and frees what it
        reads; then each output that goes to another rank moves there.
        """
        costs = self.costs
        op, stage, microbatch = action
        residual = look_up(costs.residual_bytes, stage, microbatch)
        pending = look_up(costs.pending_bytes, stage, microbatch)
        extra = look_up(costs.extra_bytes, stage, microbatch)

        if op == FORWARD:
            delta = look_up(costs.emitted_bytes, stage, microbatch)
            delta += residual if self.has_backwards else -extra
            if stage == 0:  # the input of the step
                delta -= look_up(costs.boundary_bytes, stage, microbatch)
        elif op == INPUT:
            delta = pending - residual - extra
        elif op == WEIGHT:
            delta = -pending
        else:
            delta = -residual - extra
        delta -= sum(look_up(num_bytes, microbatch) for _, num_bytes in received)
        delta += sum(look_up(num_bytes, microbatch) for _, num_bytes in sent)

        rank_of = self.rank_of[microbatch]
        rank = rank_of[stage]
        moved = defaultdict[int, float](float)  # rank -> bytes that go there
        for target, message_bytes in sent:
            num_bytes = look_up(message_bytes, microbatch)
            if rank_of[target] != rank and num_bytes:
                moved[rank_of[target]] += num_bytes
        if not moved:
            return [(rank, delta)]
        return [(rank, delta), *moved.items(), (rank, -sum(moved.values()))]

    def _add_dependencies(
        self, op: str, stage: int, received: Messages, num_copies: int
    ) -> None:
        """Adds what an op of a stage depends on: in its stage, then in other stages."""
        count = self.num_microbatches
        first = self.first_id(op, stage)

        # The op and stage of each dependency, and the bytes that it sends.
        sources: list[tuple[str, int, Numbers]] = []
        if op in LOCAL_READS:
            sources.append((LOCAL_READS[op], stage, 0))
        remote_op = FORWARD if op == FORWARD else INPUT
        sources += [(remote_op, source, num_bytes) for source, num_bytes in received]

        for column, (source_op, source, num_bytes) in enumerate(sources):
            if column == len(self.dependencies):
                total = len(OPS) * self.num_stages * count
                self.dependencies.append(Dependencies([-1] * total, [0.0] * total))
            ids, delays = self.dependencies[column]
            source_id = self.first_id(source_op, source)
            ids[first : first + count] = range(source_id, source_id + count)
            delays[first : first + count] = [
                self._time_between_ranks(look_up(num_bytes, i))
                if self.costs.overlap
                and self.rank_of[i][source] != self.rank_of[i][stage]
                else 0.0
                for i in self._looked_up
            ] * num_copies

    def _sum_initial_bytes(self) -> list[float]:
        """The bytes of each rank before the first action."""
        costs = self.costs
        live = [0.0] * self.num_ranks
        for stage in range(self.num_stages):
            for i in range(self.num_microbatches):
                rank = self.rank_of[i][stage]
                live[rank] += look_up(costs.extra_bytes, stage, i)
                if stage == 0:
                    live[rank] += look_up(costs.boundary_bytes, stage, i)
            stage_bytes = look_up(costs.parameter_bytes, stage)
            stage_bytes += look_up(costs.shared_bytes, stage)
            if self.has_backwards:
                stage_bytes += look_up(costs.accumulator_bytes, stage)
            for rank in self.schedule.ranks_of[stage]:
                live[rank] += stage_bytes
        return live

    def memory(self, order: Iterable[int]) -> Iterator[tuple[int, int, float]]:
        """Yields what ranks hold after each change, as actions run one by one.

        What an action reads is freed when it ends; what it sends to another rank is
        held by both until it has been sent, then by the receiver.

        Args:
          order: the IDs of all actions.

        Yields:
          An action, a rank whose bytes it changes, and how many it then holds.
        """
        live = [*self.initial_bytes]
        shared_bytes = self.costs.shared_bytes
        # (stage, rank) -> micro-batches that still read what they share.
        num_readers = Counter[tuple[int, int]]()
        if shared_bytes:
            for i in range(self.num_microbatches):
                num_readers.update(enumerate(self.rank_of[i]))

        # The last reader is the backward, or its first half; in inference the forward.
        first_backward = self.first_id(BACKWARD, 0)
        first_weight = self.first_id(WEIGHT, 0)
        for action_id in order:
            deltas = self.memory_deltas[action_id]
            if shared_bytes and (
                first_backward <= action_id < first_weight or not self.has_backwards
            ):
                stage = self.stage(action_id)
                rank, delta = deltas[0]
                num_readers[stage, rank] -= 1
                if not num_readers[stage, rank]:
                    delta -= look_up(shared_bytes, stage)
                    deltas = [(rank, delta), *deltas[1:]]
            for rank, delta in deltas:
                live[rank] += delta
                yield action_id, rank, live[rank]

    @functools.cached_property
    def dispatch_tables(self) -> "ActionTables":
        """The same actions at the times that decide the order of dispatch."""
        return ActionTables(Costs(), self.schedule)

    def simulate(self, rows: IdRows) -> "SimulatedOrder":
        """Runs each rank in its order, as far as ranks do not wait for each other."""
        dependencies = self.dependencies
        result_ids = self.result_ids
        durations = self.durations
        # By result; the last one is what ID -1 reads: no dependency.
        end = [NEVER] * len(durations) + [0.0]
        free_at = [0.0] * len(rows)
        next_position = [0] * len(rows)
        order: list[int] = []
        starts: list[float] = []

        # result -> ranks that wait for it.
        waiting: dict[int, list[int]] = {}
        # Ranks are visited in rounds, in their order. One that waits for a result is
        # visited again once it is there: in this round if its turn is still to come.
        this_round = list(range(len(rows)))
        while this_round:
            next_round: list[int] = []
            while this_round:
                rank = heapq.heappop(this_round)
                row = rows[rank]
                now = free_at[rank]
                for position in range(next_position[rank], len(row)):
                    action_id = row[position]
                    start = now
                    for ids, delays in dependencies:
                        arrival = end[ids[action_id]]
                        if arrival < 0:
                            waiting.setdefault(ids[action_id], []).append(rank)
                            break
                        arrival += delays[action_id]
                        if arrival > start:
                            start = arrival
                    else:
                        result_id = result_ids[action_id]
                        end[result_id] = stop = start + durations[action_id]
                        # An action that takes no time, such as a forward that is fused
                        # into its backward, does not block the rank.
                        if stop > start:
                            now = stop
                        order.append(action_id)
                        starts.append(start)
                        next_position[rank] = position + 1
                        for waiter in waiting.pop(result_id, ()):
                            heapq.heappush(
                                this_round if waiter > rank else next_round, waiter
                            )
                        continue
                    break
                free_at[rank] = now
            this_round = next_round
        return SimulatedOrder(
            tables=self, rows=rows, order=order, starts=starts, end=end
        )


@dataclasses.dataclass(eq=False)
class SimulatedOrder:
    """An order of actions, simulated.

    Attributes:
      tables: the tables with which it was simulated.
      rows: the order of each rank.
      order: all actions that ran, in an order of execution.
      starts: the start of each of them.
      end: the end of each result, by ID; below 0 for what did not run.
    """

    tables: ActionTables
    rows: IdRows
    order: list[int]
    starts: list[float]
    end: list[float]

    def __post_init__(self) -> None:
        end = self.end
        result_ids = self.tables.result_ids
        self.ends = [end[result_ids[action_id]] for action_id in self.order]
        exchange_times = map(self.tables.exchange_times.__getitem__, self.order)
        step_ends = map(operator.add, self.ends, exchange_times)
        self.makespan = max(step_ends, default=0.0)

    @property
    def is_complete(self) -> bool:
        """True if all actions ran."""
        return len(self.order) == sum(map(len, self.rows))

    @functools.cached_property
    def peak_bytes(self) -> list[float]:
        """The most bytes that each rank holds, as `Timeline.peak_bytes`."""
        tables = self.tables
        peaks = [*tables.initial_bytes]
        dispatched = tables.dispatch_tables.simulate(self.rows)
        for _, rank, live in tables.memory(dispatched.sort_by_end()):
            if live > peaks[rank]:
                peaks[rank] = live
        return peaks

    def fits(self, max_bytes: Sequence[float] | None) -> bool:
        """True if no rank holds more than its limit; ``None``: no limit."""
        if max_bytes is None:
            return True
        pairs = zip(self.peak_bytes, max_bytes, strict=True)
        return all(peak <= limit for peak, limit in pairs)

    @property
    def has_whole_backwards(self) -> bool:
        """True if some backwards are whole."""
        tables = self.tables
        backwards = range(tables.first_id(BACKWARD, 0), tables.first_id(INPUT, 0))
        return any(action_id in backwards for action_id in self.order)

    def sort_by_end(self) -> Iterable[int]:
        """The IDs of all actions in the order in which they end."""
        indices = sorted(range(len(self.order)), key=self.ends.__getitem__)
        return map(self.order.__getitem__, indices)
