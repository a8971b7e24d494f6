"""Short texts of arrays and layers, for messages and tables."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax

PyTree = Any
# The number of names of layers in a line, at most.
_MAX_RUNS = 6


def abbreviate(names: Sequence[str]) -> str:
    """Names in one line: ``Block x 3, Dense``, or ``Conv, relu, ..., Dense (93)``."""
    runs = []
    for name, equal_names in itertools.groupby(names):
        length = len(list(equal_names))
        runs.append(name if length == 1 else f"{name} x {length}")

    if len(runs) <= _MAX_RUNS:
        return ", ".join(runs)
    half = _MAX_RUNS // 2
    first_runs = ", ".join(runs[:half])
    last_runs = ", ".join(runs[-half:])
    return f"{first_runs}, ..., {last_runs} ({len(names)})"


def shape_text(tree: PyTree) -> str:
    """A pytree as text: ``float32[8,16]`` in place of each array."""
    return str(jax.tree.map(_ShapeText, tree))


class _ShapeText:
    def __init__(self, leaf: Any) -> None:
        shape = ",".join(map(str, getattr(leaf, "shape", ())))
        self.text = f"{getattr(leaf, 'dtype', type(leaf).__name__)}[{shape}]"

    def __repr__(self) -> str:
        return self.text
