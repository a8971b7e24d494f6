"""Who runs what, in names and numbers: no arrays, functions or devices."""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .._layers._text import abbreviate
from .._partition._cut_points import CutPoints
from .._stage._stage_names import mark_shared_names
from ..schedules import Action, Costs, Schedule
from ..schedules._action import BACKWARD, FORWARD, INPUT
from ..schedules._costs import TIME_FIELDS
from ..schedules._formats import format_bytes, format_seconds, format_table
from ..schedules._json import decode, parse_json
from ._layer_profile import number_faults

# Columns of a grid beyond which its end is left out.
_WIDEST = 160


@dataclass(frozen=True)
class StagePlan:
    """One stage.

    Attributes:
      index: its number.
      rank: the rank that runs it.
      device: the name of the rank's device.
      layers: the names of its layers; of a model those of its pieces or modules.
      remat: which residuals it stores between forward and backward.
      num_params: the number of parameters; ``None`` while shapes are unknown.
      param_bytes: their bytes, on each of its devices.
      residual_bytes: the most that it stores between forward and backward in a step;
        ``None`` while no step is compiled.
      num_trained: how many of the parameters the step trains.
      residuals: the bytes of those of one micro-batch, by remat modes, where they are
        known: all where nothing is computed again by `jax.checkpoint`.
      recomputed_flops: the floating-point operations that its backward takes for
        computing again what was not stored; ``None`` if it is not known.
      sharded_params: how many of the parameters are sharded along each axis of the
        stage's own mesh.
      sent_bytes: what of a micro-batch other stages read of it; ``None`` if it is not
        known.
      modules: of a model the modules that it calls, where ``layers`` are pieces.
      work: the part of the work of a forward that it has, estimated: operations, and
        bytes that they write; ``None`` if it is not known.
    """

    index: int
    rank: int
    device: str
    layers: tuple[str, ...]
    remat: str
    num_params: int | None = None
    param_bytes: int | None = None
    residual_bytes: int | None = None
    num_trained: int | None = None
    residuals: Mapping[str, int] = field(default_factory=dict)
    recomputed_flops: int | None = None
    sharded_params: Mapping[str, int] = field(default_factory=dict)
    sent_bytes: int | None = None
    modules: tuple[str, ...] = ()
    work: float | None = None


@dataclass(frozen=True)
class Memory:
    """What a device holds at its peak, predicted: bytes.

    Attributes:
      parameters: and all else that a layer has, such as batch statistics.
      gradients: their sums over micro-batches.
      optimizer: its state.
      activations: what waits between actions.
      workspace: what the largest program needs while it runs, besides that; also the
        one that adds up the gradients of devices that share a stage.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    workspace: int

    @property
    def lasting(self) -> int:
        """What is there before and after activations."""
        return self.parameters + self.gradients

    @property
    def total(self) -> int:
        """All of it."""
        return sum(dataclasses.astuple(self))

    def describe_excess(self, limit: int) -> str:
        """Says that it is more than a device has, and what it is made of."""
        parts = (
            f"{name} {format_bytes(own)}" for name, own in vars(self).items() if own
        )
        return (
            f"needs {format_bytes(self.total)}, {format_bytes(self.total - limit)} "
            f"more than a device has: {', '.join(parts)}"
        )


@dataclass(frozen=True)
class Forecast:
    """What a plan would take, and why it was chosen.

    Attributes:
      seconds: of a step, predicted.
      memory: of each rank at its peak.
      costs: of the stages, from which all of that was predicted.
      memory_limit: bytes of a device; ``None`` if none was given.
      sent_bytes: between all devices in a step.
      reasons: in sentences: what holds it up, what it was chosen over, what is idle.
      last_forward: the seconds of a forward of the last stage, also where it is a part
        of its backward, so that ``costs`` have it there.
    """

    seconds: float
    memory: tuple[Memory, ...]
    costs: Costs
    memory_limit: int | None = None
    sent_bytes: int = 0
    reasons: tuple[str, ...] = ()
    last_forward: float = 0.0


@dataclass(frozen=True)
class Plan:
    """A pipeline on paper; prints as a table and the grid of its schedule.

    `Pipeline.plan` is that of a pipeline, `jpipe.plan` makes one for
    `jpipe.pipeline` to build.

    Attributes:
      stages: one entry per stage.
      schedule: who runs which action when.
      compiled_actions: the actions of which a step runs a program; empty while no
        step is compiled. A forward that is missing is a part of its backward; half of a
        backward that is missing has nothing to compute.
      peak_bytes: the most that a step holds on each device, with parameters but without
        the optimizer's state; empty while no step is compiled.
      skips: the name, source and target stage of each long skip connection; empty while
        no input was seen.
      forecast: what it would take; ``None`` if the pipeline was not planned.
      data: on how many devices of each rank the examples of a micro-batch are spread:
        along the axis ``"data"`` of a mesh. Numbers of a device are those of each
        of them.
      cuts: where one model is divided; ``None`` of a list of layers.
      param_shapes: the shapes of its parameters, by which a pipeline knows what the
        plan is of; ``None`` while they are unknown.
    """

    stages: tuple[StagePlan, ...]
    schedule: Schedule
    compiled_actions: tuple[Action, ...] = ()
    peak_bytes: tuple[tuple[str, int], ...] = ()
    skips: tuple[tuple[str, int, int], ...] = ()
    forecast: Forecast | None = None
    data: int = 1
    cuts: CutPoints | None = None
    param_shapes: tuple[tuple[int, ...], ...] | None = None

    @property
    def balance(self) -> list[int]:
        """The number of layers of each stage, or of pieces of a model."""
        return [len(stage.layers) for stage in self.stages]

    @property
    def layer_names(self) -> list[list[str]]:
        """The layers of each stage; of a model its modules, each once."""
        names = [[*(stage.modules or stage.layers)] for stage in self.stages]
        return names if self.cuts is None else mark_shared_names(names)

    @property
    def remat(self) -> list[str]:
        """What each stage keeps."""
        return [stage.remat for stage in self.stages]

    def to_json(self) -> str:
        """All of it as a JSON object; `from_json` reads it."""
        fields = dataclasses.asdict(self)
        fields["schedule"] = json.loads(self.schedule.to_json())
        fields["compiled_actions"] = list(map(str, self.compiled_actions))
        return json.dumps(fields, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Reads what `to_json` wrote.

        Raises:
          ValueError: if the text is something else, or its schedule cannot run.

        Example:
          >>> import jpipe
          >>> plan = jpipe.pipeline([lambda x: x], num_microbatches=2).plan
          >>> jpipe.Plan.from_json(plan.to_json()) == plan
          True
        """
        with parse_json("no plan as Plan.to_json writes it", text) as fields:
            plan: Plan = decode(cls, fields)
            plan.schedule.validate()
            if faults := list(plan._faults()):
                raise ValueError("; ".join(faults))
            str(plan)  # simulates it, with numbers where it has numbers
        return plan

    def _faults(self) -> Iterator[str]:
        """The faults of a plan that was read."""
        placement = tuple(stage.rank for stage in self.stages)
        if placement != self.schedule.placement:
            yield (
                f"stages are on ranks {placement}, in the schedule on "
                f"{self.schedule.placement}"
            )
        indices = [stage.index for stage in self.stages]
        if indices != [*range(len(indices))]:
            yield f"stages have the indices {indices}, need 0 to {len(indices) - 1}"
        if self.data < 1:
            yield f"data={self.data}: needs at least one device"
        if self.forecast is not None:
            for name in ("seconds", "last_forward"):
                number = getattr(self.forecast, name)
                yield from number_faults(f"forecast.{name}", number)
        if self.cuts is not None:
            if len(self.cuts.positions) + 1 != len(self.stages):
                yield (
                    f"cuts has {len(self.cuts.positions)} positions, for "
                    f"{len(self.stages)} stages"
                )
            yield from self.cuts.faults()

    def __str__(self) -> str:
        parts = [named(self.schedule, self.data)] if self.data > 1 else []
        parts += [self._table(), shortened(self._grid())]
        parts += _residuals(self.stages)
        if self.skips:
            listed = (f"{name}: stage {s} to {t}" for name, s, t in self.skips)
            parts.append(f"skip connections: {', '.join(listed)}")
        if self.peak_bytes:
            listed = ", ".join(
                f"{name} {format_bytes(n)}" for name, n in self.peak_bytes
            )
            parts.append(f"peak of a step beside the optimizer's state: {listed}")
        if self.forecast:
            parts.append(self._foretold(self.forecast))
        return "\n".join(parts)

    def _table(self) -> str:
        """A row for each stage, of what is known."""
        stages = self.stages
        found = {"stage": [str(stage.index) for stage in stages]}
        found["device"] = [stage.device for stage in stages]
        if any(self.layer_names):  # a function may have no modules
            found["layers"] = [*map(abbreviate, self.layer_names)]
        found["remat"] = self.remat
        left = range(len(found))
        if any(stage.num_params is not None for stage in stages):
            found["parameters"] = [*map(_params, stages)]
            found["bytes"] = [_size(stage.param_bytes) for stage in stages]
            if any(stage.residual_bytes is not None for stage in stages):
                found["residuals"] = [_size(stage.residual_bytes) for stage in stages]
        if all(stage.sent_bytes is not None for stage in stages):
            found["sent"] = [_size(stage.sent_bytes) for stage in stages]
        if all(stage.work is not None for stage in stages):
            found["work"] = [f"{stage.work or 0:.0%}" for stage in stages]
        if any(stage.sharded_params for stage in stages):
            pairs = (stage.sharded_params.items() for stage in stages)
            found["cut along"] = [", ".join(f"{k} {n:,}" for k, n in p) for p in pairs]
        return format_table([[*found], *zip(*found.values(), strict=True)], left)

    def _grid(self) -> str:
        """The schedule as it runs; its bubble follows where it is predicted."""
        if not self.compiled_actions:
            return self.schedule.drawn(Costs(), has_bubble=self.forecast is None)
        compiled_actions, default = set(self.compiled_actions), Costs()

        def last(action: Action) -> float:
            if action not in compiled_actions:
                return 0.0
            forward = action._replace(op=FORWARD)
            joined = action.op in (BACKWARD, INPUT) and forward not in compiled_actions
            return default.of(action) + joined * default.of(forward)

        microbatches = range(self.schedule.num_microbatches)
        times: dict[str, Any] = {
            name: [
                [last(Action(op, stage.index, m)) for m in microbatches]
                for stage in self.stages
            ]
            for op, name in TIME_FIELDS.items()
        }
        return self.schedule.drawn(Costs(**times), has_bubble=self.forecast is None)

    def _foretold(self, forecast: Forecast) -> str:
        """What it would take, and why."""
        timeline = self.schedule.simulate(forecast.costs)
        names = (field.name for field in dataclasses.fields(Memory))
        rows = [["predicted", "busy", *names, "all"]]
        each = zip(timeline.busy, forecast.memory, strict=True)
        for rank, (busy, memory) in enumerate(each):
            sizes = map(format_bytes, (*dataclasses.astuple(memory), memory.total))
            rows.append([f"rank {rank}", format_seconds(busy), *sizes])
        seconds, limit = forecast.seconds, forecast.memory_limit
        part = sum(timeline.busy) / (seconds * len(timeline.rows)) if seconds else 1.0
        times = seconds / timeline.lower_bound if seconds else 1.0
        lines = [
            format_table(rows, left=range(1)),
            f"predicted: {format_seconds(seconds)} a step, bubble {1 - part:.1%}, "
            f"{times:.2f} times the least that any order of these stages can take"
            + (f"; {format_bytes(limit)} a device" if limit is not None else ""),
            *forecast.reasons,
        ]
        return "\n".join(lines)


def named(schedule: Schedule, data: int) -> str:
    """The shape of the mesh on which a schedule runs."""
    ranks = schedule.num_ranks
    what = "stages" if ranks == schedule.num_stages else "ranks"
    return f"{ranks} {what if ranks > 1 else what[:-1]} x {data} devices (data)"


def _params(stage: StagePlan) -> str:
    """The number of its parameters, and of those that are trained if others are not."""
    if stage.num_params is None:
        return ""
    is_trained = stage.num_trained in (None, stage.num_params)
    trained = "" if is_trained else f" ({stage.num_trained:,} trained)"
    return f"{stage.num_params:,}{trained}"


def _size(num_bytes: int | None) -> str:
    return "" if num_bytes is None else format_bytes(num_bytes)


def shortened(grid: str) -> str:
    """A grid without its end, where it is too wide to be read."""
    rows = grid.split("\n")
    if max(map(len, rows)) <= _WIDEST:
        return grid
    short = (r if len(r) <= _WIDEST else f"{r[:_WIDEST]} ..." for r in rows)
    return "\n".join([*short, "(print(pipe.schedule) shows all)"])


def _residuals(stages: Sequence[StagePlan]) -> list[str]:
    """The residuals of each stage under each mode, where they are known."""
    known = [stage for stage in stages if stage.residuals]
    modes = list(dict.fromkeys(mode for stage in known for mode in stage.residuals))
    rows = [["residuals of a micro-batch by", *modes, "recomputed flops"]]
    for stage in known:
        cells = [
            format_bytes(stage.residuals[m]) if m in stage.residuals else ""
            for m in modes
        ]
        again = "" if stage.recomputed_flops is None else f"{stage.recomputed_flops:,}"
        rows.append([f"stage {stage.index}", *cells, again])
    return [format_table(rows, left=range(1))] if known else []
