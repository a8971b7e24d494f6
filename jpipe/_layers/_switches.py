"""Switches of training: a layer receives them by parameters with agreed names."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from flax import linen, nnx

from . import _inputs

PyTree = Any
# The method of a module that a layer calls: its name, or a function of the module and
# its input.
Method = str | Callable[..., PyTree]
# The types of a switch that has a value while tracing.
BOOL_TYPES = (bool, int, np.bool_)
_TRAINING = ("train", "training", "is_training")
_EVALUATION = ("deterministic", "use_running_average", "is_eval", "inference")
_POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class CalledFunction(NamedTuple):
    """The function that takes the switches of a call.

    Attributes:
      module: its module, or the function itself.
      function: the function.
      num_leading: the number of its parameters before the inputs: 1 for a method.
    """

    module: Any
    function: Callable[..., Any]
    num_leading: int


def switches(*, train: bool) -> dict[str, bool]:
    """The value of each switch, by the names that models give it."""
    return {
        **dict.fromkeys(_TRAINING, train),
        **dict.fromkeys(_EVALUATION, not train),
    }


def opposed_switches(x: PyTree, *, train: bool) -> list[str]:
    """The switches that a user set in `jpipe.inputs`, otherwise than a call would.

    Args:
      x: the input.
      train: True for a call in training.

    Returns:
      Texts such as ``train=True``.
    """
    _, named_inputs = _inputs.call_arguments(x)
    values = switches(train=train)
    return [
        f"{name}={value}"
        for name, value in named_inputs.items()
        if isinstance(value, BOOL_TYPES) and values.get(name, value) != value
    ]


def advice_on(opposed: Sequence[str], *, train: bool) -> str:
    """The advice on switches that a user set: see `opposed_switches`."""
    phase = "training" if train else "evaluation, and where variables are made"
    return (
        f"jpipe.inputs(..., {', '.join(opposed)}) holds in {phase} too: leave it out, "
        f"and a pipeline passes it on, as training in a step and in value_and_grad, as "
        f"evaluation elsewhere"
    )


def is_switch(parameter: inspect.Parameter) -> bool:
    """True if a parameter is a switch: by its name, with a default that may be one."""
    default = parameter.default
    return parameter.name in switches(train=True) and (
        default is None or default is parameter.empty or isinstance(default, bool)
    )


def switch_values(
    parameters: Iterable[inspect.Parameter], *, train: bool, rngs: Any
) -> dict[str, Any]:
    """The values of those parameters that are switches or ``rngs``, by name."""
    values = {**switches(train=train), "rngs": rngs}
    return {
        parameter.name: values[parameter.name]
        for parameter in parameters
        if parameter.kind not in VARIADIC
        and (parameter.name == "rngs" or is_switch(parameter))
    }


def open_parameters(
    function: Callable[..., Any], num_leading: int, x: PyTree
) -> list[inspect.Parameter]:
    """The parameters of a function that nobody has set yet.

    Args:
      function: the function; one without a signature has none.
      num_leading: the number of its parameters before the inputs, such as the module.
      x: the input.
    """
    inputs, named_inputs = _inputs.call_arguments(x)
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []

    inner = inspect.unwrap(function)
    is_partial = isinstance(inner, functools.partial)
    set_names = {*named_inputs, *(inner.keywords if is_partial else ())}
    parameters = [
        parameter
        for parameter in parameters[num_leading + len(inputs) :]
        if parameter.name not in set_names
    ]
    if not named_inputs:
        return parameters
    # A parameter behind one that is passed by name cannot be passed by position.
    return [
        parameter
        if parameter.kind in VARIADIC
        else parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in parameters
    ]


def is_set_on_module(module: Any, name: str) -> bool:
    """True if a switch is set as an attribute of a linen module, or of its class."""
    fields = getattr(module, "__dataclass_fields__", {})
    return name in fields and getattr(module, name) is not None


def called_function(module: Any, method: str) -> CalledFunction:
    """The function that takes the switches of a method: of a Sequential, its first."""
    sequential_calls = (linen.Sequential.__call__, nnx.Sequential.__call__)
    while method == "__call__" and type(module).__call__ in sequential_calls:
        layers: Any = getattr(module, "layers", ())
        if not layers:
            break
        module = layers[0]
        if not isinstance(module, linen.Module | nnx.Module):
            return CalledFunction(module, module, num_leading=0)
    return CalledFunction(module, getattr(type(module), method), num_leading=1)


def _split_values(
    parameters: Sequence[inspect.Parameter], values: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Values of parameters, as arguments by position and arguments by name.

    They are passed by position where they can be: `flax.linen.remat` and
    `flax.nnx.remat` let only such arguments be static.

    Args:
      parameters: the parameters of the call after its inputs.
      values: values by the name of the parameter.
    """
    num_positional = 0
    for index, parameter in enumerate(parameters):
        if parameter.kind in _POSITIONAL and parameter.name in values:
            num_positional = index + 1

    args: list[Any] = []
    for parameter in parameters[:num_positional]:
        value = values.get(parameter.name, parameter.default)
        if value is parameter.empty or parameter.kind not in _POSITIONAL:
            break
        args.append(value)

    passed = {parameter.name for parameter in parameters[: len(args)]}
    return args, {name: value for name, value in values.items() if name not in passed}


def bind_call(
    function: Callable[..., PyTree],
    leading_args: Sequence[Any],
    x: PyTree,
    *,
    parameters: Sequence[inspect.Parameter],
    values: Mapping[str, Any],
) -> Callable[[], PyTree]:
    """A call with all of its arguments.

    Args:
      function: the function to call.
      leading_args: its arguments before the inputs, such as the module.
      x: the input.
      parameters: its parameters after the inputs.
      values: values of these by name.
    """
    inputs, named_inputs = _inputs.call_arguments(x)
    args, kwargs = _split_values(parameters, values)
    return functools.partial(
        function, *leading_args, *inputs, *args, **named_inputs, **kwargs
    )


def call(
    function: Callable[..., PyTree],
    leading_args: Sequence[Any],
    x: PyTree,
    *,
    rngs: Any,
    train: bool,
) -> PyTree:
    """Calls a function of the user with the switches and keys that it names."""
    parameters = open_parameters(function, len(leading_args), x)
    values = switch_values(parameters, train=train, rngs=rngs)
    bound = bind_call(function, leading_args, x, parameters=parameters, values=values)
    return bound()
