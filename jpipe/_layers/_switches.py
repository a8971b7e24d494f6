"""How a layer is told whether it is trained: by parameters of known names."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

# By these names a layer is not told, though it asks.
MEAN_EVALUATION = frozenset({"is_eval", "is_inference"})
MISNAMED = frozenset({"training", "is_training", "is_train"}) | MEAN_EVALUATION
# By these a function asks for random keys; modules of Flax have streams.
MISNAMED_KEYS = frozenset({"rng", "rng_key", "prng", "prng_key", "dropout_rng"})

# What is known while tracing.
BOOL = (bool, int, np.bool_)
_POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)
VARIOUS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def switches(train: bool) -> dict[str, bool]:
    """The names by which Flax layers ask whether they are being trained."""
    return {
        "train": train,
        "deterministic": not train,
        "use_running_average": not train,
    }


def parameters(call: Callable[..., Any], after: int = 0) -> list[inspect.Parameter]:
    """The parameters of a callable but for the first; none where Python cannot tell."""
    try:
        return list(inspect.signature(call).parameters.values())[after:]
    except (TypeError, ValueError):
        return []


def takes_any(call: Callable[..., Any], data: int) -> bool:
    """Whether a call takes any arguments and names no switch itself.

    Args:
      call: what is called.
      data: how many of its parameters are for what it is computed on.
    """
    found = parameters(call)
    known = any(parameter.name in switches(True) for parameter in found)
    by_name = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in found)
    # Of (*args) the first is what it is computed on.
    after = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in found[data:])
    return (by_name or after) and not known


def is_set(module: Any, name: str) -> bool:
    """Whether a linen module holds a switch, as its maker or its class said."""
    fields = getattr(module, "__dataclass_fields__", {})
    return name in fields and getattr(module, name) is not None


def is_default(module: Any, name: str) -> bool:
    """Whether a field of a linen module is what it is if nobody sets it."""
    default = type(module).__dataclass_fields__[name].default
    return default is not None and getattr(module, name) is default


def meant(name: str, train: bool) -> bool | None:
    """What a parameter of this name means by itself; ``None`` if that is not known."""
    if name in MISNAMED:
        return train != (name in MEAN_EVALUATION)
    return switches(train).get(name)


def is_amiss(name: str, default: Any, train: bool) -> bool:
    """Whether a parameter of known name, left open, does not say what is meant."""
    known = meant(name, train) if default is None or isinstance(default, BOOL) else None
    return known is not None and (default is None or bool(default) is not known)


def means_training(name: str, value: Any) -> bool:
    """What a value of a switch says."""
    return switches(True)[name] == bool(value)


def arguments(
    asking: Iterable[inspect.Parameter], offered: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """What a call is given, of what is offered.

    It is passed by position where it can be: `flax.linen.remat` and `flax.nnx.remat`
    let only such arguments be static.

    Args:
      asking: the parameters of the call, but for what it is computed on.
      offered: values by name.

    Returns:
      The arguments by position and those by name.
    """
    asking = list(asking)
    asked = [p.name for p in asking if p.kind not in VARIOUS and p.name in offered]
    by_position = {p.name for p in asking if p.kind in _POSITIONAL} & set(asked)
    args: list[Any] = []
    for parameter in asking:
        value = offered.get(parameter.name, parameter.default)
        missing = value is inspect.Parameter.empty
        given = {p.name for p in asking[: len(args)]}
        if missing or parameter.kind not in _POSITIONAL or by_position <= given:
            break
        args.append(value)
    given = {parameter.name for parameter in asking[: len(args)]}
    return args, {name: offered[name] for name in asked if name not in given}


def parameter_names(function: Callable[..., Any], after: int = 0) -> frozenset[str]:
    """The parameters that a callable names; none where Python cannot tell.

    Args:
      function: the callable.
      after: how many come first, for what is computed on.
    """
    found = parameters(function, after)
    if not found:
        return frozenset()
    inner = inspect.unwrap(function)
    # What functools.partial has set is the user's choice.
    chosen = inner.keywords if isinstance(inner, functools.partial) else {}
    return frozenset(p.name for p in found if p.kind not in VARIOUS) - set(chosen)


def misnamed(
    function: Callable[..., Any],
    after: int,
    chosen: Callable[[str], bool],
    has_streams: bool,
) -> list[str]:
    """By which parameters a layer asks in vain, for whether it is trained or for keys.

    Args:
      function: what is called.
      after: how many of its parameters are for what it is computed on.
      chosen: whether its maker has set a parameter already.
      has_streams: whether it has random streams of its own, as a module of Flax.
    """
    names = parameter_names(function, after)
    asks = MISNAMED if not names & set(switches(True)) else frozenset()
    if not has_streams and "rngs" not in names:
        asks |= MISNAMED_KEYS
    return sorted(name for name in names & asks if not chosen(name))
