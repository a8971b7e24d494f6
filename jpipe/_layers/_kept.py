"""What nnx modules were when a pipeline was made of them.

Programs are traced from a module as it was. It may be changed afterwards, as no linen
module can: by its ``eval``, say. What was traced would not show that, and what is
traced later would: two models. So it is noticed.
"""

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from . import _nnx
from ._layer import Layer
from ._nnx_rngs import dotted


class _Node(NamedTuple):
    """A part of a layer, with its attributes but those that hold arrays."""

    layer: int
    name: str
    path: tuple[Any, ...]
    held: dict[str, Any]
    names: tuple[str, ...]
    values: tuple[Any, ...]


class Kept:
    """The attributes of all nnx modules of a pipeline.

    Args:
      layers: all layers, in order.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._nodes = [
            _node(number, layer.name, tuple(path), node)
            for number, layer in enumerate(layers)
            if _nnx.is_module(layer.owner)
            for path, node in nnx.iter_graph(layer.owner, graph=True)
            if isinstance(node, nnx.Pytree)
        ]

    def check(self) -> None:
        """Checks that they are what they were. Takes a microsecond for each part.

        Raises:
          ValueError: with every attribute that was changed.
        """
        changed = [
            node
            for node in self._nodes
            if not all(map(operator.is_, map(node.held.get, node.names), node.values))
        ]
        faults = [fault for node in changed for fault in _faults(node)]
        if faults:
            raise ValueError(
                "modules were changed after the pipeline was made of them; make a new "
                "one, which takes the same variables and states:\n"
                + "\n".join(f"  * {fault}" for fault in faults)
            )


def _node(number: int, name: str, path: tuple[Any, ...], node: Any) -> _Node:
    held = vars(node)
    static = {key: value for key, value in held.items() if _is_static(key, value)}
    return _Node(number, name, path, held, tuple(static), tuple(static.values()))


def _is_static(name: str, value: Any) -> bool:
    return not name.startswith("_pytree__") and not isinstance(
        value, nnx.Variable | jax.Array | np.ndarray
    )


def _faults(node: _Node) -> list[str]:
    faults = []
    for name, before in zip(node.names, node.values, strict=True):
        now = node.held.get(name)
        plain = isinstance(before, bool | int | float | str | tuple | None)
        if now is before or (plain and type(now) is type(before) and now == before):
            continue
        where = dotted((*node.path, name))
        faults.append(
            f"{where} of layer {node.layer} ({node.name}) was {before!r} and is {now!r}"
        )
    return faults
