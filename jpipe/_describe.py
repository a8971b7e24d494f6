"""What a pipeline is in words, from what is known of it so far."""

from collections.abc import Sequence

from jax.extend import core

from ._cache import ProgramCache
from ._functions import _remat
from ._functions._weights import is_params
from ._instructions import _bytes
from ._instructions._bytes import most_residuals, nbytes
from ._instructions._sharding import SubMesh
from ._layers._skip import label
from ._layers._stage import abbreviate
from ._run._pipe import Pipe
from ._slices._built import Built
from ._slices._slice import specs
from ._slices._stages import Stages
from .planning._plan import Forecast, Plan, StagePlan, folded
from .schedules import Action, Costs
from .schedules._units import size


def describe(
    pipe: Pipe, programs: ProgramCache, forecast: Forecast | None = None
) -> Plan:
    """Says who runs what, and more the more is known.

    Args:
      pipe: what is fixed for all batches.
      programs: what was compiled: parameters are known once variables were seen, bytes
        once there is a program with a loss.
      forecast: of the plan that it was built by, if any.

    Returns:
      The plan.
    """
    held: Sequence[int | None] = [None] * len(pipe.stages)
    peaks: tuple[tuple[str, int], ...] = ()
    ran: tuple[Action, ...] = ()
    if programs.training is not None:
        program, ran = programs.training.program, programs.training.ran
        held = most_residuals(program, len(pipe.stages))
        names = map(pipe.called, program.devices)
        peaks = tuple(zip(names, _bytes.peaks(program), strict=True))
    return Plan(
        tuple(_stage(pipe, programs, s, size) for s, size in enumerate(held)),
        pipe.schedule,
        ran,
        peaks,
        tuple((label(r.key), r.source, r.target) for r in programs.routes),
        forecast,
        pipe.num_shards,
    )


def _stage(
    pipe: Pipe,
    programs: ProgramCache,
    s: int,
    held_bytes: int | None,
) -> StagePlan:
    stage, training = pipe.stages[s], programs.training
    layout = training.layout if training else programs.layout
    device = pipe.devices[s]
    params = trained = local = None
    cut: dict[str, int] = {}
    if layout is not None:
        own = layout.weights[s]
        pairs = zip(own.specs, own.trainable, strict=True)
        leaves = zip(layout.order[s], own.paths, pairs, strict=True)
        # By leaf: what is tied within the stage is counted once.
        found = {leaf: pair for leaf, path, pair in leaves if is_params(path)}
        params = [spec for spec, _ in found.values()]
        local = list(map(nbytes, params))
        if isinstance(device, SubMesh):
            pairs = zip(found, params, strict=True)
            lie = [device.fitting(layout.shardings[i], x.shape) for i, x in pairs]
            local = [device.local_bytes(*pair) for pair in zip(local, lie, strict=True)]
            for spec, how in zip(params, lie, strict=True):
                for name in how.axes:
                    cut[name] = cut.get(name, 0) + spec.size
        if training:
            trained = sum(spec.size for spec, yes in found.values() if yes)
    kept = training.kept(s) if training else None
    return StagePlan(
        index=s,
        rank=pipe.schedule.placement[s],
        device=", ".join(map(pipe.called, dict.fromkeys(pipe.replicas(s)))),
        layers=tuple(layer.name for layer in stage.layers),
        remat=_remat.name(pipe.remat[s]),
        num_params=None if params is None else sum(spec.size for spec in params),
        param_bytes=None if local is None else sum(local),
        held_bytes=held_bytes,
        num_trained=trained,
        kept=kept.nbytes if kept else {},
        again=kept.again if kept else None,
        cut=cut,
    )


def rows(pipe: Pipe, stages: Stages, built: Built | None) -> list[str]:
    """A function that is divided, in words.

    A line for each stage: where it runs, what is in it, and what crosses from it; the
    schedule; and the bytes of each device.
    """
    found = []
    for s in range(stages.num_stages):
        first = stages.first
        params = [i for i in stages.weights(s) if i < first.num_params]
        count = sum(spec.size for spec in specs([first.params[i] for i in params]))
        inside = abbreviate(_modules(stages, s))
        line = f"stage {s} on {pipe.devices[s]}: {count:,} parameters"
        line += f", {inside}" if inside else ""
        if s < stages.num_stages - 1:
            line += f"; {_sent(stages, s):,} bytes of a micro-batch leave it"
        found.append(line)
    found.append(folded(pipe.schedule.drawn(Costs())))
    if stages.first.has_loss and built:
        pairs = zip(pipe.places, _bytes.peaks(built.program), strict=True)
        listed = ", ".join(f"{place} {size(n)}" for place, n in pairs)
        found.append(f"peak bytes while gradients are computed: {listed}")
    return found


def _sent(stages: Stages, stage: int) -> int:
    """The bytes of what other stages read of one."""
    part = stages.part(stage)
    others = [stages.part(s) for s in range(stages.num_stages) if s != stage]
    read = {var for other in others for var in other.arrives}
    sent: list[core.Var] = [v for v in [*part.leaves, *part.beside] if v in read]
    return sum(spec.size * spec.dtype.itemsize for spec in specs(sent))


def _modules(stages: Stages, stage: int) -> list[str]:
    """The modules of a model, as Flax names what is traced, that are in a stage."""
    names = [_names(stages, s) for s in range(stages.num_stages)]
    elsewhere = {name for s, own in enumerate(names) if s != stage for name in own}
    return [f"{n} (part)" if n in elsewhere else n for n in names[stage]]


def _names(stages: Stages, stage: int) -> list[str]:
    eqns = stages.part(stage).closed.jaxpr.eqns
    parts = [str(eqn.source_info.name_stack).split("/") for eqn in eqns]
    return list(dict.fromkeys(part[1] for part in parts if len(part) > 1))
