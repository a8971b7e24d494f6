"""What a candidate for a plan would take: seconds of a step, bytes of each device."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..schedules import Action, Costs, Schedule, Timeline
from ..schedules._action import BACKWARD, FORWARD, INPUT, WEIGHT
from ._plan import Memory
from ._profile import Profile, speed_faults


@dataclass(frozen=True)
class Hardware:
    """The devices that a plan is for.

    Attributes:
      num_devices: how many there are.
      memory_limit: bytes of each; ``None`` if it is no matter.
      bandwidth: bytes per second between two of them; ``None``: transfers take no time.
      latency: seconds of a transfer of nothing.
    """

    num_devices: int
    memory_limit: int | None = None
    bandwidth: float | None = None
    latency: float = 0.0

    def faults(self) -> Iterator[str]:
        """What cannot be, a line for each."""
        for name in ("num_devices", "memory_limit"):
            number = getattr(self, name)
            if number is None:
                continue
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                yield f"{name}={number!r}: needs an int of at least 1"
        yield from speed_faults(self.bandwidth, self.latency)


@dataclass(frozen=True)
class Candidate:
    """One way to run a model, with what it would take.

    Attributes:
      balance: layers of each stage.
      remat: what each stage keeps.
      schedule: who runs what when.
      timeline: the schedule with the costs of these stages.
      memory: of each rank at its peak.
    """

    balance: tuple[int, ...]
    remat: tuple[str, ...]
    schedule: Schedule
    timeline: Timeline
    memory: tuple[Memory, ...]

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.timeline.makespan

    @property
    def most_bytes(self) -> int:
        """Of the device that needs most."""
        return max(memory.total for memory in self.memory)

    def fits(self, hardware: Hardware) -> bool:
        """Whether no device needs more than it has."""
        limit = hardware.memory_limit
        return limit is None or self.most_bytes <= limit

    def __str__(self) -> str:
        modes = dict.fromkeys(self.remat)
        return (
            f"{self.schedule.name}, balance {list(self.balance)}, "
            f"{self.schedule.num_microbatches} micro-batches, "
            f"remat {' and '.join(modes)}"
        )


def evaluate(
    profile: Profile,
    optimizer_bytes: Sequence[int],
    balance: Sequence[int],
    remat: Sequence[str],
    schedule: Schedule,
    hardware: Hardware,
) -> Candidate:
    """Runs a candidate on paper.

    Args:
      profile: of one micro-batch.
      optimizer_bytes: the optimizer's state of each layer.
      balance: layers of each stage.
      remat: what each stage keeps.
      schedule: for as many stages.
      hardware: what it runs on.

    Returns:
      The candidate.
    """
    costs = profile.costs(
        balance,
        remat=remat,
        bandwidth=hardware.bandwidth,
        latency=hardware.latency,
    )
    costs = as_run(costs, schedule, keeps_nothing=remat[-1] == "full")
    timeline = schedule.simulate(costs)
    memory = _memory(profile, optimizer_bytes, balance, costs, timeline)
    return Candidate(tuple(balance), tuple(remat), schedule, timeline, memory)


def as_run(costs: Costs, schedule: Schedule, keeps_nothing: bool) -> Costs:
    """The costs of what a step runs, where that is not action by action.

    A forward of the last stage that its own backward follows is a part of it: nothing
    is kept in between or computed twice. The first stage has no gradient of its input:
    its W does all that a backward does.

    Args:
      costs: one number per stage.
      schedule: who runs what when.
      keeps_nothing: whether the last stage keeps its input only, so that all of its
        forwards run with their backwards.

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
    forward, whole = costs.forward[last], costs.of(Action(BACKWARD, last, 0))
    if not keeps_nothing:
        whole += forward
    inputs = [costs.of(Action(INPUT, s, 0)) for s in range(last + 1)]
    weights = [costs.of(Action(WEIGHT, s, 0)) for s in range(last + 1)]
    weights[0], inputs[0] = inputs[0] + weights[0], 0.0

    def with_last(numbers: Any, other: float) -> list[Any]:
        own = [other if m in joined else numbers[last] for m in range(count)]
        return [*numbers[:last], own]

    return dataclasses.replace(
        costs,
        forward=with_last(costs.forward, 0.0),
        backward=with_last(costs.backward, whole),
        input_grad=with_last(inputs, whole - weights[last] if last else 0.0),
        weight_grad=with_last(weights, weights[last] if last else whole),
        residual_bytes=with_last(costs.residual_bytes, costs.boundary_bytes[last]),
    )


def _memory(
    profile: Profile,
    optimizer_bytes: Sequence[int],
    balance: Sequence[int],
    costs: Costs,
    timeline: Timeline,
) -> tuple[Memory, ...]:
    """The parts of each rank's peak."""
    totals = [[0, 0, 0, 0] for _ in timeline.rows]
    first = 0
    for stage, size in enumerate(balance):
        layers = range(first, first + size)
        own = totals[timeline.placement[stage]]
        own[0] += sum(
            profile.layers[i].param_bytes + profile.layers[i].state_bytes
            for i in layers
        )
        own[1] += costs.accumulator_bytes[stage]
        own[2] += sum(optimizer_bytes[i] for i in layers)
        spaces = [profile.layers[i].workspace_bytes or 0 for i in layers]
        own[3] = max(own[3], *spaces)
        first += size
    return tuple(
        Memory(
            parameters=parameters,
            gradients=gradients,
            optimizer=slots,
            held=max(int(peak) - parameters - gradients, 0),
            workspace=workspace,
        )
        for (parameters, gradients, slots, workspace), peak in zip(
            totals, timeline.peak_bytes, strict=True
        )
    )
