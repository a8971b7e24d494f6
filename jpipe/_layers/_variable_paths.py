"""The variables of a layer, flat by their names and nested."""

from collections.abc import Iterator, Mapping
from typing import Any

PyTree = Any
# The path of a variable in the entry of a layer: its collection, the names of the
# modules that lead to it, its name.
Names = tuple[Any, ...]


def flatten_variables(entry: Mapping[str, PyTree]) -> dict[Names, PyTree]:
    """The variables of a layer by their names; a value is all that is no mapping."""
    return dict(_items(entry, ()))


def _items(entry: Mapping[Any, PyTree], names: Names) -> Iterator[tuple[Names, PyTree]]:
    for name, value in entry.items():
        if isinstance(value, Mapping):
            yield from _items(value, (*names, name))
        else:
            yield (*names, name), value


def nest_variables(variables: Mapping[Names, PyTree]) -> dict[str, PyTree]:
    """The nested variables of a layer: undoes `flatten_variables`."""
    entry: dict[Any, Any] = {}
    for (*module_names, name), value in variables.items():
        module_entry = entry
        for module_name in module_names:
            module_entry = module_entry.setdefault(module_name, {})
        module_entry[name] = value
    return entry


def variable_text(entry: str, names: Names) -> str:
    """A variable as Python writes it: ``variables[0]['params']['kernel']``."""
    return entry + "".join(f"[{name!r}]" for name in names)
