"""What functions take from outside: globals, variables of functions around them.

A program of layers is traced with it as it was then. `jax.jit` does not see that it was
changed since; where a user builds something anew, it is looked at again.
"""

import contextlib
import dis
import enum
import functools
import hashlib
import itertools
import operator
import types
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import numpy as np

from . import _linen
from ._alike import Same
from ._reach import LIBRARIES

_PLAIN = bool | int | float | complex | str | bytes | np.generic | enum.Enum | None
_GLOBALS, _ATTRIBUTES = ("LOAD_GLOBAL", "LOAD_NAME"), ("LOAD_ATTR", "LOAD_METHOD")
_STORES = ("STORE_GLOBAL", "STORE_NAME", "STORE_DEREF", "STORE_ATTR")
_first = operator.itemgetter(0)


def taken(function: Any) -> dict[str, Hashable]:
    """What a callable takes from outside now, by names.

    Numbers, texts, tuples of them and NumPy's arrays by value; functions that are the
    user's own by their code, and what they take in turn; those of libraries by
    identity; classes by what stands in them. Not what its own code sets, such as a
    counter, and no other objects and collections, which may be made anew in another run
    of a cell, or be what calls are noted in.

    Args:
      function: the callable.
    """
    reader = _Reader()
    reader.read(function)
    return reader.found


class _Code(NamedTuple):
    """The names in the code of a function, and of functions inside it."""

    globals: frozenset[str] = frozenset()
    attributes: frozenset[str] = frozenset()
    stores: frozenset[str] = frozenset()


class _Reader:
    """Reads what functions take; each is met once."""

    def __init__(self) -> None:
        self.found: dict[str, Hashable] = {}
        self._met: list[Any] = []

    def read(self, value: Any) -> None:
        """Reads what a callable or a class takes."""
        if isinstance(value, functools.partial):
            name = getattr(value.func, "__name__", "a partial")
            for key, given in [*enumerate(value.args), *value.keywords.items()]:
                self._note(f"{name}({key})", [given])
            return self.read(value.func)
        if isinstance(value, types.MethodType):
            self._class(type(value.__self__))
            return self.read(value.__func__)
        for inner in _wrapped(value):
            value = inner
            if isinstance(value, types.FunctionType):
                self._function(value)
        if not isinstance(value, types.FunctionType):
            self._class(value if isinstance(value, type) else type(value))

    def _is_new(self, value: Any) -> bool:
        if any(value is met for met in self._met):
            return False
        self._met.append(value)
        return True

    def _class(self, kind: type) -> None:
        if _is_library(kind.__module__) or not self._is_new(kind):
            return
        members = [
            item
            for base in kind.__mro__
            if not _is_library(base.__module__)
            for item in vars(base).items()
        ]
        functions = [
            inner
            for _, member in members
            for inner in _wrapped(getattr(member, "fget", None) or member)
            if isinstance(inner, types.FunctionType)
        ]
        stores = {name for f in functions for name in _names(f.__code__).stores}
        for name, member in members:
            if not (name in stores or name.startswith("__")):
                self._note(f"{kind.__qualname__}.{name}", [member])
        for function in functions:
            self._function(function)

    def _function(self, function: types.FunctionType) -> None:
        known = function.__globals__
        if not self._is_new(function):
            return
        name, names = function.__qualname__, _names(function.__code__)
        if _is_library(known.get("__name__")):
            # What it was made with; its code is what it is.
            for at, value in sorted(_closure(function), key=_first):
                self._note(f"{at} of {name}", [value])
            return
        self._add(name, _text(function.__code__))
        self._note(f"a default of {name}", function.__defaults__ or ())
        self._note(f"a default of {name}", (function.__kwdefaults__ or {}).values())
        for at, value in sorted(_outside(function, names), key=_first):
            if at.rpartition(".")[2] in names.stores:
                continue
            self._note(at, [value])

    def _add(self, name: str, value: Hashable) -> None:
        """Notes something under a name that may be that of something else too."""
        key = name
        for number in itertools.count(2):
            if key not in self.found:
                break
            key = f"{name} ({number})"
        self.found[key] = value

    def _note(self, name: str, values: Any) -> None:
        for number, value in enumerate(values):
            key = f"{name} {number}" if number else name
            if isinstance(value, _PLAIN):
                self._add(key, (type(value), value))
            elif isinstance(value, tuple):
                self._note(f"{key}[]", value)
            elif type(value) is np.ndarray and not value.dtype.hasobject:
                data = hashlib.blake2b(np.ascontiguousarray(value).data.cast("B"))
                self._add(key, (value.dtype.str, value.shape, data.digest()))
            elif callable(value):
                inner = [*_wrapped(value)][-1]
                if _is_fixed(inner):
                    self._add(key, Same(inner))
                else:
                    self.read(value)


def _outside(function: types.FunctionType, names: _Code) -> Iterator[tuple[str, Any]]:
    """The values that a function names, and of modules and classes what of them."""
    known = {
        name: function.__globals__[name]
        for name in names.globals & function.__globals__.keys()
    }
    for name, value in [*known.items(), *_closure(function)]:
        yield name, value
        if isinstance(value, types.ModuleType) and not _is_library(value.__name__):
            held = vars(value)
            found = names.attributes & held.keys()
            yield from ((f"{name}.{part}", held[part]) for part in found)


def _closure(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The variables of functions around one that it names."""
    cells = function.__closure__ or ()
    for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
        with contextlib.suppress(ValueError):  # nothing is in it yet
            yield name, cell.cell_contents


def _is_fixed(function: Any) -> bool:
    """Whether a callable is a library's, made of nothing: then it is what it is."""
    if isinstance(function, functools.partial | types.MethodType):
        return False
    made = getattr(function, "__closure__", None)
    return not made and _is_library(getattr(function, "__module__", None))


def _wrapped(value: Any) -> Iterator[Any]:
    """A callable, and what it has inside that Python and JAX wrap, one by one."""
    yield value
    for _ in range(100):
        # A user's object may have something under any name; a linen module that is
        # bound runs its setup before it has not.
        plain = _is_library(type(value).__module__) and not _linen.is_module(value)
        asked = plain or isinstance(value, types.FunctionType)
        inner = getattr(value, "__wrapped__", None) if asked else None
        if inner is None:
            break
        value = inner
        yield value


def _is_library(name: Any) -> bool:
    return isinstance(name, str) and name.partition(".")[0] in LIBRARIES


def _text(code: types.CodeType) -> Hashable:
    """What code does, wherever it stands."""
    constants = [
        _text(x) if isinstance(x, types.CodeType) else (type(x), x)
        for x in code.co_consts
    ]
    return code.co_code, tuple(constants), code.co_names


@functools.lru_cache(maxsize=1024)
def _names(code: types.CodeType) -> _Code:
    """The names in code."""
    found = _Code()
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found = _joined(found, _names(constant))
    instructions = list(dis.get_instructions(code))

    def named(kinds: tuple[str, ...]) -> frozenset[str]:
        return frozenset(i.argval for i in instructions if i.opname in kinds)

    return _joined(found, _Code(*map(named, (_GLOBALS, _ATTRIBUTES, _STORES))))


def _joined(one: _Code, other: _Code) -> _Code:
    return _Code(*(a | b for a, b in zip(one, other, strict=True)))
