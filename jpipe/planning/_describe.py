"""Makes the `Plan` of a pipeline: more of it, the more the pipeline has seen.

construction     stages, devices, schedule
variables        parameters and bytes of each stage
first trace      work and sent bytes of each stage, skip connections
training step    residuals, compiled actions, peaks
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from .._instructions import _memory
from .._instructions._memory import peak_residual_bytes
from .._instructions._sharding import StageMesh
from .._jaxprs import _work
from .._jaxprs._jaxpr import nbytes, specs
from .._partition._cut_points import CutPoints
from .._partition._param_layout import ParamLayout
from .._partition._stage_placement import StagePlacement
from .._pipelined._specialization import Specialization
from .._stage._stage_names import name_stages
from .._stage._stages import Stages
from .._trace import _boundaries
from ..schedules import Action
from ..schedules._formats import format_bytes
from ._plan_record import Forecast, Plan, StagePlan


class PipelineInfo(NamedTuple):
    """A pipeline, as far as it was divided.

    Attributes:
      placement: stages, devices and schedule: all that is fixed for all batches.
      names: the names of the layers of each stage; of a model those of its sections, or
        of the modules in it.
      layout: the layout of the variables; ``None`` before they were seen.
      stage_params: the indices of the variables that each stage reads; empty before
        they were seen.
      specialization: the mini-batch that was divided last; it may be one of
        evaluation, or have too few examples to run.
      modules: the names of the modules in each stage, if ``names`` are those of
        sections.
      cuts: the cut points of a model of which no mini-batch was divided yet.
    """

    placement: StagePlacement
    names: Sequence[Sequence[str]]
    layout: ParamLayout | None = None
    stage_params: Sequence[Sequence[int]] = ()
    specialization: Specialization | None = None
    modules: Sequence[Sequence[str]] = ()
    cuts: CutPoints | None = None

    @property
    def training(self) -> Specialization | None:
        """The last mini-batch, if it has a loss and runs."""
        last = self.specialization
        if last is None or not last.runs or not last.stages.traced().has_loss:
            return None
        return last


def describe_function(specialization: Specialization) -> PipelineInfo:
    """The information on a model or a loss function that is divided."""
    stages = specialization.stages
    layout = specialization.layout
    return PipelineInfo(
        placement=specialization.placement,
        names=name_stages(stages, layout.keys),
        layout=layout,
        stage_params=[stages.weights_on(s) for s in range(stages.num_stages)],
        specialization=specialization,
    )


def describe(info: PipelineInfo, forecast: Forecast | None = None) -> Plan:
    """Makes the plan of a pipeline.

    Args:
      info: the pipeline.
      forecast: the forecast of the plan that it was built by, if there is one.
    """
    placement = info.placement
    stages = [
        _describe_stage(info, index) for index in range(len(placement.layer_groups))
    ]
    layout = info.layout
    if layout is not None:
        stages = [_add_params(stage, info, layout) for stage in stages]
    skips: list[tuple[str, int, int]] = []
    specialization = info.specialization
    if specialization is not None:
        stages = _add_trace(stages, specialization)
        skips = _find_skips(specialization.stages)
    compiled_actions: tuple[Action, ...] = ()
    peaks: list[tuple[str, int]] = []
    training = info.training
    if training is not None:
        stages = _add_step(stages, training)
        compiled_actions = training.compiled_actions
        devices = map(placement.device_text, training.program.devices)
        peaks = [*zip(devices, _memory.peak_bytes(training.program), strict=True)]
    return Plan(
        stages=tuple(stages),
        schedule=placement.schedule,
        compiled_actions=compiled_actions,
        peak_bytes=tuple(peaks),
        skips=tuple(skips),
        forecast=forecast,
        data=placement.num_shards,
        cuts=info.cuts if specialization is None else specialization.cuts,
        param_shapes=None if layout is None else layout.param_shapes,
    )


def describe_tail(specialization: Specialization | None) -> str:
    """A line on what runs once per step, on the whole mini-batch; empty if nothing."""
    if specialization is None:
        return ""
    tail = specialization.stages.traced().tail
    if tail is None:
        return ""
    placement = specialization.placement
    device = placement.device_text(placement.devices[-1])
    joined = tail.closed.jaxpr.invars[len(tail.weights) :]
    num_bytes = sum(map(nbytes, specs(joined)))
    return (
        f"\nthe loss runs once per step, on {device}, on {format_bytes(num_bytes)} of "
        f"all micro-batches; so {placement.schedule.name} runs all forwards first"
    )


def _describe_stage(info: PipelineInfo, index: int) -> StagePlan:
    """A stage as far as it is known when the pipeline is made."""
    placement = info.placement
    replicas = dict.fromkeys(placement.replicas(index))
    return StagePlan(
        index=index,
        rank=placement.schedule.placement[index],
        device=", ".join(map(placement.device_text, replicas)),
        layers=tuple(info.names[index]),
        remat=placement.remat[index].name,
        modules=tuple(info.modules[index]) if info.modules else (),
    )


def _add_params(stage: StagePlan, info: PipelineInfo, layout: ParamLayout) -> StagePlan:
    """Adds the parameters that a stage reads; shared ones within it count once."""
    training = info.training
    device = info.placement.devices[stage.index]
    read = set(info.stage_params[stage.index])
    num_params = 0
    num_trained = 0
    param_bytes = 0
    sharded_params: dict[str, int] = {}  # axis of the mesh -> sharded elements
    for index in layout.param_indices:
        if index not in read:
            continue
        spec = layout.specs[index]
        num_bytes = nbytes(spec)
        if isinstance(device, StageMesh):
            sharding = device.fitting(layout.shardings[index], spec.shape)
            num_bytes = device.local_bytes(num_bytes, sharding)
            for axis in sharding.axes:
                sharded_params[axis] = sharded_params.get(axis, 0) + spec.size
        num_params += spec.size
        param_bytes += num_bytes
        if training is not None and training.stages.trained[index]:
            num_trained += spec.size
    return replace(
        stage,
        num_params=num_params,
        param_bytes=param_bytes,
        num_trained=None if training is None else num_trained,
        sharded_params=sharded_params,
    )


def _add_trace(
    stages: Sequence[StagePlan], specialization: Specialization
) -> list[StagePlan]:
    """Adds the bytes that each stage sends, and its share in the work of a forward."""
    traced = specialization.stages
    sent_bytes = _sent_bytes(specialization.placement, traced)
    work = [_work.estimate_work(traced.slice_of(x.index).closed) for x in stages]
    total_work = max(sum(work), 1)
    return [
        replace(
            stage,
            sent_bytes=sent_bytes[stage.index],
            work=work[stage.index] / total_work,
        )
        for stage in stages
    ]


def _add_step(stages: Sequence[StagePlan], training: Specialization) -> list[StagePlan]:
    """Adds what each stage stores between forward and backward in a training step."""
    residual_bytes = peak_residual_bytes(training.program, len(stages))
    described: list[StagePlan] = []
    for stage in stages:
        stage = replace(stage, residual_bytes=residual_bytes[stage.index])
        residuals = training.residuals(stage.index)
        if residuals is not None:
            stage = replace(
                stage,
                residuals=residuals.nbytes,
                recomputed_flops=residuals.recomputed_flops,
            )
        described.append(stage)
    return described


def _find_skips(stages: Stages) -> list[tuple[str, int, int]]:
    """The name, source and target stage of all that goes past stages of a list."""
    names = _boundaries.entry_names(stages.traced().closed)
    sources: dict[Any, int] = {}  # output of a stage -> the stage
    skips = dict[tuple[str, int, int], None]()  # an entry may have many leaves
    for stage in range(stages.num_stages):
        part = stages.slice_of(stage)
        for var in part.input_activations:
            source = sources[var]
            if names.get(var) and stage > source + 1:
                skips[names[var], source, stage] = None
        sources |= dict.fromkeys(part.outputs, stage)
    return sorted(skips, key=lambda skip: skip[1:])


def _sent_bytes(placement: StagePlacement, stages: Stages) -> list[int]:
    """The bytes of the first micro-batch that are sent from each stage to others.

    A value is sent once to each device that reads it, from the stage that computes it:
    stages that pass it on return an argument unchanged, and no array of theirs is
    moved.
    """
    sent_bytes = [0] * stages.num_stages
    # output of a stage -> the stage that computes the value, and its first output there
    origins: dict[Any, tuple[int, Any]] = {}
    sent = set[tuple[Any, int]]()  # output, and the place of a reader

    def send(var: Any, place: int) -> None:
        source, output = origins[var]
        if place != placement.place_of(source, 0) and (output, place) not in sent:
            sent.add((output, place))
            sent_bytes[source] += sum(map(nbytes, specs([output])))

    for stage in range(stages.num_stages):
        part = stages.slice_of(stage)
        for var in part.input_activations:
            send(var, placement.place_of(stage, 0))

        # id of a value in the jaxpr -> its origin
        origin_of_value = {id(var): origins[var] for var in part.input_activations}
        for output, value in zip(part.outputs, part.closed.jaxpr.outvars, strict=True):
            origins[output] = origin_of_value.setdefault(id(value), (stage, output))
    for var in stages.traced().joined:
        send(var, placement.place_of(stages.num_stages - 1, 0))
    return sent_bytes
