"""Reads schedules, plans and profiles from JSON, by the types of their fields.

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

# Errors that malformed JSON can raise. A number of thousands of digits is a ValueError,
# one that no float can hold an ArithmeticError.
_JSON_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
# Type of a field -> the class of its values, and their description.
_SIMPLE_TYPES: Mapping[type, tuple[type, str]] = {
    bool: (bool, "true or false"),
    int: (Integral, "an int"),
    float: (Real, "a number"),
    str: (str, "a text"),
}
# The most faults that are listed.
_MAX_FAULTS = 20


@contextlib.contextmanager
def parse_json(
    refusal: str, text: Any, error_type: type[ValueError] = ValueError
) -> Iterator[Any]:
    """Yields the value of a JSON text; reports errors of the ``with`` body as its own.

    Args:
      refusal: the beginning of the error message.
      text: the text.
      error_type: the class of the error.

    Raises:
      ValueError: with what does not fit; of the class ``error_type``.
    """
    try:
        yield json.loads(text)
    except _JSON_ERRORS as error:
        advice = "; give its text, not its path" if _is_path(text) else ""
        raise error_type(f"{refusal}: {_in_words(error)}{advice}") from None


def decode(hint: Any, json_value: Any) -> Any:
    """Decodes a value that was written as JSON.

    Args:
      hint: its type: a dataclass, a tuple, a mapping from texts or ints, or a simple
        type.
      json_value: the result of `json.loads`; dataclasses as dicts.

    Raises:
      ValueError: with every part that is of another type.
    """
    faults: list[str] = []
    value = _decode(hint, json_value, "", faults)
    if len(faults) > _MAX_FAULTS:
        faults[_MAX_FAULTS:] = ["and more"]
    if faults:
        raise ValueError("; ".join(faults))
    return value


def _decode(hint: Any, json_value: Any, path: str, faults: list[str]) -> Any:
    """Decodes a value; appends what is of another type to ``faults``.

    Args:
      hint: the type of the value.
      json_value: the JSON value.
      path: the path to it in the whole text, such as ``rows[0][1]``.
      faults: the faults so far.
    """
    if get_origin(hint) in (Union, types.UnionType):
        hint, *alternatives = get_args(hint)
        if json_value is None and types.NoneType in alternatives:
            return None
    if hint is Any:  # numbers of costs: `check_costs` checks them
        return json_value
    if hint is Action:
        return _decode_action(json_value, path, faults)
    if dataclasses.is_dataclass(hint):
        return _decode_dataclass(hint, json_value, path, faults)
    if get_origin(hint) is tuple or hasattr(hint, "_make"):
        return _decode_tuple(hint, json_value, path, faults)
    if get_origin(hint) is Mapping:
        return _decode_mapping(hint, json_value, path, faults)
    expected_type, expected = _SIMPLE_TYPES[hint]
    is_bool = isinstance(json_value, bool)  # to Python an int
    if not isinstance(json_value, expected_type) or is_bool != (hint is bool):
        faults.append(_format_fault(json_value, path, expected))
    return json_value


def _decode_dataclass(cls: Any, json_value: Any, path: str, faults: list[str]) -> Any:
    if not isinstance(json_value, dict):
        faults.append(_format_fault(json_value, path, "an object"))
        return None
    hints = _field_types(cls)
    prefix = f"{path}." if path else ""
    required = [
        field.name
        for field in dataclasses.fields(cls)
        if field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    missing = [name for name in required if name not in json_value]
    unknown = [name for name in json_value if name not in hints]
    faults += [f"{prefix}{name} is missing" for name in missing]
    faults += [f"{prefix}{reprlib.repr(name)[1:-1]} is unknown" for name in unknown]
    values = {
        name: _decode(hints[name], value, f"{prefix}{name}", faults)
        for name, value in json_value.items()
        if name in hints
    }
    return None if missing else cls(**values)


def _decode_tuple(hint: Any, json_value: Any, path: str, faults: list[str]) -> Any:
    """Decodes a tuple ``(T, ...)`` or ``(T, U)``, or a named tuple."""
    if not isinstance(json_value, list | tuple):
        faults.append(_format_fault(json_value, path, "a list"))
        return None
    is_named = hasattr(hint, "_make")
    hints: Sequence[Any] = (
        [*_field_types(hint).values()] if is_named else get_args(hint)
    )
    if hints[-1] is Ellipsis:
        hints = hints[:1] * len(json_value)
    if len(hints) != len(json_value):
        faults.append(_format_fault(json_value, path, f"{len(hints)} entries"))
        return None
    values: list[Any] = []
    for index, (part_hint, part) in enumerate(zip(hints, json_value, strict=True)):
        values.append(_decode(part_hint, part, f"{path}[{index}]", faults))
    return hint._make(values) if is_named else tuple(values)


def _decode_mapping(hint: Any, json_value: Any, path: str, faults: list[str]) -> Any:
    """Decodes a mapping from texts, or from ints, which are texts in JSON."""
    if not isinstance(json_value, Mapping):
        faults.append(_format_fault(json_value, path, "an object"))
        return None
    key_hint, value_hint = get_args(hint)
    values: dict[Any, Any] = {}
    for text, value in json_value.items():
        key = text
        if key_hint is int and text.isdecimal():
            key = int(text)
        elif key_hint is int:
            faults.append(_format_fault(text, f"a key of {path}", "an int"))
        values[key] = _decode(value_hint, value, f"{path}[{reprlib.repr(key)}]", faults)
    return values


def _decode_action(json_value: Any, path: str, faults: list[str]) -> Action | None:
    try:
        return Action.parse(json_value)
    except ValueError as error:
        faults.append(f"{path}: {error}")
        return None


@functools.cache
def _field_types(cls: Any) -> Mapping[str, Any]:
    """The types of the fields of a class, by name and in their order."""
    return get_type_hints(cls)


def _format_fault(json_value: Any, path: str, expected: str) -> str:
    return f"{path or 'it'} is {reprlib.repr(json_value)}, needs {expected}"


def _in_words(error: Exception) -> str:
    """The text of an error, with its class if Python or the JSON parser raised it."""
    is_from_jpipe = isinstance(error, ValueError) and not isinstance(
        error, json.JSONDecodeError
    )
    return str(error) if is_from_jpipe else f"{type(error).__name__}: {error}"


def _is_path(text: Any) -> bool:
    """True if something looks like the path of a file, and not like JSON."""
    if not isinstance(text, str):
        return isinstance(text, os.PathLike)
    is_one_line = bool(text.strip()) and "\n" not in text
    if not is_one_line or text.lstrip()[0] in '{["':
        return False
    path = PurePath(text)
    return bool(path.suffix) or bool(path.parent.name)
