"""The modules of a model that are in its stages, as Flax names what is traced."""

from ._stages import Stages


def modules(stages: Stages) -> list[list[str]]:
    """Of each stage the modules that the model calls."""
    return [_names(stages, s) for s in range(stages.num_stages)]


def modules_by_part(stages: Stages) -> list[list[str]]:
    """The same; what is in several stages is said to be a part in each."""
    names = modules(stages)
    return [
        [f"{n} (part)" if _is_elsewhere(n, s, names) else n for n in own]
        for s, own in enumerate(names)
    ]


def _is_elsewhere(name: str, stage: int, names: list[list[str]]) -> bool:
    return any(name in own for s, own in enumerate(names) if s != stage)


def _names(stages: Stages, stage: int) -> list[str]:
    eqns = stages.part(stage).closed.jaxpr.eqns
    parts = [str(eqn.source_info.name_stack).split("/") for eqn in eqns]
    return list(dict.fromkeys(part[1] for part in parts if len(part) > 1))
