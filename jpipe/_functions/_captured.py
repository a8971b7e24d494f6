"""What a function holds that a user gave: a program is traced with it as it was then.

A plain function is told apart by identity, as for `jax.jit`; an object by what it
holds, which is read again at each call. Of an object whose code says which of its
attributes it reads, only these count: others, such as the step that a trainer whose
method is the loss has come to, may change as they like.
"""

import dataclasses
import dis
import functools
import inspect
import types
import warnings
from array import array
from collections import deque
from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from .._layers import _alike
from .._layers._alike import Content, Same

# What holds nothing that changes but by being another one.
_FIXED = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
    type,
    type(jax.jit(lambda: None)),
    jax.Array,
    np.ufunc,
    np.dtype,
)

# Builtins that find a local variable without naming it.
_SEE_ALL = {"locals", "eval", "exec", "super"}
# So often a function may hold something else before it is said what that costs.
_MANY = 5


class Holder:
    """A function, and what it holds now.

    Args:
      function: any callable.

    Attributes:
      changes: whether it may hold something else at another call; a plain function is
        told apart by identity.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.changes = not isinstance(function, _FIXED)
        # What it held after it was traced, to what it held before.
        self._before: dict[Hashable, Hashable] = {}
        self._seen: set[Hashable] = set()

    def read(self) -> Hashable:
        """What is equal as long as the function holds the same."""
        if not self.changes:
            return Same(self._function)
        held = self._read()
        if len(self._seen) < _MANY and held not in self._seen:
            self._seen.add(held)
            if len(self._seen) == _MANY:
                warnings.warn(
                    f"loss_fn={self._function!r} holds something else for the "
                    f"{_MANY}th time; each time all is compiled anew. Let it hold only "
                    f"what stays, and give what changes beside the targets",
                    stacklevel=2,
                )
        return held

    def traced(self, *args: Any) -> Any:
        """Calls the function, whose own changes tell no other function.

        They are made when it is traced and not when it runs, as under `jax.jit`.
        """
        if not self.changes:
            return self._function(*args)
        held = self._read()
        result = self._function(*args)
        after = _Held().callee(self._function)
        if after != held:
            self._before[after] = held
        return result

    def _read(self) -> Hashable:
        held = _Held().callee(self._function)
        return self._before.get(held, held)


class _Held(Content):
    """Reads what an object holds, and what the objects hold that it holds."""

    def callee(self, function: Callable[..., Any]) -> Hashable:
        """What is held by a function that is only called."""
        if isinstance(function, types.MethodType | functools.partial):
            return self.of(function)
        return self._read(function, type(function).__call__)

    def of(self, value: Any) -> Hashable:
        """See `Content.of`."""
        if type(value) is types.MethodType and not isinstance(value.__self__, type):
            function = value.__func__
            return (
                types.MethodType,
                Same(function),
                self._read(value.__self__, function),
            )
        return super().of(value)

    def other(self, value: Any) -> Hashable:
        """See `Content.other`."""
        cls = type(value)
        if isinstance(value, _FIXED):
            return Same(value)
        if isinstance(value, np.ndarray | array | bytearray):
            held = np.asarray(value)
            if not held.dtype.hasobject:
                about = self.once(value, _attributes)  # such as a mask
                return cls, held.dtype, held.shape, held.tobytes(), about
        return cls, Same(value), self._elements(value), self.once(value, _attributes)

    def _read(self, value: Any, method: Any) -> Hashable:
        """What a method finds in its object."""
        cls = type(value)
        names = _attributes_read(cls, method)
        if names is None:
            return self.of(value)
        found = self.items(
            {name: item for name, item in _attributes(value).items() if name in names}
        )
        return (cls, found) if _is_record(cls) else (cls, Same(value), found)

    def _elements(self, value: Any) -> Hashable:
        """What is in an object that is a collection too."""
        if isinstance(value, set | frozenset):
            return frozenset(map(self.of, value))
        if isinstance(value, dict):
            return self.items(value)
        return (
            tuple(map(self.of, value))
            if isinstance(value, list | tuple | deque)
            else ()
        )


def _is_record(cls: type) -> bool:
    """Whether instances are what they hold, whichever they are."""
    return dataclasses.is_dataclass(cls) and not _alike.holds_more(cls)


def _attributes(value: Any) -> dict[str, Any]:
    """All that was set on an object, in slots too."""
    if _is_record(type(value)):
        return _alike.attributes(value)
    found = dict(getattr(value, "__dict__", {}))
    for name in _slots(type(value)):
        if hasattr(value, name):
            found[name] = getattr(value, name)
    return found


@lru_cache(maxsize=256)
def _slots(cls: type) -> list[str]:
    return [
        name
        for base in cls.__mro__
        for name, member in vars(base).items()
        if isinstance(member, types.MemberDescriptorType)
    ]


@lru_cache(maxsize=256)
def _attributes_read(cls: type, function: Any) -> frozenset[str] | None:
    """The names of the attributes that a method reads of its object.

    Args:
      cls: the class of the object.
      function: the method, as a function.

    Returns:
      The names, those that methods called by it read too; ``None`` if its code does not
      tell: it hands the object on, say.
    """
    if any(hasattr(base, "__getattr__") for base in cls.__mro__):
        return None
    if cls.__getattribute__ is not object.__getattribute__:
        return None
    names: set[str] = set()
    todo = [function]
    while todo:
        found = _loaded(todo.pop())
        if found is None:
            return None
        for name in found - names:
            names.add(name)
            member = inspect.getattr_static(cls, name, None)
            if isinstance(member, property):
                member = member.fget
            if isinstance(member, types.FunctionType):
                todo.append(member)
            elif name == "__dict__" or not _is_plain(member):
                return None
    return frozenset(names)


def _is_plain(member: Any) -> bool:
    """Whether what stands in a class reads nothing of its instances."""
    plain = staticmethod | classmethod | types.MemberDescriptorType
    return isinstance(member, plain) or not hasattr(type(member), "__get__")


def _loaded(function: Any) -> set[str] | None:
    """The attributes that a function loads from its first argument.

    ``None`` if it does anything else with it.
    """
    code = getattr(function, "__code__", None)
    if not isinstance(code, types.CodeType) or not code.co_argcount:
        return None
    own = code.co_varnames[0]
    # A function in it may do what it likes; `super()` has the object without a load.
    if own in code.co_cellvars or "__class__" in code.co_freevars:
        return None
    if not _SEE_ALL.isdisjoint(code.co_names):
        return None
    names: set[str] = set()
    after_own = False
    for instruction in dis.get_instructions(code):
        name, value = instruction.opname, instruction.argval
        if after_own:
            if name not in ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR"):
                return None
            if name != "STORE_ATTR":
                names.add(value)
            after_own = False
            continue
        loaded = value if isinstance(value, tuple) else (value,)
        if own in loaded[:-1]:
            return None
        after_own = loaded[-1:] == (own,)
    return None if after_own else names
