"""The stages of a function in words."""

from jax.extend import core

from .._layers._stage import abbreviate
from ._slice import specs
from ._sliced import Built
from ._stages import Stages


def rows(built: Built) -> list[str]:
    """A line for each stage: where it runs, what is in it, and what crosses from it."""
    stages, found = built.stages, []
    for s in range(stages.num_stages):
        first = stages.first
        params = [i for i in stages.weights(s) if i < first.num_params]
        count = sum(spec.size for spec in specs([first.params[i] for i in params]))
        inside = abbreviate(_modules(stages, s))
        line = f"stage {s} on {built.pipe.devices[s]}: {count:,} parameters"
        line += f", {inside}" if inside else ""
        if s < stages.num_stages - 1:
            line += f"; {_sent(stages, s):,} bytes of a micro-batch leave it"
        found.append(line)
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
    names = [
        str(eqn.source_info.name_stack).split("/")
        for eqn in stages.part(stage).closed.jaxpr.eqns
    ]
    return list(dict.fromkeys(name[1] for name in names if len(name) > 1))
