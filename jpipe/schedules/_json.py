"""Schedules, plans and profiles of JSON: read by the types of their fields.

Nothing is computed with a text before each of its parts has the type that its field has
in the dataclass: an object for a dataclass, a list for a tuple, a text for an action.
"""

import contextlib
import dataclasses
import functools
import json
import os
import reprlib
import types
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral, Real
from pathlib import PurePath
from typing import Any, Union, get_args, get_origin, get_type_hints

from ._action import Action

# What reading a text may raise. A number of thousands of digits is a ValueError, one
# that no float can hold an ArithmeticError.
_MISFITS = (
    *(AttributeError, TypeError, LookupError, ArithmeticError, RecursionError),
    ValueError,
)
# The plain types of fields: the classes of their values, and these in words.
_PLAIN: Mapping[type, tuple[type, str]] = {
    bool: (bool, "true or false"),
    int: (Integral, "an int"),
    float: (Real, "a number"),
    str: (str, "a text"),
}
# So many faults are listed.
_MOST = 20


@contextlib.contextmanager
def reading(
    refusal: str, text: Any, error_type: type[ValueError] = ValueError
) -> Iterator[Any]:
    """Yields what a JSON text holds, and reports what does not fit in its body.

    Args:
      refusal: how the error begins.
      text: the text.
      error_type: the class of the error.

    Raises:
      ValueError: with what does not fit; of the class ``error_type``.
    """
    try:
        yield json.loads(text)
    except _MISFITS as error:
        advice = "; give its text, not its path" if _is_path(text) else ""
        raise error_type(f"{refusal}: {_in_words(error)}{advice}") from None


def value_of(hint: Any, json_value: Any) -> Any:
    """The value of a type that was written as JSON.

    Args:
      hint: the type: a dataclass, a tuple, a mapping from texts, or plain.
      json_value: what `json.loads` returned; dataclasses as dicts.

    Raises:
      ValueError: with every part that is of another type.
    """
    faults: list[str] = []
    value = _value(hint, json_value, "", faults)
    if len(faults) > _MOST:
        faults[_MOST:] = ["and more"]
    if faults:
        raise ValueError("; ".join(faults))
    return value


def _value(hint: Any, json_value: Any, where: str, faults: list[str]) -> Any:
    """The value of a type; notes what is of another one, and where it stands."""
    if get_origin(hint) in (Union, types.UnionType):
        hint, *others = get_args(hint)
        if json_value is None and types.NoneType in others:
            return None
    if hint is Any:  # whoever simulates with it checks it
        return json_value
    if hint is Action:
        return _action(json_value, where, faults)
    if dataclasses.is_dataclass(hint):
        return _instance(hint, json_value, where, faults)
    if get_origin(hint) is tuple or hasattr(hint, "_make"):
        return _tuple(hint, json_value, where, faults)
    if get_origin(hint) is Mapping:
        return _mapping(hint, json_value, where, faults)
    expected_type, expected = _PLAIN[hint]
    is_bool = isinstance(json_value, bool)  # to Python an int
    if not isinstance(json_value, expected_type) or is_bool != (hint is bool):
        faults.append(_fault(json_value, where, expected))
    return json_value


def _instance(cls: Any, json_value: Any, where: str, faults: list[str]) -> Any:
    """An instance of a dataclass."""
    if not isinstance(json_value, dict):
        faults.append(_fault(json_value, where, "an object"))
        return None
    hints = _hints(cls)
    path = f"{where}." if where else ""
    required = [
        field.name
        for field in dataclasses.fields(cls)
        if field.default is field.default_factory is dataclasses.MISSING
    ]
    missing = [name for name in required if name not in json_value]
    unknown = [name for name in json_value if name not in hints]
    faults += [f"{path}{name} is missing" for name in missing]
    faults += [f"{path}{reprlib.repr(name)[1:-1]} is unknown" for name in unknown]
    values = {
        name: _value(hints[name], value, f"{path}{name}", faults)
        for name, value in json_value.items()
        if name in hints
    }
    return None if missing else cls(**values)


def _tuple(hint: Any, json_value: Any, where: str, faults: list[str]) -> Any:
    """A tuple, of any length or of one value for each type; or a named one."""
    if not isinstance(json_value, list | tuple):
        faults.append(_fault(json_value, where, "a list"))
        return None
    is_named = hasattr(hint, "_make")
    hints: Sequence[Any] = [*_hints(hint).values()] if is_named else get_args(hint)
    if hints[-1] is Ellipsis:
        hints = hints[:1] * len(json_value)
    if len(hints) != len(json_value):
        faults.append(_fault(json_value, where, f"{len(hints)} entries"))
        return None
    pairs = zip(hints, json_value, strict=True)
    values = [
        _value(part_hint, part, f"{where}[{i}]", faults)
        for i, (part_hint, part) in enumerate(pairs)
    ]
    return hint._make(values) if is_named else tuple(values)


def _mapping(hint: Any, json_value: Any, where: str, faults: list[str]) -> Any:
    """A mapping from texts."""
    if not isinstance(json_value, Mapping):
        faults.append(_fault(json_value, where, "an object"))
        return None
    _, value_hint = get_args(hint)
    return {
        key: _value(value_hint, value, f"{where}[{reprlib.repr(key)}]", faults)
        for key, value in json_value.items()
    }


def _action(json_value: Any, where: str, faults: list[str]) -> Action | None:
    """An action, of its text."""
    try:
        return Action.parse(json_value)
    except ValueError as error:
        faults.append(f"{where}: {error}")
        return None


@functools.cache
def _hints(cls: Any) -> Mapping[str, Any]:
    """The types of the fields of a class, by name and in their order."""
    return get_type_hints(cls)


def _fault(json_value: Any, where: str, expected: str) -> str:
    return f"{where or 'it'} is {reprlib.repr(json_value)}, needs {expected}"


def _in_words(error: Exception) -> str:
    """The text of an error; before that of one that Python raised its name."""
    is_plain = isinstance(error, ValueError) and not isinstance(
        error, json.JSONDecodeError
    )
    return str(error) if is_plain else f"{type(error).__name__}: {error}"


def _is_path(text: Any) -> bool:
    """Whether something is no JSON but the path of a file."""
    if not isinstance(text, str):
        return isinstance(text, os.PathLike)
    is_line = text.strip() and "\n" not in text and text.lstrip()[0] not in '{["'
    return bool(is_line) and bool(PurePath(text).suffix or PurePath(text).parent.name)
