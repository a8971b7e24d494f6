"""Forecasts a candidate for a plan: seconds of a step, bytes of each device.

    seconds = max(makespan of the simulated schedule, seconds of the host thread)

The host thread dispatches all programs and transfers of a step, one after another. The
simulated costs are those of the programs that run: a forward of the last stage is fused
with the backward that follows it, and the first stage has no input gradient.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..schedules import Action, Costs, Schedule, Skip, Timeline
from ..schedules._action import BACKWARD, FORWARD, INPUT, WEIGHT
from ._mode_names import stores_only_inputs
from ._origin import is_measured_on_cpu
from ._plan import Memory, Plan
from ._profile import Profile
from ._replicate import ring_seconds
from ._space import Choice, Hardware, SearchSpace

# A step with halves of backwards counts so many times its seconds where devices share
# cores.
_HALVES_HANDICAP = 1.05


@dataclass(frozen=True)
class Candidate:
    """A choice and its forecast.

    Attributes:
      choice: the choice.
      profile: the profile of the layers, from which all of this was predicted.
      timeline: the schedule, simulated with the costs of the stages.
      memory: the bytes of each rank at its peak, on each of its devices.
      host_seconds: seconds in which one thread dispatches all programs and transfers of
        a step.
      plan: the description of the step, once it was lowered.
    """

    choice: Choice
    profile: Profile
    timeline: Timeline
    memory: tuple[Memory, ...]
    host_seconds: float
    plan: Plan | None = None

    @property
    def costs(self) -> Costs:
        """The costs of the stages, as they run."""
        assert self.timeline.costs is not None
        return self.timeline.costs

    @property
    def seconds(self) -> float:
        """The seconds of a step: those of the devices or of the host."""
        return max(self.timeline.makespan, self.host_seconds)

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
        return 0, self.seconds * self.handicap, self.max_bytes

    @property
    def handicap(self) -> float:
        """A factor by which a step with halves of backwards counts as slower on a CPU.

        Devices that share cores have them to themselves while others wait, and an
        action that fills a bubble takes them away: with halves of backwards a step is
        not as fast as predicted (`docs/performance.md`).
        """
        if not is_measured_on_cpu(self.profile.origin):
            return 1.0
        actions = itertools.chain(*self.choice.schedule.rows)
        has_halves = any(action.op == WEIGHT for action in actions)
        return _HALVES_HANDICAP if has_halves else 1.0


def stage_costs(space: SearchSpace, choice: Choice) -> Costs:
    """The costs of stages, with the exchange of their gradients if shards make some.

    A rank exchanges the gradients of all its stages, one after the other, when it has
    run all: that counts for the stage that it runs last.
    """
    schedule = choice.schedule
    bandwidth = space.hardware.bandwidth
    latency = space.hardware.latency
    profile = space.profile(schedule, choice.num_shards)
    costs = profile.costs(
        choice.balance, remat=choice.remat, bandwidth=bandwidth, latency=latency
    )
    if choice.num_shards == 1:
        return costs

    exchange_bandwidth = math.inf if bandwidth is None else bandwidth
    exchange = [0.0] * schedule.num_stages
    last_stages = [row[-1].stage for row in schedule.rows]
    for rank, num_bytes in zip(
        schedule.placement, costs.accumulator_bytes, strict=True
    ):
        seconds = ring_seconds(
            num_bytes, choice.num_shards, exchange_bandwidth, latency
        )
        exchange[last_stages[rank]] += seconds
    return dataclasses.replace(costs, exchange=exchange)


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
    timeline = schedule.simulate(costs)
    num_exchanges = schedule.num_stages if choice.num_shards > 1 else 0
    num_dispatched = _count_dispatched(schedule, costs) + num_exchanges
    return Candidate(
        choice=choice,
        profile=profile,
        timeline=timeline,
        memory=_rank_memory(space, choice, timeline=timeline, costs=costs),
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


def fused_costs(
    costs: Costs,
    schedule: Schedule,
    *,
    is_last_recomputed: bool,
    action_seconds: float = 0.0,
) -> Costs:
    """The costs of the programs that a step runs, where these are not its actions.

    A forward of the last stage that its own backward follows is fused with it: nothing
    is stored between them or computed twice. The first stage has no gradient of its
    input: its W does all that a backward does.

    Args:
      costs: the costs of actions, one number per stage.
      schedule: the actions of each rank, in order.
      is_last_recomputed: True if the last stage stores only its input, so that all of
        its forwards run in their backwards.
      action_seconds: seconds of each action whatever it computes; a program that does
        two actions takes them once.

    Returns:
      Costs with one number per micro-batch for the last stage.
    """
    stages = range(schedule.num_stages)
    last = stages[-1]
    if is_last_recomputed:
        fused_microbatches = set(range(schedule.num_microbatches))
    else:
        fused_microbatches = _microbatches_without_wait(schedule, last)

    backward = costs.of(Action(BACKWARD, last, 0))
    input_grads = [costs.of(Action(INPUT, stage, 0)) for stage in stages]
    weight_grads = [costs.of(Action(WEIGHT, stage, 0)) for stage in stages]
    # The seconds that a fused forward adds to its backward, which has them already
    # where it computes the forward again.
    added = 0.0
    if not is_last_recomputed:
        added = max(costs.forward[last] - action_seconds, 0.0)
    fused_backward = backward + added
    fused_input_grad = input_grads[last] + added

    # Whole backwards of the first stage run in its W.
    weight_grads[0] = max(input_grads[0] + weight_grads[0] - action_seconds, 0.0)
    input_grads[0] = 0.0
    fused_weight_grad = weight_grads[last]
    if last == 0:
        fused_input_grad = 0.0
        fused_weight_grad = fused_backward

    def replace_last(numbers: Any, fused: float) -> list[Any]:
        of_last = [numbers[last]] * schedule.num_microbatches
        for microbatch in fused_microbatches:
            of_last[microbatch] = fused
        return [*numbers[:last], of_last]

    return dataclasses.replace(
        costs,
        forward=replace_last(costs.forward, 0.0),
        backward=replace_last(costs.backward, fused_backward),
        input_grad=replace_last(input_grads, fused_input_grad),
        weight_grad=replace_last(weight_grads, fused_weight_grad),
        residual_bytes=replace_last(costs.residual_bytes, costs.boundary_bytes[last]),
    )


def _microbatches_without_wait(schedule: Schedule, stage: int) -> set[int]:
    """The micro-batches whose backward in a stage directly follows their forward."""
    row = schedule.rows[schedule.placement[stage]]
    return {
        action.microbatch
        for action, following in itertools.pairwise(row)
        if action == Action(FORWARD, stage, action.microbatch)
        and following[1:] == action[1:]
    }


def _rank_memory(
    space: SearchSpace, choice: Choice, *, timeline: Timeline, costs: Costs
) -> tuple[Memory, ...]:
    """The parts of the peak of each rank, on each of its devices."""
    profile = space.profile(choice.schedule, choice.num_shards)
    ends = [0, *itertools.accumulate(choice.balance)]
    spans = list(itertools.pairwise(ends))
    workspace = _stage_workspace(profile, choice, costs)

    rank_memory = []
    for rank, peak in enumerate(timeline.peak_bytes):
        stages = [s for s, r in enumerate(timeline.placement) if r == rank]
        layers = list[int]()
        for stage in stages:
            begin, end = spans[stage]
            layers += range(begin, end)
        profiles = [profile.layers[layer] for layer in layers]
        # The state of a layer has the optimizer's among it.
        param_bytes = sum(layer.param_bytes + layer.state_bytes for layer in profiles)
        optimizer_bytes = sum(space.optimizer_bytes[layer] for layer in layers)
        grad_bytes = [costs.accumulator_bytes[stage] for stage in stages]
        activation_bytes = int(peak) - param_bytes - sum(grad_bytes)
        needed = [workspace[stage] for stage in stages]
        if choice.num_shards > 1:
            # When no activations are left, the gradients that shards exchange stand
            # beside their sums, stage by stage.
            needed.append(max(grad_bytes) - activation_bytes)
        memory = Memory(
            parameters=param_bytes - optimizer_bytes,
            gradients=sum(grad_bytes),
            optimizer=optimizer_bytes,
            activations=activation_bytes,
            workspace=max(0, *needed),
        )
        rank_memory.append(memory)
    return tuple(rank_memory)


def _stage_workspace(profile: Profile, choice: Choice, costs: Costs) -> list[int]:
    """The bytes that the largest program of each stage needs while it runs."""
    last = len(choice.balance) - 1
    ends = [0, *itertools.accumulate(choice.balance)]
    workspace = []
    for stage, (begin, end) in enumerate(itertools.pairwise(ends)):
        num_bytes = _layers_workspace(profile, begin, end)
        mode = choice.remat[stage]
        is_fused = stage == last and 0.0 in costs.forward[last]
        if stores_only_inputs(mode) or is_fused:
            # One program runs forward and backward: it holds the residuals itself.
            residuals = profile.residuals_of[profile.pending_mode(mode)]
            num_bytes += int(residuals[begin, end])
        workspace.append(num_bytes)
    return workspace


def _layers_workspace(profile: Profile, begin: int, end: int) -> int:
    """The workspace of a program of layers, at the layer that needs most.

    Besides the workspace of the layer itself there is the input of the layer and its
    output, if they stay within the stage, and the skip connections within the stage
    that are open there.
    """
    # For each layer, the bytes of skip connections that open less those that close.
    change = [0] * (end - begin + 1)
    for skip in profile.skips:
        if begin <= skip.source and skip.target < end:
            change[skip.source - begin] += skip.bytes
            change[skip.target - begin + 1] -= skip.bytes

    needed = []
    open_bytes = 0
    for layer in range(begin, end):
        open_bytes += change[layer - begin]
        num_bytes = open_bytes
        workspace = profile.layers[layer].workspace_bytes
        if workspace is not None:
            num_bytes += workspace
        if layer > begin:
            num_bytes += profile.boundary_bytes(layer)
        if layer + 1 < end:
            num_bytes += profile.boundary_bytes(layer + 1)
        needed.append(num_bytes)
    return max(needed)
