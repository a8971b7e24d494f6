"""What an nnx module holds in its attributes, in a form that can be compared.

Of an array the form says that it is one, and of a Variable its type and its metadata:
their values are carried outside of the module and may be any. All else is static, and
what was traced holds it as it was.
"""

import copy
from array import array
from collections import deque
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx

from ._nnx_rngs import Path


class _Named:
    """Stands for a value that is not compared."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


class _Variable:
    """Stands for a Variable of any value."""

    def __init__(self, variable: nnx.Variable) -> None:
        self.kind = type(variable)
        # Unlike those of attributes, its arrays are carried by nobody. They have no
        # order: transformations change it.
        self.metadata = {
            name: form(value) if may_change_in_place(value) else value
            for name, value in sorted(variable.get_metadata().items())
        }

    def __repr__(self) -> str:
        return f"an nnx.Variable of type {self.kind.__name__}"


# What is longer is not shown in a message.
_LONG = 100
_NUMBERS = bool | int | float | complex | np.generic
_PLAIN = _NUMBERS | str | bytes | range | slice | jax.sharding.PartitionSpec
MISSING, _ARRAY = _Named("missing"), _Named("an array")


def is_own(name: str) -> bool:
    """Whether an attribute is one of the user's, and none that nnx or we keep."""
    return not name.startswith(("_pytree__", "_jpipe_"))


def may_change_in_place(value: Any) -> bool:
    """Whether an attribute holds a container that may hold something else later."""
    if isinstance(value, tuple):
        return any(map(may_change_in_place, value))
    return isinstance(value, dict | list | set | deque | bytearray | array)


def is_passing(value: Any) -> bool:
    """Whether a value is a Variable that says nothing of what a module computes."""
    return isinstance(value, nnx.RngState | nnx.Intermediate)


def variables(path: Path, value: Any) -> Iterator[tuple[Path, nnx.Variable]]:
    """The Variables that an attribute holds, with their paths."""
    if isinstance(value, nnx.Variable):
        yield path, value
    elif isinstance(value, dict | list | tuple):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in parts:
            yield from variables((*path, key), part)


def detach(module: nnx.Module) -> None:
    """Gives a merged module lists and dicts of its own, so that a call writes to none.

    Merging makes its parts and its Variables anew, and takes what is static as it is.
    """
    copies: dict[int, Any] = {}
    for _, node in nnx.iter_graph(module, graph=True):
        if isinstance(node, nnx.Pytree):
            held = vars(node)
            held.update(
                (name, _copy(value, copies))
                for name, value in list(held.items())
                if is_own(name)
            )


def _copy(value: Any, copies: dict[int, Any]) -> Any:
    if type(value) not in (list, dict, tuple, set, deque, bytearray, array):
        return value
    if id(value) not in copies:
        if isinstance(value, dict):
            made = {key: _copy(part, copies) for key, part in value.items()}
        elif not isinstance(value, list | tuple):
            made = copy.copy(value)
        else:
            made = type(value)(_copy(part, copies) for part in value)
        copies[id(value)] = made
    return copies[id(value)]


def form(value: Any) -> Any:
    """What is compared of an attribute: a copy of containers, and kinds of arrays."""
    if isinstance(value, dict):
        return {key: form(part) for key, part in value.items()}
    if isinstance(value, list | tuple | deque):
        parts = [form(part) for part in value]
        return tuple(parts) if isinstance(value, tuple) else parts
    if isinstance(value, set):
        return frozenset(value)
    if isinstance(value, bytearray | array):
        return bytes(value)
    if isinstance(value, nnx.Variable):
        return _Variable(value)
    return _ARRAY if isinstance(value, jax.Array | np.ndarray) else value


def differences(path: Path, before: Any, now: Any) -> Iterator[tuple[Path, Any, Any]]:
    """Where two forms differ, as far as can be compared.

    Args:
      path: where they are.
      before: the one.
      now: the other.

    Yields:
      The path of each part that differs, with what it was and what it is.
    """
    alike = type(now) is type(before)
    if alike and isinstance(before, _Variable) and before.kind is now.kind:
        yield from differences(path, before.metadata, now.metadata)
    elif alike and isinstance(before, dict) and not _is_reordered(before, now):
        for key in {**before, **now}:
            parts = (held.get(key, MISSING) for held in (before, now))
            yield from differences((*path, key), *parts)
    elif alike and isinstance(before, list | tuple) and len(before) == len(now):
        for place, parts in enumerate(zip(before, now, strict=True)):
            yield from differences((*path, place), *parts)
    elif now is not before and not (alike and _is_equal(before, now)):
        yield path, before, now


def _is_equal(before: Any, now: Any) -> bool:
    """Whether two values of one type, other objects, are known to be equal."""
    if isinstance(before, frozenset):
        return before == now
    # 0.0 is not -0.0, and nan is nan.
    return isinstance(before, _PLAIN) and repr(before) == repr(now)


def _is_reordered(before: dict[Any, Any], now: dict[Any, Any]) -> bool:
    return before.keys() == now.keys() and list(before) != list(now)


def told(before: Any, now: Any) -> str:
    """That something was the one and is the other; of what is long, its type."""
    one, other = map(_shown, (before, now))
    return f"was {one} and is {'another' if one == other else other}"


def _shown(value: Any) -> str:
    text = repr(value)
    short = len(text) <= _LONG and "\n" not in text
    return text if short else f"a {type(value).__name__}"
