"""What functions take from outside: globals, variables of functions around them.

A program is traced with it as it was then. `jax.jit` does not see that it was changed
since; where a user builds something anew, a step of a loss, a program of layers, it is
looked at again.
"""

import contextlib
import dis
import functools
import hashlib
import operator
import types
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import numpy as np

from . import _linen
from ._alike import Same
from ._reach import LIBRARIES

_PLAIN = bool | int | float | complex | str | bytes | None
_GLOBALS, _ATTRIBUTES = ("LOAD_GLOBAL", "LOAD_NAME"), ("LOAD_ATTR", "LOAD_METHOD")
# What is read itself.
_READ = functools.partial | types.FunctionType | types.MethodType | type
_STORES = ("STORE_GLOBAL", "STORE_NAME", "STORE_DEREF", "STORE_ATTR")
_first = operator.itemgetter(0)


def taken(function: Any, identities: bool = False) -> dict[str, Hashable]:
    """What a callable takes from outside now, by names.

    Numbers, texts, tuples of them and NumPy's arrays by value; functions that are the
    user's own by their code, and what they take in turn; classes by what stands in
    them. Not what its own code sets, such as a counter.

    Args:
      function: the callable.
      identities: whether all else is told apart by identity; else it is left out.
        Objects and collections may be made anew in another run of a cell, or be what
        calls are noted in.
    """
    reader = _Reader(identities)
    reader.read(function)
    return reader.found


class _Code(NamedTuple):
    """The names in the code of a function, and of functions inside it."""

    globals: frozenset[str] = frozenset()
    attributes: frozenset[str] = frozenset()
    stores: frozenset[str] = frozenset()


class _Reader:
    """Reads what functions take; each is met once."""

    def __init__(self, identities: bool) -> None:
        self._identities = identities
        self.found: dict[str, Hashable] = {}
        self._met: list[Any] = []

    def read(self, value: Any) -> None:
        """Reads what a callable or a class takes."""
        if isinstance(value, functools.partial):
            self._note("a partial", [*value.args, *value.keywords.values()])
            return self.read(value.func)
        if isinstance(value, types.MethodType):
            self._class(type(value.__self__))
            return self.read(value.__func__)
        value = _unwrapped(value)
        if isinstance(value, types.FunctionType):
            self._function(value)
        else:
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
        functions = [_unwrapped(member) for _, member in members]
        functions = [f for f in functions if isinstance(f, types.FunctionType)]
        stores = {name for f in functions for name in _names(f.__code__).stores}
        for name, member in members:
            if not (name in stores or name.startswith("__")):
                self._note(f"{kind.__qualname__}.{name}", [member])
        for function in functions:
            self._function(function)

    def _function(self, function: types.FunctionType) -> None:
        known = function.__globals__
        if _is_library(known.get("__name__")) or not self._is_new(function):
            return
        name, names = function.__qualname__, _names(function.__code__)
        self.found[name] = _text(function.__code__)
        self._note(f"a default of {name}", function.__defaults__ or ())
        self._note(f"a default of {name}", (function.__kwdefaults__ or {}).values())
        for at, value in sorted(_outside(function, names), key=_first):
            if at.rpartition(".")[2] in names.stores:
                continue
            self._note(at, [value])
            if callable(value):
                self.read(value)

    def _note(self, name: str, values: Any) -> None:
        for number, value in enumerate(values):
            key = f"{name} {number}" if number else name
            if isinstance(value, _PLAIN):
                self.found[key] = type(value), value
            elif isinstance(value, tuple):
                self._note(f"{key}[]", value)
            elif type(value) is np.ndarray and not value.dtype.hasobject:
                data = hashlib.blake2b(np.ascontiguousarray(value).data.cast("B"))
                self.found[key] = value.dtype.str, value.shape, data.digest()
            elif self._identities and not isinstance(value, _READ):
                self.found[key] = Same(value)


def _outside(function: types.FunctionType, names: _Code) -> Iterator[tuple[str, Any]]:
    """The values that a function names, and of modules and classes what of them."""
    known = {
        name: function.__globals__[name]
        for name in names.globals & function.__globals__.keys()
    }
    cells = function.__closure__ or ()
    for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
        with contextlib.suppress(ValueError):  # nothing is in it yet
            known[name] = cell.cell_contents
    for name, value in known.items():
        yield name, value
        if isinstance(value, types.ModuleType) and not _is_library(value.__name__):
            held = vars(value)
            found = names.attributes & held.keys()
            yield from ((f"{name}.{part}", held[part]) for part in found)


def _unwrapped(value: Any) -> Any:
    """A function without what Python and JAX put around it."""
    for _ in range(100):
        # A user's object may have something under any name; a linen module that is
        # bound runs its setup before it has not.
        plain = _is_library(type(value).__module__) and not _linen.is_module(value)
        asked = plain or isinstance(value, types.FunctionType)
        inner = getattr(value, "__wrapped__", None) if asked else None
        if inner is None:
            break
        value = inner
    return value


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
