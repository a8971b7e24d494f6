"""The names of what is in the stages of a model or a function."""

from collections import Counter
from collections.abc import Sequence

from .._jaxprs import _source
from ._stages import Stages


def modules(stages: Stages, paths: Sequence[Sequence[str]]) -> list[list[str]]:
    """The modules that each stage calls, as Flax names what is traced.

    Args:
      stages: the stages.
      paths: of each parameter the keys that lead to it. Where no stage calls a module
        that Flax names, stages are called by the parameters that they own.
    """
    names = [_modules(stages, s) for s in range(stages.num_stages)]
    if any(names):
        return names
    owned: list[list[str]] = [[] for _ in names]
    for path, owner in zip(paths, stages.owner_stages, strict=False):
        owned[owner].append(_shortened(path))
    return [sorted(dict.fromkeys(own), key=_natural) for own in owned]


def in_parts(names: Sequence[Sequence[str]]) -> list[list[str]]:
    """Of each stage every name once; one of several stages is a part in each."""
    stages = Counter(name for own in names for name in dict.fromkeys(own))
    return [
        [f"{name} (part)" if stages[name] > 1 else name for name in dict.fromkeys(own)]
        for own in names
    ]


def _modules(stages: Stages, stage: int) -> list[str]:
    eqns = stages.part(stage).closed.jaxpr.eqns
    paths = [path.split("/") for eqn in eqns for path in _source.modules(eqn)]
    return list(dict.fromkeys(path[1] for path in paths if len(path) > 1))


def _shortened(path: Sequence[str]) -> str:
    """The first key of a path, and the number that may be behind it."""
    count = 2 if len(path) > 1 and path[1].isdigit() else 1
    return "/".join(path[:count])


def _natural(name: str) -> list[tuple[int, str]]:
    """A key by which ``blocks/10`` is behind ``blocks/9``."""
    return [(int(key) if key.isdigit() else -1, key) for key in name.split("/")]
