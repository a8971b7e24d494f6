"""Whose a variable is: that of the module that makes it, in whatever layers it stands.

A module may stand in several layers: listed twice, as an attribute of two modules, as
a part of a bound module that is listed too. As under one Flax parent, what it makes is
one value. It stands in the entry of the first layer that needs it, by the names that
it has there; a later layer borrows it, and owns what its own use adds. A Variable of
nnx is known by itself, in whatever modules it is held.
"""

import dataclasses
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from flax import linen

from .. import _compat
from . import _linen, _nnx_values
from ._layer import Layer
from ._tree import Names


class Key(NamedTuple):
    """What a variable is known by, in whatever layer it stands.

    Attributes:
      root: the identity of a module that the user made, which a `copy.copy` has too; of
        the tree of modules that it is bound in, if it is.
      collection: the collection of the variable.
      names: the names that lead to it from there.
    """

    root: Hashable
    collection: str
    names: Names


class _Made(NamedTuple):
    """A module that the user made, or a Variable of nnx.

    Attributes:
      root: see `Key`.
      names: those that lead to it from there.
      identity: by what Flax knows it.
    """

    root: Hashable
    names: Names
    identity: Hashable


class Sharing:
    """Which variables of some layers are one.

    Args:
      layers: all layers, in order.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        # Of each layer the modules that the user made, by the names that lead to them.
        self._modules = [_modules(layer) for layer in layers]

    def key(self, layer: int, names: Names) -> Key:
        """What a variable of a layer is known by."""
        collection, *inner = names
        made = self._modules[layer]
        # That of the innermost module: it makes the variable.
        end = next(n for n in range(len(inner), -1, -1) if tuple(inner[:n]) in made)
        root, before, _ = made[tuple(inner[:end])]
        return Key(root, collection, (*before, *inner[end:]))

    def roots(self, layer: int) -> set[Hashable]:
        """The roots of all modules of a layer."""
        return {made.root for made in self._modules[layer].values()}

    def made(self, layer: int) -> dict[Names, Hashable]:
        """The modules of a layer that the user made, by what Flax knows them."""
        return {names: made.identity for names, made in self._modules[layer].items()}

    def lends(self, layer: int) -> bool:
        """Whether a module in the attributes of a layer is in another layer too."""
        inner = {made.root for names, made in self._modules[layer].items() if names}
        others = (self.roots(i) for i in range(len(self._modules)) if i != layer)
        return any(inner & roots for roots in others)

    def place(self, layer: int, key: Key) -> Names | None:
        """Where a variable would stand in a layer, if one of its modules makes it."""
        for names, (root, before, _) in self._modules[layer].items():
            after = key.names[len(before) :]
            if root == key.root and key.names[: len(before)] == before:
                place = key.collection, *names, *after
                if self.key(layer, place) == key:
                    return place
        return None


def _modules(layer: Layer) -> dict[Names, _Made]:
    owner = layer.owner
    found = {(): _identity(owner)}
    for path, identity in _nnx_values.identities(owner).items():
        found[path] = _Made(identity, (), identity)
    if _linen.is_module(owner) and any(True for _ in _held(owner)):
        # Flax itself says what it calls those that it finds in attributes.
        _find(owner, owner.bind({}), found)
    return found


def _find(module: Any, bound: Any, found: dict[Names, _Made]) -> None:
    for inner, copy in zip(_held(module), _held(bound), strict=True):
        if copy.path not in found:
            found[copy.path] = _identity(inner)
            _find(inner, copy, found)


def _held(module: linen.Module) -> Iterator[linen.Module]:
    """The modules in the attributes of a module."""
    for field in dataclasses.fields(module):
        if field.name not in ("parent", "name"):
            yield from _in(getattr(module, field.name, None))


def _in(value: Any) -> Iterator[linen.Module]:
    if _linen.is_module(value):
        yield value
    elif isinstance(value, Mapping):  # whose keys JAX could not always sort
        for name in sorted(value, key=str):
            yield from _in(value[name])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _in(item)
    else:
        leaves = jax.tree.leaves(value, is_leaf=_linen.is_module)
        yield from filter(_linen.is_module, leaves)


def _identity(module: Any) -> _Made:
    identity = _compat.identity(module)
    if _linen.is_module(module) and module.scope is not None:
        return _Made(id(module.scope.root), module.path, identity)
    return _Made(identity, (), identity)
