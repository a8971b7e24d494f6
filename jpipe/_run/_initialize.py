"""Initial variables of layers: equal ones share one compiled program."""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import chex
import jax

from .._instructions._compile import executable
from .._instructions._transfer import Device
from .._layers import _nnx
from .._layers._alike import origin
from .._layers._initialize import init_with, strong
from .._layers._walk import Visit

PyTree = Any


class _Made(NamedTuple):
    """A compiled initializer, and the structures of what it gives."""

    run: Callable[[chex.PRNGKey], list[Any]]
    trees: list[Any]

    def __call__(self, key: chex.PRNGKey) -> PyTree:
        # What has the same text may have another structure, with other static fields.
        leaves = self.run(key)
        return jax.tree.unflatten(self.trees[-1], leaves)


class Initializers:
    """The compiled initializers of the layers that are made together.

    Random numbers take long to compile: layers that are equal, as the blocks of a
    Transformer are, share one program. That their initializers are functions of the key
    is seen by the second of them, which is traced too: one that takes the next of some
    arrays, or draws from NumPy, comes to something else each time.

    Args:
      device: where they run.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._made: dict[Hashable, list[_Made]] = {}

    def __call__(self, visit: Visit, key: chex.PRNGKey) -> dict[str, PyTree]:
        """Makes the variables of a layer, compiled on the device of the key.

        Args:
          visit: the layer, as it was met.
          key: its key.

        Returns:
          Its own variables, on the device of the key; those of an nnx module, which has
          them already, where they are.
        """
        layer, skips, borrowed = visit.layer, visit.skips, visit.borrowed
        if _nnx.is_module(layer.owner):
            # A compiled program would keep the values that the module has now.
            return jax.tree.map(strong, layer.init(key, visit.x))
        alike = origin(layer.source)
        if alike is None:
            return self._compiled(visit, key)(key)
        specs, tree = jax.tree.flatten((visit.x, tuple(skips.values()), borrowed))
        known = alike, layer.namespace, tuple(skips), tree, tuple(specs)
        made = self._made.setdefault(known, [])
        if len(made) < 2 or made[-1].run is not made[-2].run:
            made.append(self._compiled(visit, key))
        return made[-1](key)

    def _compiled(self, visit: Visit, key: chex.PRNGKey) -> _Made:
        trees = []

        def leaves(key: chex.PRNGKey) -> list[Any]:
            given = visit.x, visit.skips, visit.borrowed
            made = init_with(visit.layer, key, *given)
            made, tree = jax.tree.flatten(jax.tree.map(strong, made))
            trees.append(tree)
            return made

        return _Made(executable(jax.jit(leaves), key, self._device), trees)
