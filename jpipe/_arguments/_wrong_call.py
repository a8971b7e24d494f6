"""Errors of calls with other arguments than a function takes.

Python says how many arguments are missing or surplus. These errors say what was given,
the call to type, and where several inputs of a model go.
"""

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np

from .._layers._text import shape_text
from .._messages import source_text
from ..schedules._formats import format_type

_P = ParamSpec("_P")
_R = TypeVar("_R")

# Name of an argument in former times, in JAX, Flax, NumPy or another function here ->
# its name in the functions that have one: `jpipe.value_and_grad` takes ``fun``, as
# `jax.value_and_grad` does.
_NAMES_HERE = {
    "stages": "layers",
    "model": "layers",
    "sample": "x",
    "loss": "loss_fn",
    "loss_fn": "fun",
    "optimizer": "tx",
    "microbatches": "num_microbatches",
    "chunks": "num_microbatches",
    "rng": "rngs",
    "rtol": "tolerance",
    "atol": "tolerance",
}
# A call that makes something -> the names of its arguments, read off its signature.
_NAMES_OF_CALLS: dict[str, Collection[str]] = {}
# The advice on inputs of a model, by the arguments of `jpipe.inputs`.
_INPUTS = (
    "several inputs of one model are one argument, x = jpipe.inputs(x, {}); a list of "
    "layers takes one pytree, such as {{'x': x, ...}}"
)
# The letters of an argument in an error, at most.
_LONGEST_ARGUMENT = 60


def _no_names(_: Any) -> Collection[str]:
    return ()


def explain_call(
    usage: str,
    advice_on: Mapping[str, str] | None = None,
    *,
    surplus: str = "",
    has_options: bool = False,
    input_names: Callable[[Any], Collection[str]] = _no_names,
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Makes a decorator, for calls with other arguments than a function takes.

    Args:
      usage: the call as users type it, such as ``step(state, x, targets)``.
      advice_on: name of an argument that it does not take -> what to type.
      surplus: the advice where there are too many arguments by position.
      has_options: True if users may look for its arguments in other calls.
      input_names: ``self -> names`` of the inputs that a model takes.
    """

    def decorate(method: Callable[_P, _R]) -> Callable[_P, _R]:
        if has_options:
            names = inspect.signature(method).parameters.keys()
            _NAMES_OF_CALLS[usage] = [name for name in names if name != "self"]

        @functools.wraps(method)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            try:
                return method(*args, **kwargs)
            except TypeError as error:
                traceback = error.__traceback__
                if traceback is not None and traceback.tb_next is None:
                    # No frame of the method: it could not be called.
                    message = _misuse(
                        method,
                        args,
                        kwargs,
                        usage=usage,
                        advice_on=advice_on or {},
                        surplus=surplus,
                        input_names=input_names(args[0]) if args else (),
                    )
                    raise TypeError(message) from None
                raise

        return call

    return decorate


def binding_fault(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str:
    """The reason why a function does not take some arguments; empty if it may."""
    signature = signature_of(function)
    if signature is None:
        return ""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    return ""


def signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    """The signature with which a function is called; ``None`` of some in C.

    Not of what it wraps, to which it may pass other arguments.
    """
    try:
        return inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return None


def explain_function_call(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Explains a call of a loss function with arguments that it does not take.

    Args:
      function: the loss function.
      args: its arguments by position.
      kwargs: its arguments by name.

    Raises:
      TypeError: if it does not take them.
    """
    fault = binding_fault(function, args, kwargs)
    if not fault:
        return
    signature = signature_of(function)
    advice = f"type grad_fn{signature}, grad_fn.place{signature}"
    if fault.startswith("too many"):
        advice = (
            "fun takes the parameters and then the mini-batch, (params, *args); a loss "
            "of (outputs, targets) is for the value_and_grad of jpipe.pipeline(model)"
        )
    raise TypeError(
        f"fun, {source_text(function)}, takes {signature}; it was given "
        f"{_describe_call(args, kwargs)}: {fault}; {advice}"
    )


def _misuse(
    method: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    usage: str,
    advice_on: Mapping[str, str],
    surplus: str,
    input_names: Collection[str],
) -> str:
    """The message of an error: see `explain_call`."""
    fault = binding_fault(method, args, kwargs)
    parameters = inspect.signature(method).parameters
    is_method = "self" in parameters
    inputs = args[1:] if is_method else args
    takes_any_name = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    advice_texts = [
        _advise_on_name(name, parameters, advice_on, input_names)
        for name in kwargs
        if name not in parameters and not takes_any_name
    ]
    if fault.startswith("too many"):
        if surplus:
            advice_texts.append(surplus)
        elif "x" in parameters:
            advice_texts.append(_INPUTS.format("mask"))
    lacks_targets = fault.startswith("missing") and "'targets'" in fault
    if lacks_targets and inputs and _is_pair(inputs[-1]):
        unpacked = usage.replace("x, targets", "*batch")
        advice_texts.append(f"of a batch (x, targets) type {unpacked}")
    advice = "".join(f"; {text}" for text in dict.fromkeys(advice_texts))
    return (
        f"type {usage}; it was given {_describe_call(inputs, kwargs)}: {fault}{advice}"
    )


def _advise_on_name(
    name: str,
    parameters: Mapping[str, inspect.Parameter],
    advice_on: Mapping[str, str],
    input_names: Collection[str],
) -> str:
    """The advice on an argument by a name that a function does not have.

    Args:
      name: the name.
      parameters: the parameters of the function, by name.
      advice_on: see `explain_call`.
      input_names: the names of the inputs of the model.
    """
    here = _NAMES_HERE.get(name, name)
    names = dict.fromkeys((name, here))
    for advised in names:
        if advised in advice_on:
            return advice_on[advised]
    if name in input_names:
        return _INPUTS.format(f"{name}={name}")
    if here in parameters:
        return f"type {here}= for {name}="
    if name == "params" and "variables" in parameters:
        return (
            "type variables={'params': params}, of a list of layers one such entry for "
            "each"
        )
    for option in names:
        calls = [call for call, taken in _NAMES_OF_CALLS.items() if option in taken]
        if calls:
            return f"{option}= is of {' and of '.join(calls)}"
    nearest = difflib.get_close_matches(name, parameters, n=1)
    if nearest:
        return f"type {nearest[0]}= for {name}="
    return f"it takes {', '.join(name for name in parameters if name != 'self')}"


def _is_pair(argument: Any) -> bool:
    return isinstance(argument, tuple | list) and len(argument) == 2


def _describe_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The arguments of a call, in short."""
    keywords = [f"{name}={describe_argument(value)}" for name, value in kwargs.items()]
    return f"({', '.join([*map(describe_argument, args), *keywords])})"


def check_flag(name: str, value: Any) -> None:
    """Checks an option that is on or off.

    Raises:
      TypeError: if it is no bool.
    """
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} is {describe_argument(value)}; needs True or False")


def note_arguments(
    error: Exception,
    name: str,
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    *,
    examples: str = "a micro-batch",
    advice: str = "",
) -> None:
    """Notes on an error of a user's function with which arguments it was called.

    Args:
      error: the error.
      name: the name of the option that the function is.
      function: the function.
      arguments: its arguments, by name.
      examples: the words for the examples that it sees.
      advice: the end of the note.
    """
    texts = [f"{name} {shape_text(value)}" for name, value in arguments.items()]
    error.add_note(
        f"raised by {name}, {source_text(function)}, on {' and '.join(texts)}, those "
        f"of {examples}{advice}"
    )


def describe_argument(argument: Any) -> str:
    """An argument in short: the shapes of its arrays, or its class."""
    if any(hasattr(leaf, "shape") for leaf in jax.tree.leaves(argument)):
        text = shape_text(argument)
    else:
        text = repr(argument)
    is_short = len(text) <= _LONGEST_ARGUMENT
    return text if is_short else format_type(argument)
