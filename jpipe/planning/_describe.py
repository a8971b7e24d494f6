"""What a pipeline is in words, from what is known of it so far."""

from collections.abc import Sequence
from typing import NamedTuple

from .._instructions import _memory
from .._instructions._memory import peak_residual_bytes
from .._instructions._sharding import StageMesh
from .._jaxprs import _work
from .._jaxprs._jaxpr import nbytes, specs
from .._partition import _remat
from .._partition._param_layout import ParamLayout
from .._partition._stage_placement import StagePlacement
from .._pipelined._specialization import Specialization
from .._stage._stage_names import name_stages
from .._stage._stages import Stages
from ..schedules import Action
from ._plan import Forecast, Plan, StagePlan


class PipelineInfo(NamedTuple):
    """What is known of a pipeline.

    Attributes:
      pipe: what is fixed for all batches.
      names: of each stage its layers; of a model its pieces, or the modules in it.
      layout: where its variables are, once they were seen.
      reads: of each stage the numbers of the leaves that it reads, likewise.
      last: what was divided last, which may be evaluation, or have no mini-batch.
      skips: the name, source and target of each long skip connection.
      modules: of each stage the modules in it, where names are those of pieces.
    """

    pipe: StagePlacement
    names: Sequence[Sequence[str]]
    layout: ParamLayout | None = None
    reads: Sequence[Sequence[int]] = ()
    last: Specialization | None = None
    skips: Sequence[tuple[str, int, int]] = ()
    modules: Sequence[Sequence[str]] = ()

    @property
    def built(self) -> Specialization | None:
        """A mini-batch with a loss, if that was the last."""
        last = self.last
        return last if last and last.runs and last.stages.first.has_loss else None


def describe_function(last: Specialization) -> PipelineInfo:
    """What is known of a model or a loss function that is divided."""
    stages, layout = last.stages, last.layout
    reads = [stages.weights_on(s) for s in range(stages.num_stages)]
    return PipelineInfo(
        last.pipe, name_stages(stages, layout.keys), layout, reads, last
    )


def describe(known: PipelineInfo, forecast: Forecast | None = None) -> Plan:
    """Says who runs what, and more the more is known.

    Args:
      known: what is known.
      forecast: of the plan that it was built by, if any.
    """
    pipe, built = known.pipe, known.built
    most: Sequence[int | None] = [None] * len(pipe.stages)
    peaks: tuple[tuple[str, int], ...] = ()
    compiled_actions: tuple[Action, ...] = ()
    if built is not None:
        program, compiled_actions = built.program, built.compiled_actions
        most = peak_residual_bytes(program, len(pipe.stages))
        names = map(pipe.called, program.devices)
        peaks = tuple(zip(names, _memory.peak_bytes(program), strict=True))
    work: Sequence[float | None] = [None] * len(pipe.stages)
    if known.last is not None:
        work = _shares(known.last.stages)
    return Plan(
        stages=tuple(
            _stage(known, s, size, part)
            for s, (size, part) in enumerate(zip(most, work, strict=True))
        ),
        schedule=pipe.schedule,
        compiled_actions=compiled_actions,
        peak_bytes=peaks,
        skips=tuple(known.skips),
        forecast=forecast,
        data=pipe.num_shards,
        cuts=known.last.cuts if known.last else None,
        param_shapes=_param_shapes(known.layout) if known.layout else None,
    )


def _param_shapes(layout: ParamLayout) -> tuple[tuple[int, ...], ...]:
    """The shapes of the parameters."""
    return tuple(tuple(layout.specs[i][0].shape) for i in layout.params)


def _shares(stages: Stages) -> list[float]:
    """The part of the work of a forward that each stage has, estimated."""
    work = [_work.of(stages.part(s).closed) for s in range(stages.num_stages)]
    return [stage / max(sum(work), 1) for stage in work]


def _stage(
    known: PipelineInfo, s: int, residual_bytes: int | None, work: float | None
) -> StagePlan:
    pipe, built, layout = known.pipe, known.built, known.layout
    device, params, trained, local = pipe.devices[s], None, None, None
    sharded_params: dict[str, int] = {}
    if layout is not None:
        # What is tied within the stage is counted once.
        own = [i for i in layout.params if i in set(known.reads[s])]
        params = [layout.specs[i][0] for i in own]
        local = list(map(nbytes, params))
        if isinstance(device, StageMesh):
            pairs = zip(own, params, strict=True)
            shardings = [device.fitting(layout.shardings[i], x.shape) for i, x in pairs]
            local = [
                device.local_bytes(*pair) for pair in zip(local, shardings, strict=True)
            ]
            for spec, sharding in zip(params, shardings, strict=True):
                for name in sharding.axes:
                    sharded_params[name] = sharded_params.get(name, 0) + spec.size
        if built:
            trained = sum(
                layout.specs[i][0].size for i in own if built.stages.trained[i]
            )
    one = built.residuals(s) if built else None
    return StagePlan(
        index=s,
        rank=pipe.schedule.placement[s],
        device=", ".join(map(pipe.called, dict.fromkeys(pipe.replicas(s)))),
        layers=tuple(known.names[s]),
        remat=_remat.mode_name(pipe.remat[s]),
        num_params=None if params is None else sum(spec.size for spec in params),
        param_bytes=None if local is None else sum(local),
        residual_bytes=residual_bytes,
        num_trained=trained,
        residuals=one.nbytes if one else {},
        recomputed_flops=one.recomputed_flops if one else None,
        sharded_params=sharded_params,
        sent_bytes=_sent(known.last.stages, s) if known.last else None,
        modules=tuple(known.modules[s]) if known.modules else (),
        work=work,
    )


def _sent(stages: Stages, stage: int) -> int:
    """The bytes of what later stages read of one, of the first micro-batch."""
    part = stages.part(stage)
    others = [stages.part(s) for s in range(stages.num_stages) if s != stage]
    read = {var for other in others for var in other.arrives}
    sent = [v for v in [*part.leaves, *part.aux] if v in read]
    return sum(map(nbytes, specs(sent)))
