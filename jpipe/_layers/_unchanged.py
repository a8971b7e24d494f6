"""What layers were when a pipeline was made of them.

Programs are traced from a layer as it was. An nnx module may be changed afterwards, as
no linen module can: by its ``eval``, say. What was traced would not show that, and what
is traced later would: two models. So it is noticed.
"""

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from flax import nnx

from . import _nnx
from ._layer import Layer
from ._nnx_lasting import is_array, is_own, is_same
from ._nnx_rngs import dotted


class _Node(NamedTuple):
    """A part of a layer, with its attributes but those that hold arrays."""

    layer: int
    name: str
    path: tuple[Any, ...]
    kind: type
    held: dict[str, Any]
    all_names: frozenset[str]
    names: tuple[str, ...]
    values: tuple[Any, ...]


class Unchanged:
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
            if node.held.keys() != node.all_names
            or not all(map(operator.is_, map(node.held.get, node.names), node.values))
        ]
        faults = [fault for node in changed for fault in _faults(node)]
        if faults:
            raise ValueError(
                "modules were changed after the pipeline was made of them; make a new "
                "one, which takes the same variables and states; to evaluate change "
                "nothing, pipe.apply evaluates all:\n"
                + "\n".join(f"  * {fault}" for fault in faults)
            )


def _node(number: int, name: str, path: tuple[Any, ...], node: Any) -> _Node:
    held = vars(node)
    static = {key: value for key, value in held.items() if _is_static(key, value)}
    return _Node(
        number,
        name,
        path,
        type(node),
        held,
        frozenset(held),
        tuple(static),
        tuple(static.values()),
    )


def _is_static(name: str, value: Any) -> bool:
    return is_own(name) and not (isinstance(value, nnx.Variable) or is_array(value))


def _faults(node: _Node) -> list[str]:
    # What is set on the object first may be an attribute of its class, as one that
    # `eval` sets.
    new = {
        name: getattr(node.kind, name, None)
        for name, value in node.held.items()
        if name not in node.all_names and _is_static(name, value)
    }
    before = {**dict(zip(node.names, node.values, strict=True)), **new}
    return [
        f"{dotted((*node.path, name))} of layer {node.layer} ({node.name}) was "
        f"{value!r} and is {node.held.get(name)!r}"
        for name, value in before.items()
        if not is_same(value, node.held.get(name))
    ]
