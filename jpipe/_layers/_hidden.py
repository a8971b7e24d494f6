"""Modules that a layer hides: their values would be constants, which nobody trains."""

import dataclasses
import dis
import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any

from . import _linen, _nnx


def why_not(source: Any, function: Any = None) -> str:
    """Why an object cannot be a layer, if it hides a module.

    Args:
      source: what the user listed.
      function: the function of a module by which it is called, if there is one.

    Returns:
      The reason; empty if it hides none.
    """
    if _linen.is_module(source):
        for field in dataclasses.fields(source):
            value = getattr(source, field.name, None)
            if field.name != "parent" and (found := _of_method(value)):
                return (
                    f"its {field.name} is a method of a {type(found).__name__} that is "
                    f"bound, {_CONSTANT}; list functions of the whole module: "
                    f"jpipe.layer(module, function)"
                )
    elif not _nnx.is_module(source):
        function = source
    if function is None:
        return ""
    while not _is_module(module := getattr(function, "__self__", function)):
        if isinstance(function, functools.partial):
            function = function.func
        elif hasattr(function, "__wrapped__"):  # by `jax.jit`, say
            function = function.__wrapped__
        else:
            return _captured(function)
    method = getattr(function, "__name__", "__call__")
    own = "itself" if method == "__call__" else f"as jpipe.layer(module, {method!r})"
    return (
        f"a function that calls a {type(module).__name__}, whose values would become "
        f"constants; list the module {own}"
    )


_CONSTANT = "whose values would be constants, which nobody trains"


def _is_module(value: Any) -> bool:
    return _linen.is_module(value) or _nnx.is_module(value)


def _of_method(value: Any) -> Any:
    """The module that a method is bound to."""
    module = getattr(value, "__self__", None)
    return module if _is_module(module) else None


def _captured(function: Any) -> str:
    """Why a function cannot be a layer, if it has a module from outside."""
    for name, value in _outside(function):
        held = [value, *_items(value)]
        for module in (_of_method(item) or item for item in held):
            bound = _linen.is_module(module) and module.scope is not None
            if bound or _nnx.is_module(module):
                return (
                    f"a function that takes {name}, a {type(module).__name__}, from "
                    f"outside, {_CONSTANT}; list that module, or one that holds all "
                    f"that the function needs, as jpipe.layer(module, function); for "
                    f"constants let it take the values (nnx.split, module.unbind())"
                )
    return ""


def _outside(function: Any) -> Iterator[tuple[str, Any]]:
    """The variables that a function reads and does not make, by their names."""
    if not isinstance(function, types.FunctionType):
        return
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # nothing is in it yet
            continue
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            name = instruction.argval
            if name in function.__globals__:
                yield name, function.__globals__[name]
    defaults = [
        *(function.__defaults__ or ()),
        *(function.__kwdefaults__ or {}).values(),
    ]
    yield from (("a default", value) for value in defaults)


def _items(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, list | tuple) else []
