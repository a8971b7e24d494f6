"""How a layer receives whether it is trained: by parameters of known names."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from flax import linen, nnx

from . import _inputs

PyTree = Any
# What is known while tracing.
BOOL = (bool, int, np.bool_)
_TRAINING = ("train", "training", "is_training")
_EVALUATION = ("deterministic", "use_running_average", "is_eval", "inference")
_POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)
VARIOUS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
Call = tuple[Any, Callable[..., Any], int]


def switches(train: bool) -> dict[str, bool]:
    """The value of each switch, by the names that models give it."""
    return {
        **dict.fromkeys(_TRAINING, train),
        **dict.fromkeys(_EVALUATION, not train),
    }


def is_switch(parameter: inspect.Parameter) -> bool:
    """Whether a parameter is a switch: by its name, with a default that may be one."""
    default = parameter.default
    return parameter.name in switches(True) and (
        default is None or default is parameter.empty or isinstance(default, bool)
    )


def offered(
    asking: Iterable[inspect.Parameter], train: bool, rngs: Any
) -> dict[str, Any]:
    """What a call receives beside its input, by name: its switches, and keys."""
    values = {**switches(train), "rngs": rngs}
    return {
        p.name: values[p.name]
        for p in asking
        if p.kind not in VARIOUS and (p.name == "rngs" or is_switch(p))
    }


def parameters(
    call: Callable[..., Any], before: int, x: Any
) -> list[inspect.Parameter]:
    """The parameters of a callable that nobody has set yet.

    Args:
      call: the callable; none where Python cannot tell.
      before: how many come before its input, such as the module.
      x: its input.
    """
    data, named = _inputs.arguments(x)
    try:
        listed = list(inspect.signature(call).parameters.values())
    except (TypeError, ValueError):
        return []
    inner = inspect.unwrap(call)
    chosen = inner.keywords if isinstance(inner, functools.partial) else {}
    found = listed[before + len(data) :]
    found = [p for p in found if p.name not in chosen and p.name not in named]
    if named:  # what stands behind one that is given by name cannot go by position
        by_name = inspect.Parameter.KEYWORD_ONLY
        return [p if p.kind in VARIOUS else p.replace(kind=by_name) for p in found]
    return found


def keywords(
    call: Callable[..., Any], asking: Iterable[inspect.Parameter], x: PyTree
) -> str:
    """The name of the ``**kwargs`` in which a callable may look for a switch.

    Args:
      call: the callable.
      asking: its parameters that nobody has set yet.
      x: its input.

    Returns:
      The name; empty where there is none, where it begins with an underscore, as of
      what is ignored, where the user chose what the callable is given, by a
      `functools.partial` or in `jpipe.inputs`, and of Flax itself.
    """
    inner = inspect.unwrap(call)
    _, named = _inputs.arguments(x)
    is_chosen = isinstance(inner, functools.partial) or any(
        isinstance(value, bool) for value in named.values()
    )
    if is_chosen or str(getattr(inner, "__module__", "")).startswith("flax."):
        return ""
    names = (p.name for p in asking if p.kind is inspect.Parameter.VAR_KEYWORD)
    return next((name for name in names if not name.startswith("_")), "")


def passing(x: PyTree, method: str) -> str:
    """A layer that passes a switch on to a method of a module, to be typed.

    Args:
      x: its input.
      method: the name of the method.

    Returns:
      Its text, with ``{}`` for the argument.
    """
    data, named = _inputs.arguments(x)
    inputs = ["x"] if len(data) == 1 else [f"x{i}" for i in range(len(data))]
    params = ", ".join(["module", *inputs, *named, "train"])
    args = ", ".join([*inputs, *(f"{name}={name}" for name in named), "{}"])
    called = "module" if method == "__call__" else f"module.{method}"
    return f"jpipe.layer(module, lambda {params}: {called}({args}))"


def is_set(module: Any, name: str) -> bool:
    """Whether a linen module holds a switch, as its maker or its class set it."""
    fields = getattr(module, "__dataclass_fields__", {})
    return name in fields and getattr(module, name) is not None


def receiver(module: Any, method: str) -> Call:
    """What takes the switches of a call: of a Sequential, its first layer.

    Returns:
      The module, the function, and how many of its parameters come before the data.
    """
    calls = linen.Sequential.__call__, nnx.Sequential.__call__
    while method == "__call__" and type(module).__call__ in calls:
        layers: Any = getattr(module, "layers", ())
        if not layers:
            break
        module = layers[0]
        if not isinstance(module, linen.Module | nnx.Module):
            return module, module, 0
    return module, getattr(type(module), method), 1


def arguments(
    asking: Sequence[inspect.Parameter], offered: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call, of what is offered.

    They are passed by position where they can be: `flax.linen.remat` and
    `flax.nnx.remat` let only such arguments be static.

    Args:
      asking: the parameters of the call, but for what it is computed on.
      offered: values by name.

    Returns:
      The arguments by position and those by name.
    """
    positions = [
        i for i, p in enumerate(asking) if p.kind in _POSITIONAL and p.name in offered
    ]
    args: list[Any] = []
    for parameter in asking[: max(positions, default=-1) + 1]:
        value = offered.get(parameter.name, parameter.default)
        if value is parameter.empty or parameter.kind not in _POSITIONAL:
            break
        args.append(value)
    passed = {parameter.name for parameter in asking[: len(args)]}
    return args, {n: value for n, value in offered.items() if n not in passed}


def bound(
    function: Callable[..., PyTree],
    before: Sequence[Any],
    x: PyTree,
    asking: Sequence[inspect.Parameter],
    offered: Mapping[str, Any],
) -> Callable[[], PyTree]:
    """A call with all of its arguments.

    Args:
      function: what is called.
      before: what comes before its input, such as the module.
      x: its input.
      asking: its parameters after the input.
      offered: values of these by name.
    """
    args, keywords = arguments(asking, offered)
    data, named = _inputs.arguments(x)
    return functools.partial(function, *before, *data, *args, **named, **keywords)


def call(
    function: Callable[..., PyTree],
    before: Sequence[Any],
    x: PyTree,
    rngs: Any,
    train: bool,
) -> PyTree:
    """Calls a function of the user's own with what it names of switches and keys."""
    asking = parameters(function, len(before), x)
    return bound(function, before, x, asking, offered(asking, train, rngs))()
