"""What layers were when a pipeline was made of them.

Programs are traced from a layer as it was. An nnx module may be changed afterwards, as
no linen module can: by its ``eval``, say. What was traced would not show that, and what
is traced later would: two models. So it is noticed.
"""

import operator
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from flax import nnx

from . import _nnx
from ._layer import Layer
from ._nnx_held import (
    MISSING,
    differences,
    form,
    is_own,
    is_passing,
    may_change_in_place,
    told,
    variables,
)
from ._nnx_rngs import Path, dotted
from ._nnx_watch import SWITCHES


class _Node:
    """A part of a layer, and what its attributes held when it was looked at.

    Args:
      path: where it is: the number of the layer, and the path in it.
      node: the part.
    """

    def __init__(self, path: Path, node: nnx.Pytree) -> None:
        self.path, self.kind, self.held = path, type(node), vars(node)
        self._node = node
        self._all_names = frozenset(self.held)
        own = {name: value for name, value in self.held.items() if _counts(name, value)}
        self._names, self._values = tuple(own), tuple(own.values())
        self.forms = {name: _form(name, value) for name, value in own.items()}
        self._containers = [
            name for name, value in own.items() if may_change_in_place(value)
        ]
        self.variables = [
            found for name in own for found in variables((*path, name), own[name])
        ]

    def is_the_same(self) -> bool:
        """Whether it holds the same objects."""
        return (
            type(self._node) is self.kind
            and self.held.keys() == self._all_names
            and all(map(operator.is_, map(self.held.get, self._names), self._values))
            and not any(
                any(differences((), self.forms[name], form(self.held[name])))
                for name in self._containers
            )
        )

    def differences(self, now: "_Node") -> Iterator[tuple[Path, Any, Any]]:
        """Where it is something else now, but for the values of arrays."""
        if self.kind is not now.kind:
            yield (
                (*self.path, "__class__"),
                self.kind.__qualname__,
                now.kind.__qualname__,
            )
        # What is set on the object first may be an attribute of its class, as one that
        # `eval` sets.
        of_class = {
            name: _form(name, getattr(self.kind, name, MISSING)) for name in now.forms
        }
        for name, before in {**of_class, **self.forms}.items():
            after = now.forms.get(name, MISSING)
            yield from differences((*self.path, name), before, after)


class _Metadata:
    """The metadata of Variables, all compared at once: each takes 0.3 microseconds."""

    def __init__(self, nodes: Sequence[_Node]) -> None:
        found = [variable for node in nodes for _, variable in node.variables]
        self._getters = [variable.get_metadata for variable in found]
        self._names, self._values = self._all()
        self._containers = [
            (value, form(value)) for value in self._values if may_change_in_place(value)
        ]

    def is_the_same(self) -> bool:
        names, values = self._all()
        return (
            names == self._names
            and all(map(operator.is_, values, self._values))
            and not any(
                any(differences((), before, form(value)))
                for value, before in self._containers
            )
        )

    def _all(self) -> tuple[list[str], list[Any]]:
        all_metadata = [get() for get in self._getters]
        values = map(dict.values, all_metadata)
        return [*chain.from_iterable(all_metadata)], [*chain.from_iterable(values)]


class Unchanged:
    """The attributes of all nnx modules of a pipeline.

    Args:
      layers: all layers, in order.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._modules = {
            number: layer
            for number, layer in enumerate(layers)
            if _nnx.is_module(layer.owner)
        }
        self._nodes = self._look()
        self._metadata = _Metadata(self._nodes)

    def check(self) -> None:
        """Checks that they are what they were. Takes a microsecond for each part.

        Raises:
          ValueError: with every attribute that was changed.
        """
        nodes = self._nodes
        if all(node.is_the_same() for node in nodes) and self._metadata.is_the_same():
            return
        # Other objects, as weights that were loaded, may be as good: then these count.
        nodes = self._look()
        if faults := list(self._faults(nodes)):
            raise ValueError(
                "modules were changed after the pipeline was made of them; make a new "
                "one, which takes the same variables and states; to evaluate change "
                "nothing, pipe.apply evaluates all:\n"
                + "\n".join(f"  * {fault}" for fault in faults)
            )
        self._nodes, self._metadata = nodes, _Metadata(nodes)

    def _look(self) -> list[_Node]:
        return [
            _Node((number, *path), node)
            for number, layer in self._modules.items()
            for path, node in nnx.iter_graph(layer.owner, graph=True)
            if isinstance(node, nnx.Pytree)
        ]

    def _faults(self, nodes: Sequence[_Node]) -> Iterator[str]:
        now = {id(node.held): node for node in nodes}
        for before in self._nodes:
            # A part that was replaced is told by what held it.
            if node := now.get(id(before.held)):
                for path, old, new in before.differences(node):
                    yield f"{self._at(path)} {told(old, new)}"
        ties, tied = _first_holders(self._nodes), _first_holders(nodes)
        for path in ties.keys() & tied.keys():
            if ties[path] != tied[path]:
                yield (
                    f"{self._at(path)} was the Variable {self._at(ties[path])} and is "
                    f"{self._at(tied[path])}"
                )

    def _at(self, path: Path) -> str:
        number, *inner = path
        layer = self._modules[number]
        return f"{dotted(tuple(inner))} of layer {number} ({layer.name})"


def _counts(name: str, value: Any) -> bool:
    return is_own(name) and not is_passing(value)


def _form(name: str, value: Any) -> Any:
    """The form of an attribute; training turns a switch on that is left open."""
    return form(False if value is None and name in SWITCHES else value)


def _first_holders(nodes: Sequence[_Node]) -> dict[Path, Path]:
    """Of each Variable that is held, by its path, the first path that holds it."""
    first: dict[int, Path] = {}
    return {
        path: first.setdefault(id(variable), path)
        for node in nodes
        for path, variable in node.variables
    }
