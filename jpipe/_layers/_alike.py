"""Which layers are alike, so that what is made for one serves all.

Two are, if nothing that they hold tells them apart. Python's ``==`` does not ask that:
to it 1 and 1.0 are equal, and a class says itself what to leave out. A name that a
linen module was given is something it holds: blocks with names of their own differ.
"""

import dataclasses
import functools
import types
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from flax import linen as nn
from flax.core import FrozenDict
from flax.typing import HashableMapping
from jax.tree_util import PyTreeDef

from . import _linen, _nnx
from ._layer import Layer, split

_ATOMS = (types.NoneType, bool, int, float, complex, str, bytes)
_MAPPINGS = (dict, FrozenDict, HashableMapping)
# Flax's notes on a linen module and on the call that it is in, not what it is.
_NOTES = {"_id", "_state"}


def origin(source: Any) -> Hashable:
    """What is equal for layers that are made and applied alike.

    Args:
      source: the object that the user listed.

    Returns:
      Something hashable for linen modules and their methods; ``None`` for others,
      of which it cannot be told how they are made.
    """
    module, method = split(source)
    if not _linen.is_module(module):
        return None
    content = Content()
    return content.of(module), content.of(method)


def behaviour(layer: Layer) -> Hashable:
    """What is equal for layers that do the same with the same variables.

    Args:
      layer: a layer.

    Returns:
      Something hashable.
    """
    source, method = split(layer.source)
    if _nnx.is_module(source):
        # The values that a pipeline does not carry are part of the function.
        static, is_whole = _nnx.static(source)
        source = static if is_whole else source
    content = Content()
    return content.of(source), content.of(method), layer.namespace


class Same:
    """An object that is equal to itself only; it stays alive as long as this."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


class Content:
    """Reads what an object holds, down to what can only be told by identity."""

    def __init__(self) -> None:
        # One module held twice is not two that are alike: its parameters are shared.
        self._met: dict[int, tuple[int, Any]] = {}

    def of(self, value: Any) -> Hashable:
        """Something hashable that is equal for objects that hold the same."""
        cls = type(value)
        if cls in _ATOMS:
            return cls, repr(value)  # which tells 0.0 from -0.0
        if cls is PyTreeDef:
            return cls, value
        if cls in (tuple, list) or _is_named_tuple(cls):
            return cls, tuple(map(self.of, value))
        if cls in _MAPPINGS:
            return cls, self.items(value)
        if cls is functools.partial:
            return cls, *map(self.of, (value.func, value.args, value.keywords))
        if cls is types.MethodType:
            return cls, self.of(value.__self__), Same(value.__func__)
        if cls is types.FunctionType:
            return cls, self._function(value)
        if not dataclasses.is_dataclass(cls) or holds_more(cls):
            return self.other(value)
        return cls, self.once(value, attributes)

    def other(self, value: Any) -> Hashable:
        """What tells an object apart of which it cannot be told what it holds."""
        return Same(value)

    def _function(self, value: types.FunctionType) -> Hashable:
        """What a function is: functions made in a loop have one code."""
        try:
            closure = [cell.cell_contents for cell in value.__closure__ or ()]
        except ValueError:  # one is empty yet
            return Same(value)
        held = {
            "defaults": value.__defaults__,
            "keywords": value.__kwdefaults__,
            "attributes": vars(value),
            "closure": closure,
        }
        code = Same(value.__code__), Same(value.__globals__)
        return code, self.once(value, lambda _: held)

    def once(self, value: Any, read: Callable[[Any], Mapping[str, Any]]) -> Hashable:
        """What an object holds; where it is met again, which one it is."""
        if id(value) in self._met:
            return self._met[id(value)][0]
        self._met[id(value)] = len(self._met), value
        return self.items(read(value))

    def items(self, mapping: Mapping[Any, Any]) -> Hashable:
        """What a mapping holds, in its order."""
        return tuple((self.of(key), self.of(item)) for key, item in mapping.items())


def _is_named_tuple(cls: type) -> bool:
    # With a __dict__ it is derived from a named tuple, and may hold more.
    return issubclass(cls, tuple) and hasattr(cls, "_fields") and not cls.__dictoffset__


def holds_more(cls: type) -> bool:
    """Whether instances of a dataclass hold more than fields and a ``__dict__``."""
    names = {field.name for field in dataclasses.fields(cls)}
    # Another __new__ is that of a builtin, which holds items, or the user's own.
    return cls.__new__ is not object.__new__ or not _slots(cls) <= names


def _slots(cls: type) -> set[str]:
    slots: set[str] = set()
    for base in cls.__mro__:
        own = vars(base).get("__slots__", ())
        slots |= {own} if isinstance(own, str) else set(own)
    return slots - {"__dict__", "__weakref__"}


def attributes(value: Any) -> dict[str, Any]:
    """The fields of an instance of a dataclass, and what else was set on it."""
    names = [field.name for field in dataclasses.fields(value)]
    notes = _NOTES if isinstance(value, nn.Module) else set()
    others = [name for name in getattr(value, "__dict__", ()) if name not in names]
    return {
        name: getattr(value, name)
        for name in [*names, *others]
        if name not in notes and hasattr(value, name)
    }
