"""What a candidate for a plan would take: seconds of a step, bytes of each device."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..schedules import Action, Costs, Schedule, Timeline
from ..schedules._action import BACKWARD, FORWARD, INPUT, WEIGHT
from ..schedules._formats import format_count
from ._fingerprint import measured_on_cpu
from ._plan import Memory, Plan, named
from ._profile import Profile
from ._replicate import ring
from ._space import Hardware, SearchSpace

# Where devices share cores, halves of backwards have to be faster by so much.
_HALVES = 1.05


@dataclass(frozen=True)
class Choice:
    """One way to run a model.

    Attributes:
      balance: layers of each stage.
      remat: which residuals each stage stores.
      schedule: who runs what when.
      data: on how many devices of each rank the examples of a micro-batch are spread.
    """

    balance: tuple[int, ...]
    remat: tuple[str, ...]
    schedule: Schedule
    data: int

    @property
    def num_devices(self) -> int:
        """On how many devices it runs."""
        return self.schedule.num_ranks * self.data

    def __str__(self) -> str:
        modes = dict.fromkeys(self.remat)
        return (
            f"{self.schedule.name}, balance {list(self.balance)}, "
            f"{format_count(self.schedule.num_microbatches, 'micro-batch')}, "
            f"remat {' and '.join(modes)}"
            + (f", {named(self.schedule, self.data)}" if self.data > 1 else "")
        )


@dataclass(frozen=True)
class Candidate(Choice):
    """One way to run a model, with what it would take.

    Attributes:
      profile: of its layers, from which that was predicted.
      timeline: the schedule with the costs of these stages.
      memory: of each rank at its peak.
      host: seconds in which one thread has all programs and transfers of a step run.
      plan: what is known of it once it was lowered.
    """

    profile: Profile
    timeline: Timeline
    memory: tuple[Memory, ...]
    host: float
    plan: Plan | None = None

    @property
    def costs(self) -> Costs:
        """Those of its stages, as they run."""
        assert self.timeline.costs is not None
        return self.timeline.costs

    @property
    def seconds(self) -> float:
        """Of a step: one thread has all of it run, on all devices."""
        return max(self.timeline.makespan, self.host)

    @property
    def most_bytes(self) -> int:
        """Of the device that needs most."""
        return max(memory.total for memory in self.memory)

    def fits(self, hardware: Hardware) -> bool:
        """Whether no device needs more than it has."""
        limit = hardware.memory_limit
        return limit is None or self.most_bytes <= limit

    def objective(self, hardware: Hardware) -> tuple[float, ...]:
        """What is less is better."""
        if not self.fits(hardware):
            return 1, self.most_bytes, self.seconds
        # Of two as fast, the smaller.
        return 0, self.seconds * self.handicap, self.most_bytes

    @property
    def handicap(self) -> float:
        """By how much a step that is predicted to be as fast as another one is slower.

        Devices that share cores have them to themselves while others wait, and what
        fills a bubble takes them away: with halves of backwards a step is not as fast
        as predicted (`benchmarks/README.md`).
        """
        if not measured_on_cpu(self.profile.fingerprint):
            return 1.0
        actions = itertools.chain(*self.schedule.rows)
        return _HALVES if any(action.op == WEIGHT for action in actions) else 1.0


def stage_costs(space: SearchSpace, way: Choice) -> Costs:
    """What stages cost, with the exchange of their gradients where shards make some.

    A rank exchanges those of all its stages, one after the other, when it has run all:
    that is put down to the stage that it runs last.
    """
    hardware, schedule, data = space.hardware, way.schedule, way.data
    bandwidth, latency = hardware.bandwidth, hardware.latency
    link = {"bandwidth": bandwidth, "latency": latency}
    costs = space.profile(schedule, data).costs(way.balance, remat=way.remat, **link)
    if data == 1:
        return costs
    exchange = [0.0 for _ in way.balance]
    last = [row[-1].stage for row in schedule.rows]
    for rank, size in zip(schedule.placement, costs.accumulator_bytes, strict=True):
        exchange[last[rank]] += ring(size, data, bandwidth or math.inf, latency)
    return dataclasses.replace(costs, exchange=exchange)


def evaluate(space: SearchSpace, way: Choice) -> Candidate:
    """Runs a candidate on paper.

    Args:
      space: what it is chosen from.
      way: how it runs.
    """
    balance, remat, schedule, data = way.balance, way.remat, way.schedule, way.data
    profile = space.profile(schedule, data)
    action, exchanged = profile.action_seconds, len(balance) if data > 1 else 0
    costs = stage_costs(space, way)
    costs = fused_costs(costs, schedule, remat[-1] == "full", action)
    timeline = schedule.simulate(costs)
    memory = _memory(space, way, timeline, costs)
    host = action * (_dispatched(schedule, costs) + exchanged)
    return Candidate(balance, remat, schedule, data, profile, timeline, memory, host)


def transfers(costs: Costs, placement: Sequence[int]) -> list[float]:
    """The bytes of each transfer of one micro-batch between ranks, there and back."""
    sizes: list[float] = []
    for link in costs.links(len(placement)):
        if placement[link.source] != placement[link.target]:
            sizes += link.bytes, link.cotangent_bytes
    return sizes


def _dispatched(schedule: Schedule, costs: Costs) -> int:
    """How many programs and transfers a step has."""
    count = sum(costs.of(action) > 0 for row in schedule.rows for action in row)
    sizes = transfers(costs, schedule.placement)
    moved = len(sizes[::2]) + sum(size > 0 for size in sizes[1::2])
    return count + moved * schedule.num_microbatches


def fused_costs(
    costs: Costs, schedule: Schedule, keeps_nothing: bool, action_seconds: float = 0.0
) -> Costs:
    """The costs of what a step runs, where that is not action by action.

    A forward of the last stage that its own backward follows is a part of it: nothing
    is stored between or computed twice. The first stage has no gradient of its input:
    its W does all that a backward does.

    Args:
      costs: one number per stage.
      schedule: who runs what when.
      keeps_nothing: whether the last stage keeps its input only, so that all of its
        forwards run with their backwards.
      action_seconds: of each action, whatever it computes; what runs as one program
        takes it once.

    Returns:
      Costs with one number per micro-batch for the last stage.
    """
    last, count = schedule.num_stages - 1, schedule.num_microbatches
    row = schedule.rows[schedule.placement[last]]
    joined = {
        action.microbatch
        for action, after in itertools.pairwise(row)
        if action == Action(FORWARD, last, action.microbatch)
        and after[1:] == action[1:]
    }
    if keeps_nothing:
        joined = set(range(count))
    inputs = [costs.of(Action(INPUT, s, 0)) for s in range(last + 1)]
    weights = [costs.of(Action(WEIGHT, s, 0)) for s in range(last + 1)]
    whole, half = costs.of(Action(BACKWARD, last, 0)), inputs[last]
    if not keeps_nothing:
        more = max(costs.forward[last] - action_seconds, 0.0)
        whole, half = whole + more, half + more
    weights[0] = max(inputs[0] + weights[0] - action_seconds, 0.0)
    inputs[0] = 0.0

    def with_last(numbers: Any, other: float) -> list[Any]:
        own = [other if m in joined else numbers[last] for m in range(count)]
        return [*numbers[:last], own]

    return dataclasses.replace(
        costs,
        forward=with_last(costs.forward, 0.0),
        backward=with_last(costs.backward, whole),
        input_grad=with_last(inputs, half if last else 0.0),
        weight_grad=with_last(weights, weights[last] if last else whole),
        residual_bytes=with_last(costs.residual_bytes, costs.boundary_bytes[last]),
    )


def _memory(
    space: SearchSpace, way: Choice, timeline: Timeline, costs: Costs
) -> tuple[Memory, ...]:
    """The parts of the peak of each rank, on each of its devices."""
    profile = space.profile(way.schedule, way.data)
    stages = list(itertools.pairwise([0, *itertools.accumulate(way.balance)]))
    workspace = [_workspace(profile, *stage) for stage in stages]
    for i, mode in enumerate(way.remat):
        # One program computes such a stage both ways: what it stores, it stores itself.
        if mode == "full" or (i == len(stages) - 1 and 0.0 in costs.forward[-1]):
            residuals = profile.residuals_of[profile.pending_mode(mode)]
            workspace[i] += int(residuals[stages[i]])
    memory = []
    for rank, peak in enumerate(timeline.peak_bytes):
        own = [i for i, at in enumerate(timeline.placement) if at == rank]
        layers = [at for i in own for at in range(*stages[i])]
        optimizer = sum(space.optimizer_bytes[at] for at in layers)
        whole = (profile.layers[at] for at in layers)
        lasting = sum(layer.param_bytes + layer.state_bytes for layer in whole)
        sums = [costs.accumulator_bytes[i] for i in own]
        activations = int(peak) - lasting - sum(sums)
        # When no activations are left, what shards add up stands beside their sums,
        # stage by stage.
        added = max(sums, default=0) - activations if way.data > 1 else 0
        each = Memory(
            parameters=lasting - optimizer,
            gradients=sum(sums),
            optimizer=optimizer,
            activations=activations,
            workspace=max(added, *(workspace[i] for i in own)),
        )
        memory.append(each)
    return tuple(memory)


def _workspace(profile: Profile, first: int, stop: int) -> int:
    """What the largest program of a stage needs, at the layer that needs most.

    Besides its own there is what passes into the layer and out of it within the stage,
    and the skip connections within the stage that are open there.
    """
    change = [0] * (stop - first + 1)
    for skip in profile.skips:
        if first <= skip.source and skip.target < stop:
            change[skip.source - first] += skip.bytes
            change[skip.target - first + 1] -= skip.bytes
    return max(
        (profile.layers[i].workspace_bytes or 0)
        + (profile.boundary_bytes(i) if i > first else 0)
        + (profile.boundary_bytes(i + 1) if i + 1 < stop else 0)
        + skips
        for i, skips in zip(
            range(first, stop), itertools.accumulate(change), strict=False
        )
    )
