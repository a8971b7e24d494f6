"""How a layer is told whether it is trained: by parameters of known names."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

# By these names a layer is not told, though it asks.
MEAN_EVALUATION = frozenset({"is_eval", "is_inference"})
MISNAMED = frozenset({"training", "is_training", "is_train"}) | MEAN_EVALUATION
# By these a function asks for random keys; modules of Flax have streams.
MISNAMED_KEYS = frozenset({"rng", "rng_key", "prng", "prng_key", "dropout_rng"})

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


def takes_any(call: Callable[..., Any]) -> bool:
    """Whether a call takes any keywords and names no switch itself."""
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):
        return False
    known = any(parameter.name in switches(True) for parameter in parameters)
    various = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    return various and not known


def means_training(name: str, value: Any) -> bool:
    """What a value of a switch says."""
    return switches(True)[name] == bool(value)


def arguments(
    parameters: Iterable[inspect.Parameter], offered: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """What a call is given, of what is offered.

    It is passed by position where it can be: `flax.linen.remat` and `flax.nnx.remat`
    let only such arguments be static.

    Args:
      parameters: those of the call, but for what it is computed on.
      offered: values by name.

    Returns:
      The arguments by position and those by name.
    """
    parameters = list(parameters)
    asked = [p.name for p in parameters if p.kind not in VARIOUS and p.name in offered]
    args: list[Any] = []
    for parameter in parameters:
        value = offered.get(parameter.name, parameter.default)
        missing = value is inspect.Parameter.empty
        given = {p.name for p in parameters[: len(args)]}
        if missing or parameter.kind not in _POSITIONAL or set(asked) <= given:
            break
        args.append(value)
    given = {parameter.name for parameter in parameters[: len(args)]}
    return args, {name: offered[name] for name in asked if name not in given}


def parameter_names(function: Callable[..., Any], after: int = 0) -> frozenset[str]:
    """The parameters that a callable names; none where Python cannot tell.

    Args:
      function: the callable.
      after: how many come first, for what is computed on.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())[after:]
    except (TypeError, ValueError):
        return frozenset()
    inner = inspect.unwrap(function)
    # What functools.partial has set is the user's choice.
    chosen = inner.keywords if isinstance(inner, functools.partial) else {}
    return frozenset(p.name for p in parameters if p.kind not in VARIOUS) - set(chosen)


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
