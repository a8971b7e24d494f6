"""The modules of a model that are in its stages, as Flax names what is traced."""

from collections import Counter
from collections.abc import Sequence

from ._stages import Stages


def modules(stages: Stages) -> list[list[str]]:
    """Of each stage the modules that the model calls."""
    return [_names(stages, s) for s in range(stages.num_stages)]


def in_parts(names: Sequence[Sequence[str]]) -> list[list[str]]:
    """Of each stage every name once; one of several stages is a part in each."""
    stages = Counter(name for own in names for name in dict.fromkeys(own))
    return [
        [f"{name} (part)" if stages[name] > 1 else name for name in dict.fromkeys(own)]
        for own in names
    ]


def _names(stages: Stages, stage: int) -> list[str]:
    eqns = stages.part(stage).closed.jaxpr.eqns
    parts = [str(eqn.source_info.name_stack).split("/") for eqn in eqns]
    return list(dict.fromkeys(part[1] for part in parts if len(part) > 1))
