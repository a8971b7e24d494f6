"""Errors of calls with other arguments than a function takes.

Python says how many arguments are missing or surplus. These errors say what was given,
the call to type, and where several inputs of a model go.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import jax

from .._layers._text import shape_text
from .._messages import source_text

_P = ParamSpec("_P")
_R = TypeVar("_R")

# Former name of an argument, or that in other functions -> its name, if a function has
# it: `jpipe.value_and_grad` takes ``fun``, as `jax.value_and_grad` does.
_NAMES_NOW = {
    "stages": "layers",
    "sample": "x",
    "loss": "loss_fn",
    "loss_fn": "fun",
}
# The letters of an argument in an error, at most.
_LONGEST_ARGUMENT = 60


def explain_call(
    usage: str, advice_on: Mapping[str, str] | None = None, *, surplus: str = ""
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Makes a decorator, for calls with other arguments than a function takes.

    Args:
      usage: the call as users type it, such as ``step(state, x, targets)``.
      advice_on: name of an argument that it does not take -> what to type.
      surplus: the advice where there are too many arguments by position.
    """

    def decorate(method: Callable[_P, _R]) -> Callable[_P, _R]:
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
) -> str:
    """The message of an error: see `explain_call`."""
    fault = binding_fault(method, args, kwargs)
    parameters = inspect.signature(method).parameters
    is_method = "self" in parameters
    call_text = _describe_call(args[1:] if is_method else args, kwargs)
    unknown = [name for name in kwargs if name not in parameters]
    advice_texts = [
        f"type {_NAMES_NOW[name]}= for {name}="
        for name in unknown
        if _NAMES_NOW.get(name) in parameters
    ]
    advice_texts += [advice_on[name] for name in unknown if name in advice_on]
    if surplus and fault.startswith("too many"):
        advice_texts.append(surplus)
    advice = "".join(f"; {text}" for text in dict.fromkeys(advice_texts))
    is_missing = fault.startswith("missing")
    # An unknown name in a call of a function is that of an option, not of an input.
    may_be_input = fault.startswith("too many") or (is_method and not is_missing)
    if not advice and "x" in parameters and may_be_input:
        keywords = ", ".join(f"{name}={name}" for name in unknown) or "mask"
        advice = (
            f"; several inputs of one model are one argument, x = jpipe.inputs(x, "
            f"{keywords}); a list of layers takes one pytree, such as {{'x': x, ...}}"
        )
    return f"type {usage}; it was given {call_text}: {fault}{advice}"


def _describe_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The arguments of a call, in short."""
    keywords = [f"{name}={describe_argument(value)}" for name, value in kwargs.items()]
    return f"({', '.join([*map(describe_argument, args), *keywords])})"


def describe_argument(argument: Any) -> str:
    """An argument in short: the shapes of its arrays, or its class."""
    if any(hasattr(leaf, "shape") for leaf in jax.tree.leaves(argument)):
        text = shape_text(argument)
    else:
        text = repr(argument)
    is_short = len(text) <= _LONGEST_ARGUMENT
    return text if is_short else f"a {type(argument).__name__}"
