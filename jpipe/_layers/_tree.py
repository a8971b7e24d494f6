"""The variables of a layer by their names, and back."""

from collections.abc import Iterator, Mapping
from typing import Any

PyTree = Any
# Where a variable stands among those of a layer: its collection, then the names of
# the modules that lead to it, then its own.
Names = tuple[Any, ...]


def flat(entry: Mapping[str, PyTree]) -> dict[Names, PyTree]:
    """The variables of a layer by their names; what is not a mapping is a value."""
    return dict(_items(entry, ()))


def _items(entry: Mapping[Any, PyTree], names: Names) -> Iterator[tuple[Names, PyTree]]:
    for name, value in entry.items():
        if isinstance(value, Mapping):
            yield from _items(value, (*names, name))
        else:
            yield (*names, name), value


def nested(variables: Mapping[Names, PyTree]) -> dict[str, PyTree]:
    """The inverse of `flat`."""
    entry: dict[Any, Any] = {}
    for (*names, last), value in variables.items():
        inner = entry
        for name in names:
            inner = inner.setdefault(name, {})
        inner[last] = value
    return entry


def dotted(entry: str, names: Names) -> str:
    """A variable as Python finds it: ``variables[0]['params']['kernel']``."""
    return entry + "".join(f"[{name!r}]" for name in names)
