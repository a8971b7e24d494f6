"""Names of stages, by the modules that they call or the parameters that they own."""

from collections import Counter
from collections.abc import Sequence

from .._jaxprs import _eqn_source
from ._stages import Stages


def name_stages(stages: Stages, paths: Sequence[Sequence[str]]) -> list[list[str]]:
    """The modules that each stage calls, by the names that Flax gives them in a trace.

    Where no stage calls a named module, stages are named by the parameters that they
    own.

    Args:
      stages: the stages.
      paths: for each parameter, the keys that lead to it.
    """
    names = [_called_modules(stages, stage) for stage in range(stages.num_stages)]
    if any(names):
        return names
    owned_params: list[list[str]] = [[] for _ in names]
    for path, owner in zip(paths, stages.owner_stages, strict=False):
        owned_params[owner].append(_first_keys(path))
    return [
        sorted(dict.fromkeys(params), key=_natural_order) for params in owned_params
    ]


def label_parts(names: Sequence[Sequence[str]]) -> list[list[str]]:
    """Each name once per stage; a name that several stages have is a part in each."""
    unique_names = [list(dict.fromkeys(stage_names)) for stage_names in names]
    num_stages = Counter[str]()  # name -> the number of stages that have it
    for stage_names in unique_names:
        num_stages.update(stage_names)

    def label(name: str) -> str:
        return f"{name} (part)" if num_stages[name] > 1 else name

    return [[*map(label, stage_names)] for stage_names in unique_names]


def _called_modules(stages: Stages, stage: int) -> list[str]:
    """The children of the outermost module that a stage calls, in order."""
    names = dict[str, None]()
    for eqn in stages.slice_of(stage).closed.jaxpr.eqns:
        for path in _eqn_source.module_paths(eqn):
            _, *children = path.split("/")
            if children:
                names[children[0]] = None
    return list(names)


def _first_keys(path: Sequence[str]) -> str:
    """The first key of a path, and the number that may be behind it."""
    has_number = len(path) > 1 and path[1].isdigit()
    return "/".join(path[: 2 if has_number else 1])


def _natural_order(name: str) -> list[tuple[int, str]]:
    """A sorting key by which ``blocks/10`` is behind ``blocks/9``."""
    return [(int(key) if key.isdigit() else -1, key) for key in name.split("/")]
