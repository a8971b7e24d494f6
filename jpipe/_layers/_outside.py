"""What functions take from outside: globals, variables of functions around them.

A program is traced with it as it was then. `jax.jit` does not see that it was changed
since; where a user builds something anew, a step of a loss, a program of layers, it is
looked at again.
"""

import contextlib
import dis
import functools
import inspect
import sys
import types
from collections.abc import Hashable, Iterator
from typing import Any

import numpy as np

from ._alike import Same

# What is told apart by its value.
PLAIN = bool | int | float | complex | str | bytes | None
_CALLABLE = functools.partial | types.FunctionType | types.MethodType
_GLOBALS, _ATTRIBUTES = ("LOAD_GLOBAL", "LOAD_NAME"), ("LOAD_ATTR", "LOAD_METHOD")
_LIBRARIES = sys.stdlib_module_names | {
    *("jax", "jaxlib", "flax", "numpy", "optax", "chex", "jpipe", "scipy", "ml_dtypes"),
}


def taken(function: Any) -> Hashable:
    """What a callable takes from outside now: equal, as long as nobody changes it.

    Numbers, texts and NumPy's arrays by value, functions by their code, all else by
    identity; and what the functions take in turn that it names, where they are the
    user's own. An object takes what its class holds, and what its call takes.
    """
    return _Reader().of(function)


def is_library(name: Any) -> bool:
    """Whether a module of this name is one that a user does not change."""
    return isinstance(name, str) and name.partition(".")[0] in _LIBRARIES


class _Reader:
    """Reads what functions take; each is met once."""

    def __init__(self) -> None:
        self._met: set[Any] = set()

    def of(self, function: Any) -> Hashable:
        """What a callable takes."""
        while isinstance(function, functools.partial):
            function = function.func
        if isinstance(function, types.MethodType):
            own = function.__func__, type(function.__self__)
        elif hasattr(function, "__wrapped__") or isinstance(
            function, types.FunctionType
        ):
            return self._function(function)
        else:
            kind = function if isinstance(function, type) else type(function)
            own = inspect.getattr_static(kind, "__call__", None), kind
        call, kind = own
        if is_library(kind.__module__):
            return ()
        members: list[Hashable] = []
        for base in kind.__mro__:
            if not is_library(base.__module__):
                members += [self._member(*item) for item in vars(base).items()]
        return kind, tuple(members), self._function(call)

    def _member(self, name: str, member: Any) -> Hashable:
        if isinstance(member, PLAIN):
            return name, type(member), member
        return name, self._function(member)

    def _function(self, function: Any) -> Hashable:
        function = inspect.unwrap(function)
        if not isinstance(function, types.FunctionType) or function in self._met:
            return ()
        if is_library(function.__globals__.get("__name__")):
            return ()
        self._met.add(function)
        return tuple((name, self._value(value)) for name, value in _outside(function))

    def _value(self, value: Any) -> Hashable:
        if isinstance(value, PLAIN):
            return type(value), value
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return value.dtype, value.shape, value.tobytes()
        if isinstance(value, types.FunctionType):
            code = value.__code__  # a function that is written again is the same
            return code.co_code, code.co_consts, code.co_names, self._function(value)
        calls = isinstance(value, _CALLABLE | type) or hasattr(value, "__wrapped__")
        return Same(value), self.of(value) if calls else ()


def _outside(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The values that the code of a function names, in functions inside it too."""
    defaults = *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()
    yield from (("a default", value) for value in defaults)
    code = function.__code__
    outside, names = _reads(code)
    found = outside & function.__globals__.keys()
    known = {name: function.__globals__[name] for name in found}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # nothing is in it yet
            known[name] = cell.cell_contents
    for name, value in sorted(known.items()):
        yield name, value
        # Of a user's modules and classes what the code names too; objects and
        # collections may be what a function counts its calls in.
        if isinstance(value, type | types.ModuleType) and not is_library(_of(value)):
            held = vars(value)
            yield from ((f"{name}.{n}", held[n]) for n in sorted(names & held.keys()))


def _of(value: Any) -> Any:
    """The name of a module, or of that which a class is of."""
    return value.__name__ if isinstance(value, types.ModuleType) else value.__module__


@functools.lru_cache(maxsize=1024)
def _reads(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The globals and the attributes that code names, in functions inside it too."""
    instructions = list(dis.get_instructions(code))
    outside = {i.argval for i in instructions if i.opname in _GLOBALS}
    names = {i.argval for i in instructions if i.opname in _ATTRIBUTES}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inside = _reads(constant)
            outside |= inside[0]
            names |= inside[1]
    return frozenset(outside), frozenset(names)
