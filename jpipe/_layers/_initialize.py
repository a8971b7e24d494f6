"""Initial variables of layers: equal ones share one compiled program."""

from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp

from .._jaxprs._jaxpr import zeros
from . import _nnx, _skip
from ._alike import origin
from ._layer import Layer

PyTree = Any


class Initializers:
    """The compiled initializers of one pipeline.

    Random numbers take long to compile: layers that are equal, as the blocks of a
    Transformer are, share one program. They do so in one pipeline only: a new one asks
    again what a function or a class does, which may have been defined anew.
    """

    def __init__(self) -> None:
        self._programs: dict[Hashable, Callable[[chex.PRNGKey], PyTree]] = {}

    def __call__(
        self,
        layer: Layer,
        key: chex.PRNGKey,
        spec: PyTree,
        skips: Mapping[_skip.Key, PyTree],
        borrowed: Mapping[str, PyTree],
    ) -> dict[str, PyTree]:
        """Makes the variables of a layer, compiled on the device of the key.

        Args:
          layer: the layer.
          key: its key.
          spec: its input, as `jax.ShapeDtypeStruct` leaves.
          skips: what it may pop, likewise.
          borrowed: the variables that it has of earlier layers, likewise.

        Returns:
          Its own variables, on the device of the key; those of an nnx module, which has
          them already, where they are.
        """
        if _nnx.is_module(layer.owner):
            # A compiled program would keep the values that the module has now.
            return jax.tree.map(strong, layer.init(key, spec))
        given = {"skips": skips, "borrowed": borrowed}
        program = partial(init_with, layer, spec=spec, **given)
        alike = origin(layer.source)
        if alike is None:
            return jax.jit(program)(key)
        specs, tree = jax.tree.flatten((spec, tuple(skips.values()), borrowed))
        known = alike, layer.namespace, tuple(skips), tree, tuple(specs)
        return self._programs.setdefault(known, jax.jit(program))(key)


def init_with(
    layer: Layer,
    key: chex.PRNGKey,
    spec: PyTree,
    skips: Mapping[_skip.Key, PyTree],
    borrowed: Mapping[str, PyTree],
    guess: PyTree = None,
    frames: list[_skip.Frame] | None = None,
) -> dict[str, PyTree]:
    """The own variables of a layer that may pop zeros of the given shapes."""
    popped = {name: zeros(value) for name, value in skips.items()}
    with _skip.applying(popped, layer.namespace, guess=guess, watch=False) as frame:
        if frames is not None:
            frames.append(frame)
        if not borrowed:
            return jax.tree.map(strong, layer.init(key, spec))
        made = layer.extend(key, spec, borrowed) if layer.extend else {}
        return jax.tree.map(strong, made)


def strong(leaf: Any) -> Any:
    """An array that is not weakly typed, as after a step, so that programs fit both."""
    dtype = jnp.result_type(leaf)
    is_key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    return leaf if is_key else jnp.asarray(leaf, dtype)
