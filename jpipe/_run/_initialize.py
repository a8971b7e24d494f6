"""Initial variables of layers: equal ones share one compiled program."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import chex
import jax

from .._instructions._compile import (
    Executable,
    compiling,
    drawing_options,
    is_ahead,
)
from .._instructions._transfer import Device
from .._layers import _nnx
from .._layers._alike import origin
from .._layers._initialize import init_with, strong
from .._layers._walk import Visit

PyTree = Any
Initializer = Callable[[chex.PRNGKey], PyTree]


def draws(visit: Visit) -> bool:
    """Whether a layer makes variables by a key; nnx modules have theirs already."""
    is_nnx = _nnx.is_module(visit.layer.owner)
    return bool(jax.tree.leaves(visit.variables)) and not is_nnx


class _Made(NamedTuple):
    """A compiled initializer, and the structures of what it gives."""

    executable: Executable
    trees: list[Any]

    def __call__(self, key: chex.PRNGKey) -> PyTree:
        # What has the same text may have another structure, with other static fields.
        leaves = self.executable.run(key)
        return jax.tree.unflatten(self.trees[-1], leaves)


def initializers(
    visits: Sequence[Visit], key: chex.PRNGKey, device: Device
) -> list[Initializer]:
    """What makes the variables of layers, compiled side by side.

    Random numbers take long to compile: layers that are equal, as the blocks of a
    Transformer are, share one program. That their initializers are functions of the key
    is seen by the second of them, which is traced too: one that takes the next of some
    arrays, or draws from NumPy, comes to something else each time.

    Args:
      visits: the layers, as they were met.
      key: one like those that they are given, on the device.
      device: where they run.

    Returns:
      For each layer a function of its key that gives its own variables, on the device;
      those of an nnx module, which has them already, where they are.
    """
    equal: dict[Hashable, list[_Made]] = {}
    with compiling() as add:

        def compiled(visit: Visit) -> _Made:
            trees = []

            def leaves(key: chex.PRNGKey) -> list[Any]:
                given = visit.x, visit.skips, visit.borrowed
                made = init_with(visit.layer, key, *given)
                made, tree = jax.tree.flatten(jax.tree.map(strong, made))
                trees.append(tree)
                return made

            run = jax.jit(leaves)
            if not is_ahead():
                return _Made(Executable(run), trees)
            return _Made(add(run.trace(key), device, drawing_options(device)), trees)

        def of(visit: Visit) -> Initializer:
            layer, skips, borrowed = visit.layer, visit.skips, visit.borrowed
            if not jax.tree.leaves(visit.variables):
                return lambda _: visit.variables
            if _nnx.is_module(layer.owner):
                # A compiled program would keep the values that the module has now.
                return lambda key: jax.tree.map(
                    strong, init_with(layer, key, visit.x, skips, borrowed)
                )
            alike = origin(layer.source)
            if alike is None:
                return compiled(visit)
            specs, tree = jax.tree.flatten((visit.x, tuple(skips.values()), borrowed))
            kind = alike, layer.namespace, tuple(skips), tree, tuple(specs)
            same = equal.setdefault(kind, [])
            if len(same) < 2 or same[-1].executable is not same[-2].executable:
                same.append(compiled(visit))
            return same[-1]

        return [*map(of, visits)]
