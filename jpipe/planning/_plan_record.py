"""A pipeline in names and numbers: no arrays, functions or devices.

`print(plan)` shows a row for each stage, the grid of the schedule, residuals by remat
modes, skip connections and peaks, as far as they are known, and the forecast if there
is one.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .._layers._text import abbreviate
from .._partition._cut_points import CutPoints
from .._stage._stage_names import label_parts
from ..schedules import Action, Costs, Schedule
from ..schedules._action import BACKWARD, FORWARD, INPUT
from ..schedules._costs import TIME_FIELDS
from ..schedules._formats import (
    format_bytes,
    format_count,
    format_seconds,
    format_table,
)
from ..schedules._json import decode, parse_json
from ._layer_profile import find_number_faults

# Longer lines of a grid are shortened.
_MAX_WIDTH = 160


@dataclass(frozen=True)
class StagePlan:
    """One stage.

    Attributes:
      index: the index of the stage.
      rank: the rank that runs it.
      device: the name of the rank's device.
      layers: the names of its layers; of a model those of its sections or modules.
      remat: its remat mode.
      num_params: the number of parameters; ``None`` while shapes are unknown.
      param_bytes: the bytes of the parameters, on each of its devices.
      residual_bytes: the most that it stores between forward and backward in a step;
        ``None`` while no step is compiled.
      num_trained: the number of parameters that the step trains.
      residuals: remat mode -> bytes of the residuals of one micro-batch; all modes if
        `jax.checkpoint` computes nothing again.
      recomputed_flops: the floating-point operations of its backward that compute again
        what was not stored; ``None`` if unknown.
      sharded_params: axis of the stage's mesh -> number of parameters that are sharded
        along it.
      sent_bytes: the bytes of one micro-batch that its forward sends, to each device
        that reads them, without what it only passes on; ``None`` if unknown.
      modules: the modules that it calls, if ``layers`` are sections of a model.
      work: its estimated share in the work of a forward: operations, and bytes that
        they write; ``None`` if unknown.
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
    """The predicted bytes on a device at its peak.

    Attributes:
      parameters: parameters, and all else that a layer has, such as batch statistics.
      gradients: the sums of gradients over micro-batches.
      optimizer: the optimizer's state.
      activations: residuals, and arrays that wait between actions.
      workspace: the memory that the largest program needs besides that, while it runs;
        a program may be the one that adds up the gradients of devices that share a
        stage.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    workspace: int

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(dataclasses.astuple(self))

    def describe_excess(self, limit: int) -> str:
        """Says by how much it is more than a device has, and lists the parts."""
        parts = [
            f"{name} {format_bytes(num_bytes)}"
            for name, num_bytes in vars(self).items()
            if num_bytes
        ]
        return (
            f"needs {format_bytes(self.total)}, {format_bytes(self.total - limit)} "
            f"more than a device has: {', '.join(parts)}"
        )


@dataclass(frozen=True)
class TriedPlan:
    """A plan that `jpipe.tune` compiled, and ran if it fits.

    Attributes:
      text: the schedule, balance, micro-batches and remat modes.
      predicted: the seconds of a step on paper.
      num_bytes: the most that a device holds in a step, with the workspace of the
        programs that XLA compiled; ``None`` if it was not compiled.
      seconds: the median of the steps that it ran; ``None`` if it ran none.
      outcome: the reason why it did not run; empty if it did.
    """

    text: str
    predicted: float
    num_bytes: int | None = None
    seconds: float | None = None
    outcome: str = ""

    def cells(self) -> list[str]:
        """The cells of its row in the table."""
        step = "" if self.seconds is None else format_seconds(self.seconds)
        predicted = format_seconds(self.predicted)
        return [self.text, predicted, _bytes_cell(self.num_bytes), step, self.outcome]


@dataclass(frozen=True)
class Forecast:
    """The predicted costs of a step of a plan, and the reasons for the plan.

    Attributes:
      seconds: the seconds of a step.
      memory: the memory of each rank at its peak.
      costs: the costs of the stages, from which all of that was predicted.
      memory_limit: the bytes that a device has; ``None`` if there was no limit.
      sent_bytes: the bytes that cross between devices in a step.
      reasons: sentences: the bottleneck, the runner-up, devices that are idle.
      last_forward: the seconds of a forward of the last stage by itself; in ``costs``
        it may be a part of the backward.
      trials: the plans that ran, or were to run, the fastest first; empty of a plan on
        paper.
    """

    seconds: float
    memory: tuple[Memory, ...]
    costs: Costs
    memory_limit: int | None = None
    sent_bytes: int = 0
    reasons: tuple[str, ...] = ()
    last_forward: float = 0.0
    trials: tuple[TriedPlan, ...] = ()


@dataclass(frozen=True)
class Plan:
    """A pipeline on paper; prints as a table and the grid of its schedule.

    `Pipeline.plan` is the plan of a pipeline; `jpipe.plan` makes one for
    `jpipe.pipeline` to build.

    Attributes:
      stages: one entry per stage.
      schedule: the actions of each rank, in order.
      compiled_actions: the actions of which a step runs a program; empty while no
        step is compiled. A forward that is missing is a part of its backward; half of a
        backward that is missing has nothing to compute.
      peak_bytes: the name of each device and the most that a step holds on it, with
        parameters but without the optimizer's state; empty while no step is compiled.
      skips: the name, source and target stage of all that goes past stages of a list:
        what was stashed, and entries of dictionaries; empty before the first trace.
      forecast: the predicted costs; ``None`` if the pipeline was not planned.
      data: the number of devices of each rank on which the examples of a micro-batch
        are spread: along the axis ``"data"`` of a mesh. Numbers of a device are those
        of each of them.
      cuts: the cut points of one model; ``None`` of a list of layers.
      param_shapes: the shapes of its parameters, by which a pipeline recognizes the
        model of the plan; ``None`` while they are unknown.
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
        """The number of layers of each stage, or of sections of a model."""
        return [len(stage.layers) for stage in self.stages]

    @property
    def layer_names(self) -> list[list[str]]:
        """The names of the layers of each stage; of a model those of its modules."""
        names = [[*(stage.modules or stage.layers)] for stage in self.stages]
        return names if self.cuts is None else label_parts(names)

    @property
    def remat(self) -> list[str]:
        """The remat mode of each stage."""
        return [stage.remat for stage in self.stages]

    def to_json(self) -> str:
        """The plan as a JSON object; `from_json` reads it."""
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
        refusal = (
            "no plan as Plan.to_json writes it (if another version of jpipe did, make "
            "the plan again, by jpipe.plan)"
        )
        with parse_json(refusal, text) as fields:
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
                yield from find_number_faults(f"forecast.{name}", number)
        if self.cuts is not None:
            if len(self.cuts.positions) + 1 != len(self.stages):
                yield (
                    f"cuts has {len(self.cuts.positions)} positions, for "
                    f"{len(self.stages)} stages"
                )
            yield from self.cuts.faults()

    def __str__(self) -> str:
        parts = []
        if self.data > 1:
            parts.append(mesh_text(self.schedule, self.data))
        parts.append(self._table())
        parts.append(_shorten_grid(self._grid()))
        if any(stage.residuals for stage in self.stages):
            parts.append(_residuals_table(self.stages))
        if self.skips:
            listed = [f"{name}: stage {s} to {t}" for name, s, t in self.skips]
            parts.append(f"skip connections: {', '.join(listed)}")
        if self.peak_bytes:
            listed = [f"{name} {format_bytes(n)}" for name, n in self.peak_bytes]
            parts.append(
                f"peak of a step beside the optimizer's state: {', '.join(listed)}"
            )
        if self.forecast is not None:
            parts.append(self._forecast_text(self.forecast))
        return "\n".join(parts)

    def _table(self) -> str:
        """A row for each stage, with the columns that are known."""
        stages = self.stages
        # title of a column -> a cell for each stage
        columns = {
            "stage": [str(stage.index) for stage in stages],
            "device": [stage.device for stage in stages],
        }
        if any(self.layer_names):  # a function may have no modules
            columns["layers"] = [abbreviate(names) for names in self.layer_names]
        columns["remat"] = self.remat
        num_text_columns = len(columns)
        if any(stage.num_params is not None for stage in stages):
            columns["parameters"] = [_params_cell(stage) for stage in stages]
            columns["bytes"] = [_bytes_cell(stage.param_bytes) for stage in stages]
            if any(stage.residual_bytes is not None for stage in stages):
                columns["residuals"] = [
                    _bytes_cell(stage.residual_bytes) for stage in stages
                ]
        if all(stage.sent_bytes is not None for stage in stages):
            columns["sent"] = [_bytes_cell(stage.sent_bytes) for stage in stages]
        if all(stage.work is not None for stage in stages):
            columns["work"] = [f"{stage.work or 0:.0%}" for stage in stages]
        if any(stage.sharded_params for stage in stages):
            columns["cut along"] = [_sharded_cell(stage) for stage in stages]
        rows = zip(*columns.values(), strict=True)
        return format_table([list(columns), *rows], left=range(num_text_columns))

    def _grid(self) -> str:
        """The schedule as it runs; its bubble is in the forecast, if there is one."""
        costs = Costs()
        if self.compiled_actions:
            costs = self._costs_of_compiled()
        return self.schedule.drawn(costs, has_bubble=self.forecast is None)

    def _costs_of_compiled(self) -> Costs:
        """Default costs of the programs of a step; other actions cost nothing.

        A backward has the costs of its forward too, if they are one program.
        """
        compiled = set(self.compiled_actions)
        default = Costs()

        def seconds(op: str, stage: int, microbatch: int) -> float:
            action = Action(op, stage, microbatch)
            if action not in compiled:
                return 0.0
            forward = Action(FORWARD, stage, microbatch)
            if op in (BACKWARD, INPUT) and forward not in compiled:
                return default.of(action) + default.of(forward)
            return default.of(action)

        microbatches = range(self.schedule.num_microbatches)
        # field of `Costs` -> for each stage and micro-batch, the seconds
        times: dict[str, Any] = {}
        for op, name in TIME_FIELDS.items():
            times[name] = []
            for stage in self.stages:
                times[name].append([seconds(op, stage.index, m) for m in microbatches])
        return Costs(**times)

    def _forecast_text(self, forecast: Forecast) -> str:
        """The predicted seconds and bytes, and the reasons."""
        timeline = self.schedule.simulate(forecast.costs)
        names = [part.name for part in dataclasses.fields(Memory)]
        rows = [["predicted", "busy", *names, "all"]]
        for rank, memory in enumerate(forecast.memory):
            sizes = [*dataclasses.astuple(memory), memory.total]
            busy = format_seconds(timeline.busy[rank])
            rows.append([f"rank {rank}", busy, *map(format_bytes, sizes)])

        seconds = forecast.seconds
        busy_share = 1.0
        times_bound = 1.0
        if seconds:
            busy_share = sum(timeline.busy) / (seconds * len(timeline.rows))
            times_bound = seconds / timeline.lower_bound
        summary = (
            f"predicted: {format_seconds(seconds)} a step, "
            f"bubble {1 - busy_share:.1%}, "
            f"{times_bound:.2f} times the least that any order of these stages can take"
        )
        if forecast.memory_limit is not None:
            summary += f"; {format_bytes(forecast.memory_limit)} a device"
        parts = [format_table(rows, left=range(1)), summary, *forecast.reasons]
        if forecast.trials:
            head = ["tried", "predicted", "fullest device", "measured", ""]
            cells = [trial.cells() for trial in forecast.trials]
            parts.append(format_table([head, *cells], left=(0, 4)))
        return "\n".join(parts)


def mesh_text(schedule: Schedule, num_shards: int) -> str:
    """The shape of the mesh on which a schedule runs, in words."""
    num_ranks = schedule.num_ranks
    unit = "stage" if num_ranks == schedule.num_stages else "rank"
    return f"{format_count(num_ranks, unit)} x {num_shards} devices (data)"


def _params_cell(stage: StagePlan) -> str:
    """The number of parameters, and of those that are trained if others are not."""
    if stage.num_params is None:
        return ""
    if stage.num_trained in (None, stage.num_params):
        return f"{stage.num_params:,}"
    return f"{stage.num_params:,} ({stage.num_trained:,} trained)"


def _bytes_cell(num_bytes: int | None) -> str:
    return "" if num_bytes is None else format_bytes(num_bytes)


def _sharded_cell(stage: StagePlan) -> str:
    """The number of parameters that are sharded along each axis."""
    return ", ".join(f"{axis} {n:,}" for axis, n in stage.sharded_params.items())


def _shorten_grid(grid: str) -> str:
    """A grid without the ends of its lines, if it is too wide to be read."""
    rows = grid.split("\n")
    if max(map(len, rows)) <= _MAX_WIDTH:
        return grid
    short_rows = []
    for row in rows:
        is_long = len(row) > _MAX_WIDTH
        short_rows.append(f"{row[:_MAX_WIDTH]} ..." if is_long else row)
    return "\n".join([*short_rows, "(print(pipe.schedule) shows all)"])


def _residuals_table(stages: Sequence[StagePlan]) -> str:
    """The residuals under each mode, of the stages of which they are known."""
    stages = [stage for stage in stages if stage.residuals]
    modes = dict[str, None]()  # in the order in which stages name them
    for stage in stages:
        modes.update(dict.fromkeys(stage.residuals))
    rows = [["residuals of a micro-batch by", *modes, "recomputed flops"]]
    for stage in stages:
        cells = [_bytes_cell(stage.residuals.get(mode)) for mode in modes]
        flops = stage.recomputed_flops
        flops_cell = "" if flops is None else f"{flops:,}"
        rows.append([f"stage {stage.index}", *cells, flops_cell])
    return format_table(rows, left=range(1))
