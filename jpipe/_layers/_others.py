"""What a parameter could be in place of its default, to see what it decides."""

import dataclasses
import enum
from collections.abc import Callable
from typing import Any

import numpy as np


class _Text(str):
    """A string that equals whatever the given one does not."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return not str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other


class _Bytes(bytes):
    """Bytes that equal whatever the given ones do not."""

    __slots__ = ()
    __hash__ = bytes.__hash__

    def __eq__(self, other: object) -> bool:
        return not bytes.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other


class _Everything(tuple):
    """A tuple, or a set, that holds whatever is looked for in it."""

    __slots__ = ()

    def __contains__(self, value: object) -> bool:
        return True

    def __bool__(self) -> bool:
        return True


def others(default: Any) -> list[Any]:
    """What a parameter could be in place of its default, if that may be a switch."""
    if default is None:
        return [True, False]
    if isinstance(default, bool | np.bool_):
        return [not default]
    if isinstance(default, enum.Enum):
        return [value for value in type(default) if value is not default]
    if isinstance(default, str):
        return [_Text(default)]
    if isinstance(default, bytes):
        return [_Bytes(default)]
    if isinstance(default, int | float):
        return [value for value in (0, 1, default + 1) if value != default]
    return _others_within(default)


def _others_within(default: Any) -> list[Any]:
    """The same of what holds other values, each of them another alone."""
    if dataclasses.is_dataclass(default) and not isinstance(default, type):
        fields = [field.name for field in dataclasses.fields(default) if field.init]
        held = {name: getattr(default, name) for name in fields}
        return _each(held, lambda one: dataclasses.replace(default, **one))
    if isinstance(default, tuple) and hasattr(default, "_fields"):
        named: Any = default
        return _each(named._asdict(), lambda one: named._replace(**one))
    if isinstance(default, dict):
        return _each(default, lambda one: {**default, **one})
    if isinstance(default, tuple | frozenset):
        return [_Everything(default)]
    return []


def _each(held: dict[Any, Any], replaced: Callable[[dict], Any]) -> list[Any]:
    """What it could be with one of the switches that it holds turned."""
    return [
        replaced({name: other})
        for name, value in held.items()
        if isinstance(value, bool | str | enum.Enum)
        for other in others(value)
    ]


def may_switch(default: Any) -> bool:
    """Whether a default is rather of a switch than of a size, an axis or a mask."""
    known = isinstance(default, bool | np.bool_ | enum.Enum | str | bytes)
    return known or bool(_others_within(default))
