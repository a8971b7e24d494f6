"""Names of stages, by the modules that they call or the parameters that they own."""

import itertools
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.extend import core

from .._jaxprs import _eqn_source
from ._stages import Stages


def name_stages(stages: Stages, paths: Sequence[Sequence[str]]) -> list[list[str]]:
    """The modules that each stage calls, by the names that Flax gives them in a trace.

    Of a module whose layers are scanned in several stages, each has its layers in its
    name. Where no stage calls a named module, or a name is that of several modules, as
    in two equal towers, stages are named by the parameters that they own. Names are as
    short as they can be for stages to have different ones.

    Args:
      stages: the stages.
      paths: for each parameter, the keys that lead to it.
    """
    eqns_of_stages = [
        stages.slice_of(stage).closed.jaxpr.eqns for stage in range(stages.num_stages)
    ]
    scan_names = _name_layer_scans(eqns_of_stages)

    def name_modules(depth: int) -> list[list[str]]:
        names = list[list[str]]()
        for eqns in eqns_of_stages:
            # module -> its name in this stage
            stage_names: dict[str, str] = {}
            for eqn in eqns:
                for module in _called_modules(eqn, depth):
                    stage_names.setdefault(module, module)
                    if id(eqn) in scan_names:
                        stage_names[module] = scan_names[id(eqn)]
            names.append(list(stage_names.values()))
        return names

    def name_params(depth: int) -> list[list[str]]:
        owned_params: list[list[str]] = [[] for _ in eqns_of_stages]
        for path, owner in zip(paths, stages.owner_stages, strict=False):
            owned_params[owner].append(_first_keys(path, depth))
        return [
            sorted(dict.fromkeys(params), key=_natural_order) for params in owned_params
        ]

    modules = name_modules(1)
    if not any(modules):
        return _tell_apart(name_params) or name_params(1)
    param_paths = {
        var: tuple(path)
        for var, path in zip(stages.traced().params, paths, strict=False)
    }
    has_namesakes = _has_namesakes(eqns_of_stages, param_paths)
    if has_namesakes and all(name_params(1)):
        return _tell_apart(name_params) or name_params(1)
    return _tell_apart(name_modules) or modules


def _has_namesakes(
    eqns_of_stages: Sequence[Sequence[core.JaxprEqn]],
    param_paths: Mapping[core.Var, tuple[str, ...]],
) -> bool:
    """True if two modules have one name in the trace, and parameters of their own.

    So have two calls of one Flax module, each with a part of the parameters.

    Args:
      eqns_of_stages: the equations of each stage.
      param_paths: for each parameter, the keys that lead to it.
    """
    # the names of a module in the trace -> the keys that lead to its parameters
    module_paths: dict[tuple[str, ...], tuple[str, ...]] = {}
    for eqn in itertools.chain.from_iterable(eqns_of_stages):
        read = [var for var in eqn.invars if isinstance(var, core.Var)]
        paths = [param_paths[var] for var in read if var in param_paths]
        for module, path in itertools.product(_called_modules(eqn, sys.maxsize), paths):
            names = tuple(module.split("/"))
            # The last place in the path where these names stand, behind other keys.
            for end in range(len(path), len(names), -1):
                if path[end - len(names) : end] == names:
                    if module_paths.setdefault(names, path[:end]) != path[:end]:
                        return True
                    break
    return False


def _tell_apart(name: Callable[[int], list[list[str]]]) -> list[list[str]] | None:
    """The shortest names of which no two stages have the same ones.

    Args:
      name: ``number of keys -> names of each stage``, of paths of so many keys.

    Returns:
      These names; ``None`` if the longest do not tell the stages apart.
    """
    whole_paths = itertools.chain.from_iterable(name(sys.maxsize))
    max_depth = max((path.count("/") + 1 for path in whole_paths), default=1)
    for depth in range(1, max_depth + 1):
        names = name(depth)
        named_stages = [tuple(stage_names) for stage_names in names if stage_names]
        if len(set(named_stages)) == len(named_stages):
            return names
    return None


def _name_layer_scans(
    eqns_of_stages: Sequence[Sequence[core.JaxprEqn]],
) -> dict[int, str]:
    """Names scans that go on in the next stage, such as ``layers 2-3 of decoder``.

    Args:
      eqns_of_stages: the equations of each stage.

    Returns:
      ``id`` of the equation of a scan -> its name.
    """
    # module -> its scans, with their stages
    scans_of_module: dict[str, list[tuple[int, core.JaxprEqn]]] = {}
    for stage, eqns in enumerate(eqns_of_stages):
        for eqn in eqns:
            modules = _called_modules(eqn, depth=1)
            if eqn.primitive.name == "scan" and len(modules) == 1:
                scans_of_module.setdefault(modules[0], []).append((stage, eqn))

    names: dict[int, str] = {}
    for module, scans in scans_of_module.items():
        stages = [stage for stage, _ in scans]
        is_one_per_stage = len(set(stages)) == len(stages)
        if len(stages) == 1 or not is_one_per_stage:
            continue
        eqns = [eqn for _, eqn in scans]
        if eqns[0].params["reverse"]:  # the last layers come first
            eqns.reverse()
        begin = 0
        for eqn in eqns:
            length: Any = eqn.params["length"]
            last = begin + length - 1
            layers = f"layers {begin}-{last}" if length > 1 else f"layer {begin}"
            names[id(eqn)] = layers if module == "layers" else f"{layers} of {module}"
            begin += length
    return names


def label_parts(names: Sequence[Sequence[str]]) -> list[list[str]]:
    """Each name once per stage; a name that several stages have is a part in each."""
    unique_names = [list(dict.fromkeys(stage_names)) for stage_names in names]
    num_stages = Counter[str]()  # name -> the number of stages that have it
    for stage_names in unique_names:
        num_stages.update(stage_names)

    def label(name: str) -> str:
        return f"{name} (part)" if num_stages[name] > 1 else name

    return [[*map(label, stage_names)] for stage_names in unique_names]


def _called_modules(eqn: core.JaxprEqn, depth: int) -> list[str]:
    """The modules in the outermost module that an equation belongs to.

    Args:
      eqn: the equation.
      depth: the number of modules in a path: 1 for children, 2 for theirs.
    """
    names = dict[str, None]()
    for path in _eqn_source.module_paths(eqn):
        _, *children = path.split("/")
        if children:
            names["/".join(children[:depth])] = None
    return list(names)


def _first_keys(path: Sequence[str], depth: int) -> str:
    """The first keys of a path, and the number that may be behind them."""
    has_number = len(path) > depth and path[depth].isdigit()
    return "/".join(path[: depth + 1 if has_number else depth])


def _natural_order(name: str) -> list[tuple[int, str]]:
    """A sorting key by which ``blocks/10`` is behind ``blocks/9``."""
    return [(int(key) if key.isdigit() else -1, key) for key in name.split("/")]
