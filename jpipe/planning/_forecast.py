"""Forecasts a candidate for a plan: seconds of a step, bytes of each device.

    seconds = max(makespan of the simulated schedule, seconds of the host thread)

The host thread dispatches all programs and transfers of a step, one after another. The
simulated costs are those of the programs that run: a forward of the last stage is fused
with the backward that follows it, and the first stage has no input gradient.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..schedules import Action, Costs, Schedule, Skip, Timeline
from ..schedules._action import BACKWARD, INPUT, WEIGHT
from ..schedules._costs import TIME_FIELDS
from ..schedules._placement import group_by_rank
from ..schedules._schedule import simulate_rows
from ._fused import fused_costs
from ._layer_profile import Link
from ._mode_names import stores_only_inputs
from ._plan_record import Memory, Plan
from ._profile_record import costs_of_stages
from ._rank_bytes import ByteCounter
from ._space import Choice, Hardware, SearchSpace


@dataclass(frozen=True)
class Candidate:
    """A choice and its forecast.

    Attributes:
      choice: the choice.
      costs: the costs of the stages, as they run.
      makespan: the seconds of the simulated schedule.
      memory: the bytes of each rank at its peak, on each of its devices.
      host_seconds: seconds in which one thread dispatches all programs and transfers of
        a step.
      plan: the description of the step, once it was lowered.
    """

    choice: Choice
    costs: Costs
    makespan: float
    memory: tuple[Memory, ...]
    host_seconds: float
    plan: Plan | None = None

    @functools.cached_property
    def timeline(self) -> Timeline:
        """The simulated schedule, made for a candidate of which more is asked."""
        return self.choice.schedule.simulate(self.costs)

    @property
    def seconds(self) -> float:
        """The seconds of a step: those of the devices or of the host."""
        return max(self.makespan, self.host_seconds)

    @property
    def max_bytes(self) -> int:
        """The bytes of the device that needs most."""
        return max(memory.total for memory in self.memory)

    def fits(self, hardware: Hardware) -> bool:
        """True if no device needs more than it has."""
        limit = hardware.memory_limit
        return limit is None or self.max_bytes <= limit

    def objective(self, hardware: Hardware) -> tuple[float, ...]:
        """A key for sorting: candidates that fit first, the fastest of them first."""
        if not self.fits(hardware):
            return 1, self.max_bytes, self.seconds
        # Of two that are as fast, the smaller comes first.
        return 0, self.seconds, self.max_bytes

    def is_same_run(self, other: "Candidate") -> bool:
        """True if both differ at most in remat modes and names."""
        choice = self.choice
        other_choice = other.choice
        has_same_stages = (
            choice.num_shards == other_choice.num_shards
            and choice.balance == other_choice.balance
        )
        if not has_same_stages:
            return False
        return _executed_rows(choice.schedule) == _executed_rows(other_choice.schedule)


def _executed_rows(schedule: Schedule) -> list[list[Action]]:
    """The rows without halves of the first stage: its W is all of its backward."""
    rows = []
    for row in schedule.rows:
        executed = []
        for action in row:
            if action.stage == 0 and action.op == INPUT:
                continue
            if action.stage == 0 and action.op == WEIGHT:
                action = action._replace(op=BACKWARD)
            executed.append(action)
        rows.append(executed)
    return rows


def stage_costs(space: SearchSpace, choice: Choice) -> Costs:
    """The costs of stages, with the exchange of their gradients if shards make some.

    A rank exchanges the gradients of all its stages, one after the other, when it has
    run all: that counts for the stage that it runs last.
    """
    schedule = choice.schedule
    link = space.hardware.link
    profile = space.profile(schedule, choice.num_shards)
    costs = profile.costs(
        choice.balance,
        remat=choice.remat,
        bandwidth=link.bandwidth,
        latency=link.latency,
        overlap=link.overlap,
    )
    slowdown = space.slowdowns.predict(choice.step_kind)
    if slowdown != 1:
        times = {
            name: [slowdown * seconds for seconds in getattr(costs, name)]
            for name in TIME_FIELDS.values()
        }
        costs = dataclasses.replace(costs, **times)
    if choice.num_shards == 1:
        return costs

    exchange = [0.0] * schedule.num_stages
    # A schedule of the user's may leave a rank idle.
    last_stages = {rank: row[-1].stage for rank, row in enumerate(schedule.rows) if row}
    for rank, num_bytes in zip(
        schedule.placement, costs.accumulator_bytes, strict=True
    ):
        exchange[last_stages[rank]] += ring_seconds(num_bytes, choice.num_shards, link)
    return dataclasses.replace(costs, exchange=exchange)


def ring_seconds(num_bytes: float, num_shards: int, link: Link) -> float:
    """The time in which a ring of devices adds up gradients of so many bytes."""
    hops = 2 * (num_shards - 1)
    return hops * link.seconds(num_bytes / num_shards)


def unscheduled_costs(space: SearchSpace, choice: Choice) -> Costs:
    """The costs of stages under any schedule, as far as they are the same under all.

    Under remat mode ``"full"`` all forwards of the last stage run in their backwards.
    In other modes only those do that a schedule puts right before them.
    """
    costs = stage_costs(space, choice)
    if not stores_only_inputs(choice.remat[-1]):
        return costs
    profile = space.profile(choice.schedule, choice.num_shards)
    return fused_costs(
        costs,
        choice.schedule,
        is_last_recomputed=True,
        action_seconds=profile.action_seconds,
    )


def residual_budgets(space: SearchSpace, choice: Choice) -> list[float] | None:
    """The bytes that the workspace of each rank leaves; ``None`` without a limit."""
    limit = space.hardware.memory_limit
    if limit is None:
        return None
    limit -= space.byte_errors.predict(choice.schedule, choice.num_shards)
    counter = _make_byte_counter(space, choice)
    return [
        limit - float(counter.count_workspace(rank, part.spans, part.modes))
        for rank, part in enumerate(_list_rank_parts(choice))
    ]


def evaluate(space: SearchSpace, choice: Choice) -> Candidate:
    """Forecasts a choice: simulates its schedule and counts its bytes.

    Args:
      space: the choices, with profiles and hardware.
      choice: the choice.
    """
    schedule = choice.schedule
    profile = space.profile(schedule, choice.num_shards)
    costs = fused_costs(
        stage_costs(space, choice),
        schedule,
        is_last_recomputed=stores_only_inputs(choice.remat[-1]),
        action_seconds=profile.action_seconds,
    )
    simulated = simulate_rows(schedule, costs)
    num_exchanges = schedule.num_stages if choice.num_shards > 1 else 0
    num_dispatched = _count_dispatched(schedule, costs) + num_exchanges
    return Candidate(
        choice=choice,
        costs=costs,
        makespan=simulated.makespan,
        memory=_count_memory(space, choice, costs.skips),
        host_seconds=profile.action_seconds * num_dispatched,
    )


def rank_transfers(costs: Costs, placement: Sequence[int]) -> list[Skip]:
    """The transfers of one micro-batch between ranks, and back of their gradients."""
    return [
        transfer
        for transfer in costs.links(len(placement))
        if placement[transfer.source] != placement[transfer.target]
    ]


def _count_dispatched(schedule: Schedule, costs: Costs) -> int:
    """The number of programs and transfers in a step."""
    actions = itertools.chain(*schedule.rows)
    num_programs = sum(costs.of(action) > 0 for action in actions)
    transfers = rank_transfers(costs, schedule.placement)
    num_returned = sum(transfer.cotangent_bytes > 0 for transfer in transfers)
    num_transfers = (len(transfers) + num_returned) * schedule.num_microbatches
    return num_programs + num_transfers


class _RankPart(NamedTuple):
    """The stages of one rank.

    Attributes:
      spans: where each of them begins and ends.
      modes: their remat modes.
    """

    spans: list[tuple[int, int]]
    modes: list[str]


def _list_rank_parts(choice: Choice) -> list[_RankPart]:
    """The stages of each rank."""
    ends = [0, *itertools.accumulate(choice.balance)]
    spans = list(itertools.pairwise(ends))
    schedule = choice.schedule
    return [
        _RankPart(
            spans=[spans[stage] for stage in stages],
            modes=[choice.remat[stage] for stage in stages],
        )
        for stages in group_by_rank(schedule.placement, schedule.num_ranks)
    ]


def _make_byte_counter(space: SearchSpace, choice: Choice) -> ByteCounter:
    """Counts what a choice holds."""
    profile = space.profile(choice.schedule, choice.num_shards)
    return ByteCounter(
        costs_of_stages(profile), choice.schedule, num_shards=choice.num_shards
    )


def _count_memory(
    space: SearchSpace, choice: Choice, skips: Sequence[Skip]
) -> tuple[Memory, ...]:
    """The parts of the peak of each rank, on each of its devices."""
    layers = space.profile(choice.schedule, choice.num_shards).layers
    counter = _make_byte_counter(space, choice)
    lacking = space.byte_errors.predict(choice.schedule, choice.num_shards)
    memory: list[Memory] = []
    for rank, part in enumerate(_list_rank_parts(choice)):
        counted = counter.count(rank, part.spans, part.modes, skips)
        owned = list(itertools.chain.from_iterable(range(*x) for x in part.spans))
        # The state of a layer has the optimizer's among it.
        owned_bytes = sum(layers[x].param_bytes + layers[x].state_bytes for x in owned)
        optimizer_bytes = sum(space.optimizer_bytes[x] for x in owned)
        # Copies of parameters that another stage owns are there for a step.
        copied_bytes = int(counted.static) - owned_bytes
        rank_memory = Memory(
            parameters=owned_bytes - optimizer_bytes,
            gradients=int(counted.gradients),
            optimizer=optimizer_bytes,
            activations=int(counted.activations) + copied_bytes,
            workspace=int(counted.workspace) + lacking,
        )
        memory.append(rank_memory)
    return tuple(memory)
