"""Initial variables of all layers: equal ones share one compiled program."""

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import chex
import jax

from .._instructions._compile import executable
from .._instructions._transfer import Device
from .._layers import _nnx
from .._layers._alike import origin
from .._layers._initialize import init_with, strong
from .._layers._walk import Visit

PyTree = Any


class Initializers:
    """The compiled initializers of the layers that are made together.

    Random numbers take long to compile: layers that are equal, as the blocks of a
    Transformer are, share one program. Those made later do so if they are traced to
    the same: what a function or a class does may have been defined anew.

    Args:
      device: where they run.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._programs: dict[Hashable, Callable[[chex.PRNGKey], PyTree]] = {}

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
        made = partial(init_with, layer, spec=visit.x, skips=skips, borrowed=borrowed)
        alike = origin(layer.source)
        specs, tree = jax.tree.flatten((visit.x, tuple(skips.values()), borrowed))
        known = alike, layer.namespace, tuple(skips), tree, tuple(specs)
        if alike is None or known not in self._programs:
            self._programs[known] = executable(jax.jit(made), key, self._device)
        return self._programs[known](key)
