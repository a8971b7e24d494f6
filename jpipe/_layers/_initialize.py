"""Initial variables of a layer: equal layers share one compiled program."""

from collections.abc import Hashable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp

from . import _nnx, _skip
from ._alike import origin
from ._layer import Layer, as_layer, zeros

PyTree = Any


def initialize(
    layer: Layer,
    key: chex.PRNGKey,
    spec: PyTree,
    skips: Mapping[_skip.Key, PyTree],
) -> dict[str, PyTree]:
    """Makes the variables of a layer, compiled on the device of the key.

    Random numbers take long to compile: layers that are equal, as the blocks of a
    Transformer are, share one program, in this pipeline and in the next.

    Args:
      layer: the layer.
      key: its key.
      spec: its input, as `jax.ShapeDtypeStruct` leaves.
      skips: what it may pop, likewise.

    Returns:
      Its variables, on the device of the key; those of an nnx module, which has them
      already, where they are.
    """
    if _nnx.is_module(layer.owner):
        # A compiled program would keep the values that the module has now.
        return jax.tree.map(_strong, layer.init(key, spec))
    alike = origin(layer.source, lasting=True)
    if alike is None:
        return jax.jit(lambda key: init_with(layer, key, spec, skips))(key)
    names, values = tuple(skips), tuple(skips.values())
    leaves, tree = jax.tree.flatten((spec, values))
    shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
    maker = _Origin(layer.source, alike)
    return _initialize(maker, layer.namespace, key, names, tree, shapes)


class _Origin:
    """What a layer is made from; equal if they are made alike."""

    def __init__(self, source: Any, alike: Hashable) -> None:
        self.source = source
        self._alike = alike

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Origin) and self._alike == other._alike

    def __hash__(self) -> int:
        return hash(self._alike)


@partial(jax.jit, static_argnums=(0, 1, 3, 4, 5))
def _initialize(
    origin: _Origin,
    namespace: Any,
    key: chex.PRNGKey,
    names: Any,
    tree: Any,
    shapes: Any,
) -> Any:
    leaves = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    spec, values = jax.tree.unflatten(tree, leaves)
    layer = replace(as_layer(origin.source), namespace=namespace)
    return init_with(layer, key, spec, dict(zip(names, values, strict=True)))


def init_with(
    layer: Layer,
    key: chex.PRNGKey,
    spec: PyTree,
    skips: Mapping[_skip.Key, PyTree],
    guess: PyTree = None,
    frames: list[_skip.Frame] | None = None,
) -> dict[str, PyTree]:
    """The variables of a layer that may pop zeros of the given shapes."""
    popped = {name: zeros(value) for name, value in skips.items()}
    with _skip.applying(popped, layer.namespace, guess=guess, watch=False) as frame:
        if frames is not None:
            frames.append(frame)
        return jax.tree.map(_strong, layer.init(key, spec))


def _strong(leaf: Any) -> Any:
    """Without a weak type: after a step it would be another program's argument."""
    dtype = jnp.result_type(leaf)
    is_key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    return leaf if is_key else jnp.asarray(leaf, dtype)
