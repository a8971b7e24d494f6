"""Names of stages, by the modules that they call or the parameters that they own."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from jax.extend import core

from .._jaxprs import _eqn_source
from ._stages import Stages


def name_stages(stages: Stages, paths: Sequence[Sequence[str]]) -> list[list[str]]:
    """The modules that each stage calls, by the names that Flax gives them in a trace.

    Of a module whose layers are scanned in several stages, each has its layers in its
    name. Where no stage calls a named module, stages are named by the parameters that
    they own.

    Args:
      stages: the stages.
      paths: for each parameter, the keys that lead to it.
    """
    eqns_of_stages = [
        stages.slice_of(stage).closed.jaxpr.eqns for stage in range(stages.num_stages)
    ]
    scan_names = _name_layer_scans(eqns_of_stages)
    names = list[list[str]]()
    for eqns in eqns_of_stages:
        # module -> its name in this stage
        stage_names: dict[str, str] = {}
        for eqn in eqns:
            for module in _called_modules(eqn):
                stage_names.setdefault(module, module)
                if id(eqn) in scan_names:
                    stage_names[module] = scan_names[id(eqn)]
        names.append(list(stage_names.values()))
    if any(names):
        return names

    owned_params: list[list[str]] = [[] for _ in names]
    for path, owner in zip(paths, stages.owner_stages, strict=False):
        owned_params[owner].append(_first_keys(path))
    return [
        sorted(dict.fromkeys(params), key=_natural_order) for params in owned_params
    ]


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
            modules = _called_modules(eqn)
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


def _called_modules(eqn: core.JaxprEqn) -> list[str]:
    """The children of the outermost module that an equation belongs to."""
    names = dict[str, None]()
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
