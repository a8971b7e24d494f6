"""The path of a variable in the entry of a layer, and how it is written."""

from typing import Any

# Its collection, the names of the modules that lead to it, its name: a key of
# `flax.nnx.traversals.flatten_mapping`.
Names = tuple[Any, ...]


def variable_text(entry: str, names: Names) -> str:
    """A variable as Python writes it: ``variables[0]['params']['kernel']``."""
    return entry + "".join(f"[{name!r}]" for name in names)
