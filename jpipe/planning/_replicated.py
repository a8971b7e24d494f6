"""Stages with several devices each, as a value: names and numbers only."""

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..schedules import Costs, Schedule, Timeline, replicated
from ..schedules._costs import at, faults_of
from ..schedules._units import columns, duration
from . import _links
from ._json import differing, reading, refusal
from ._net import ReplicatedStage

STEADY, STEP = "steady", "step"
# The costs that each stage has one of.
_COSTS = ("forward", "backward", "boundary_bytes", "cotangent_bytes", "exchange")


def costs_of(**fields: Any) -> Costs:
    """Costs in time alone: what stages keep is not known."""
    return Costs(**fields, residual_bytes=0, pending_bytes=0, in_seconds=True)


@dataclass(frozen=True)
class Replicated:
    """Stages with several devices each, and what they would take.

    Prints why: what holds it up, how much of it is the exchange of gradients, what is
    left idle, what one device would take, and what stages of one device each would.

    Attributes:
      stages: in order.
      costs: of each stage on one device, of one micro-batch: its times, and what
        crosses the cut before it, skip connections included; and ``exchange``, the time
        in which its replicas add up their gradients once.
      num_devices: how many there are.
      objective: ``"steady"`` or ``"step"``; see `jpipe.replicate`.
      straight: what ``seconds`` would be with one device per stage.
      num_microbatches: of one step; ``None`` if nobody said.
      one_each: whether no stage was to have more than one device.

    Example:
      >>> import jpipe
      >>> from jpipe.planning._profile import LayerProfile, Profile
      >>> plan = jpipe.replicate(Profile((LayerProfile("a", 1.0, 2.0),)), 3)
      >>> plan.seconds
      1.0
      >>> jpipe.Replicated.from_json(plan.to_json()) == plan
      True
    """

    stages: tuple[ReplicatedStage, ...]
    costs: Costs
    num_devices: int
    objective: str
    straight: float
    num_microbatches: int | None = None
    one_each: bool = False

    @property
    def replicas(self) -> tuple[int, ...]:
        """The number of devices of each stage."""
        return tuple(stage.replicas for stage in self.stages)

    @property
    def busy(self) -> tuple[float, ...]:
        """What each stage computes on one micro-batch, its replicas side by side."""
        each = zip(self.costs.forward, self.costs.backward, self.replicas, strict=True)
        return tuple((forward + backward) / r for forward, backward, r in each)

    @property
    def links(self) -> tuple[float, ...]:
        """What the transfers of one micro-batch take between two stages each.

        There and back, over as many links as the stage with fewer devices has.
        """
        costs = self.costs
        return tuple(
            (at(costs.boundary_bytes, s) + costs.cotangent(s, 0)) / costs.bandwidth / r
            for s, r in enumerate(map(min, itertools.pairwise(self.replicas)), start=1)
        )

    @property
    def turns(self) -> tuple[float, ...]:
        """What each stage takes of a micro-batch with an exchange of gradients.

        As PipeDream's planner counts: each replica exchanges after each of its
        micro-batches, and an exchange counts twice.
        """
        each = zip(self.busy, self.costs.exchange, self.replicas, strict=True)
        return tuple(busy + 2 * exchange / r for busy, exchange, r in each)

    @property
    def seconds(self) -> float:
        """In the steady state from one micro-batch to the next; or of a step."""
        if self.objective == STEADY:
            return max(*self.turns, *self.links, 0.0)
        count = (self.num_microbatches or 1) - 1
        return self._passing + count * max(self.busy) + self.exposed

    @property
    def exposed(self) -> float:
        """How much of ``seconds`` is the exchange of gradients.

        In the steady state, what it adds to the slowest stage or link. Of a step, what
        is not hidden behind earlier stages: stage i is ready i times the slowest stage
        before the end.
        """
        if self.objective == STEADY:
            return self.seconds - max(*self.busy, *self.links, 0.0)
        block = max(self.busy)
        late = [x - i * block for i, x in enumerate(self.costs.exchange)]
        return max(*late, 0.0)

    @property
    def alone(self) -> float:
        """What one device would take for the same."""
        one = sum(self.costs.forward) + sum(self.costs.backward)
        return one if self.objective == STEADY else one * (self.num_microbatches or 1)

    @property
    def shares(self) -> tuple[tuple[float, float], ...]:
        """The parts of the time in which each stage computes and exchanges gradients.

        Of ``seconds``, as they are counted: in the steady state an exchange for each
        micro-batch, of a step one.
        """
        whole, steady = self.seconds or 1.0, self.objective == STEADY
        count = 1 if steady else self.num_microbatches or 1
        each = zip(self.busy, self.turns, self.costs.exchange, strict=True)
        return tuple(
            (count * busy / whole, (turn - busy if steady else once) / whole)
            for busy, turn, once in each
        )

    @property
    def bottleneck(self) -> int | None:
        """The stage that holds all up; ``None`` if it is a link between two."""
        each = self.turns if self.objective == STEADY else self.busy
        slowest = max(range(len(each)), key=each.__getitem__)
        links = self.links if self.objective == STEADY else ()
        return None if max(links, default=0.0) > each[slowest] else slowest

    @property
    def _passing(self) -> float:
        """One micro-batch through all stages and links and back."""
        return sum(self.busy) + sum(self.links)

    def schedule(self, num_microbatches: int | None = None) -> Schedule:
        """Who runs which micro-batch when: 1F1B, transfers hidden if they take time.

        Args:
          num_microbatches: of one step; default: those of the plan, or else twice as
            many as are in flight.

        Returns:
          For ``"steady"`` a rank for each device, and micro-batch i runs on replica
          i mod r of r. For ``"step"`` a rank for each stage: its devices share each
          micro-batch.

        Raises:
          ScheduleError: if the number is less than 1.
        """
        each, eager = self._turning, any(self.links)
        count = self.num_microbatches if num_microbatches is None else num_microbatches
        if count is None:
            first = replicated(each, sum(each) * 4, eager=eager).rows[0]
            warmup = next(i for i, action in enumerate(first) if action.op != "F")
            count = 2 * warmup * each[0]
        schedule = replicated(each, count, eager=eager)
        if self.objective == STEADY:
            return schedule
        sizes = "-".join(map(str, self.replicas))
        name = f"{'eager ' * eager}1f1b, a rank for each stage of {sizes} devices"
        return dataclasses.replace(schedule, name=name)

    def simulate(
        self, num_microbatches: int | None = None, *, each: bool = False
    ) -> Timeline:
        """`schedule` on paper, in seconds; a link carries one thing at a time.

        Gradients are exchanged once, when the last backward of a stage has run: that
        shows at the end, or is hidden behind stages that still compute.

        Args:
          num_microbatches: as for `schedule`.
          each: whether gradients are exchanged after each backward, and are a part of
            it, as ``seconds`` of a steady state counts.

        Returns:
          The timeline. In the steady state, with ``each``, it takes ``seconds`` from
          one micro-batch to the next; a step has what ``seconds`` leaves out: links
          may be slower than stages, and gradients wait for their turn.

        Raises:
          ScheduleError: if the number is less than 1.
          ValueError: for ``each``, if the plan is not of the steady state.
        """
        if each and self.objective != STEADY:
            raise ValueError(
                "each=True is for plans of the steady state: of a step gradients are "
                "exchanged once"
            )
        schedule, costs = self.schedule(num_microbatches), self.costs
        if each:
            pairs = zip(costs.backward, costs.exchange, strict=True)
            more = tuple(own + 2 * exchange for own, exchange in pairs)
            costs = dataclasses.replace(costs, backward=more, exchange=0.0)
        if self.objective == STEP:
            costs = self._shared(costs)
        return _links.simulate(schedule, self._turning, costs)

    @property
    def _turning(self) -> tuple[int, ...]:
        """The number of ranks of each stage that take turns."""
        return self.replicas if self.objective == STEADY else (1,) * len(self.stages)

    def _shared(self, costs: Costs) -> Costs:
        """What actions take whose micro-batch is shared by the devices of a stage."""
        both = [1, *(min(pair) for pair in itertools.pairwise(self.replicas))]

        def split(values: Any, parts: Any) -> tuple[float, ...]:
            return tuple(x / r for x, r in zip(values, parts, strict=True))

        return dataclasses.replace(
            costs,
            forward=split(costs.forward, self.replicas),
            backward=split(costs.backward, self.replicas),
            boundary_bytes=split(costs.boundary_bytes, both),
            cotangent_bytes=split(costs.cotangent_bytes, both),
        )

    def to_json(self) -> str:
        """All of it as a JSON object; `from_json` reads it."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        fields["costs"] = {name: getattr(self.costs, name) for name in _COSTS}
        speed = self.costs.bandwidth
        fields["costs"]["bandwidth"] = speed if math.isfinite(speed) else None
        return json.dumps(fields, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Replicated":
        """Reads what `to_json` wrote.

        Raises:
          ValueError: if the text is something else; the message names every fault.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        with reading(cls.__name__, text) as fields:
            given: dict[str, Any] = dict(fields.get("costs", {}))
            known = [*_COSTS, "bandwidth"] if "costs" in fields else []
            faults = differing(list(fields), names[:-1], names)
            faults += [f"costs: {says}" for says in differing(list(given), known)]
            plan = None if faults else cls(**_values(fields))
            faults += _faults(plan) if plan else []
        if plan is None or faults:
            raise ValueError(refusal(cls.__name__, faults))
        return plan

    def __str__(self) -> str:
        what = "a micro-batch" if self.objective == STEADY else "a step"
        used = sum(self.replicas)
        seconds, alone = self.seconds, self.alone
        lines = [
            f"{seconds:.6g} s {what} on {_devices(used)}, "
            f"{alone / seconds if seconds else 1.0:.3f} times as fast as one"
        ]
        if used < self.num_devices:
            more = "with more stages" if self.one_each else "with them"
            layers = self.stages[-1].end
            why = f"{more} a step would take no less"
            if self.one_each and len(self.stages) == layers:
                why = f"there are {layers} layers, and one device for each"
            lines.append(
                f"{self.num_devices - used} of {self.num_devices} devices are left "
                f"idle: {why}"
            )
        if max(self.replicas) > 1 and seconds:
            lines.append(
                f"with one device per stage {self.straight:.6g} s, "
                f"{self.straight / seconds:.3f} times as long"
            )
        lines += [self._why(), self._simulated()]
        header = ["stage", "layers", "devices", "computes", "exchange", "transfers"]
        rows = [header]
        links = ["", *map(duration, self.links)]
        for i, stage in enumerate(self.stages):
            layers = f"{stage.start} to {stage.end - 1}"
            times = duration(self.busy[i]), duration(self.costs.exchange[i]), links[i]
            rows.append([str(i), layers, str(stage.replicas), *times])
        return "\n".join([*lines, columns(rows, left={1})])

    def _simulated(self) -> str:
        """What a step would take with one exchange of gradients at its end."""
        timeline = self.simulate()
        plain = dataclasses.replace(timeline, exchanges=())
        count = max(action.microbatch for action in timeline.end) + 1
        says = f"a step of {count} micro-batch{'es' * (count > 1)}, simulated: "
        late = timeline.makespan - plain.makespan
        return f"{says}{timeline.makespan:.6g} s, {duration(late)} of it exchange"

    def _why(self) -> str:
        """What holds it up."""
        stage = self.bottleneck
        exchanged = f"{duration(self.exposed)} of it exchange of gradients"
        if self.objective == STEADY:
            if stage is None:
                link = max(range(len(self.links)), key=self.links.__getitem__)
                return f"transfers between stages {link} and {link + 1} hold it up"
            return f"stage {stage} holds it up, {exchanged}"
        times = (self.num_microbatches or 1) - 1
        return (
            f"{duration(self._passing)} through all stages and back, {times} times "
            f"{duration(self.busy[stage or 0])} in stage {stage}, the slowest; and "
            f"{duration(self.exposed)} exchange of gradients that nothing hides"
        )


def _values(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a plan, from those of its JSON."""
    given = {k: tuple(fields["costs"][k]) for k in _COSTS}
    speed = fields["costs"]["bandwidth"]
    costs: Any = {**given, "bandwidth": math.inf if speed is None else speed}
    stages = tuple(ReplicatedStage(*stage) for stage in fields["stages"])
    return fields | {"stages": stages, "costs": costs_of(**costs)}


def _devices(number: int) -> str:
    return f"{number} device{'s' * (number > 1)}"


def _is_count(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number > 0


def _faults(plan: Replicated) -> Iterator[str]:
    """What of a plan that was read cannot be."""
    end = 0
    for i, stage in enumerate(plan.stages):
        if not all(map(_is_count, stage[1:])) or stage[:1] != (end,) or stage[1] <= end:
            yield (
                f"stages[{i}]={list(stage)}: needs its first layer, {end}, the one "
                f"after its last, and a number of devices"
            )
        else:
            end = stage[1]
    for name in _COSTS:
        own = getattr(plan.costs, name)
        if len(own) != len(plan.stages):
            yield f"costs: {name} is not of {len(plan.stages)} stages"
        if any(isinstance(each, list) for each in own):
            yield f"costs: {name} has lists in it; needs numbers"
    yield from (f"costs: {fault}" for fault in faults_of(plan.costs, 1))
    if not plan.stages:
        yield "stages: there are none"
    if not isinstance(plan.one_each, bool):
        yield f"one_each={plan.one_each!r}; needs true or false"
    if not _is_count(plan.num_devices):
        yield f"num_devices={plan.num_devices!r}; needs an int of at least 1"
    elif all(_is_count(stage[2]) for stage in plan.stages):
        used = sum(plan.replicas)
        if used > plan.num_devices:
            yield f"num_devices={plan.num_devices}; the stages have {used}"
    if plan.objective not in (STEADY, STEP):
        yield f"objective={plan.objective!r}; needs 'steady' or 'step'"
    if plan.num_microbatches is not None and not _is_count(plan.num_microbatches):
        yield f"num_microbatches={plan.num_microbatches!r}; needs an int of at least 1"
    elif plan.objective == STEP and plan.num_microbatches is None:
        yield "objective='step' needs num_microbatches"
    straight = plan.straight
    if not isinstance(straight, int | float) or not 0 <= straight < math.inf:
        yield f"straight={straight!r}; needs seconds"
