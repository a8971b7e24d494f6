"""Mini-batches of random programs, and losses of them."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import by_hand as hand
from .layers import WORDS

PyTree = Any


class Batch(NamedTuple):
    """A mini-batch, and where its examples are."""

    size: int
    x: PyTree
    targets: PyTree
    dtype: Any
    in_axes: Any = 0

    def part(self, start: int, stop: int) -> hand.Part:
        """Some of its examples."""

        def cut(leaf: Any, axis: int | None) -> Any:
            return leaf if axis is None else np.take(leaf, range(start, stop), axis)

        axes = self.in_axes
        if axes in (0, 1):
            axes = jax.tree.map(lambda _: self.in_axes, self.x)
        x = [
            cut(leaf, axis)
            for leaf, axis in zip(
                jax.tree.leaves(self.x),
                jax.tree.leaves(axes, is_leaf=lambda axis: axis is None),
                strict=True,
            )
        ]
        targets = jax.tree.map(lambda leaf: leaf[start:stop], self.targets)
        return jax.tree.unflatten(jax.tree.structure(self.x), x), targets


def _batch(size: int, dtype: Any, x: PyTree, in_axes: Any = 0) -> Batch:
    rng = np.random.default_rng(size)
    wide = np.float64 if dtype == jnp.float64 else np.float32
    counts = rng.random(size) < 0.6
    counts[0] = True
    targets = {"t": rng.normal(size=size).astype(wide), "counts": counts}
    return Batch(size, x, targets, jnp.dtype(dtype), in_axes)


def _normal(shape: tuple[int, ...], dtype: Any) -> Any:
    return np.random.default_rng(len(shape)).normal(size=shape).astype(dtype)


def floats(size: int, axes: int, dtype: Any) -> Batch:
    """Arrays with so many axes between the examples and the width."""
    return _batch(size, dtype, _normal((size, *(2, 3)[:axes], 3), dtype))


def tokens(size: int, dtype: Any) -> Batch:
    x = np.random.default_rng(1).integers(0, WORDS, (size, 2)).astype(np.int32)
    return _batch(size, dtype, x)


def tree(size: int, dtype: Any) -> Batch:
    rng = np.random.default_rng(2)
    x = {
        "h": _normal((size, 2, 3), dtype),
        "ids": rng.integers(0, WORDS, (size, 2)).astype(np.int32),
        "mask": rng.random((size, 2)) < 0.5,
    }
    return _batch(size, dtype, x)


def time_major(size: int, dtype: Any) -> Batch:
    return _batch(size, dtype, _normal((2, size, 3), dtype), in_axes=1)


def with_memory(size: int, dtype: Any) -> Batch:
    x = (_normal((size, 2, 3), dtype), _normal((4, 3), dtype))
    return _batch(size, dtype, x, in_axes=(0, None))


def _errors(y: PyTree, targets: PyTree) -> jax.Array:
    """One number per example, of all floating leaves of the output.

    It grows no faster than these: with a square, three steps of SGD may lead so far
    that rounding errors become as large as the numbers.
    """
    t = targets["t"]
    total = -t
    for leaf in jax.tree.leaves(y):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            rows = leaf.astype(t.dtype).reshape(len(t), -1)
            total += rows @ jnp.cos(jnp.arange(rows.shape[1], dtype=t.dtype))
    return jnp.sqrt(1 + total**2)


def _reduced(errors: jax.Array, targets: PyTree, reduction: str) -> Any:
    if reduction == "weighted":
        weights = targets["counts"].astype(errors.dtype)
        return jnp.sum(errors * weights), jnp.sum(weights)
    return jnp.sum(errors) if reduction == "sum" else jnp.mean(errors)


def loss_of(reduction: str, has_aux: bool) -> Callable[..., Any]:
    """The loss function of a pipeline."""

    def loss(y: PyTree, targets: PyTree) -> Any:
        errors = _errors(y, targets)
        value = _reduced(errors, targets, reduction)
        return (value, _aux(errors)) if has_aux else value

    return loss


def _aux(errors: jax.Array) -> PyTree:
    return {"worst": errors.max(), "count": jnp.int32(len(errors))}


def whole_loss(reduction: str, sizes: Sequence[int]) -> hand.Loss:
    """That of a mini-batch by hand; its aux has an entry for each micro-batch."""

    def loss(y: PyTree, targets: PyTree) -> Any:
        errors = _errors(y, targets)
        value = _reduced(errors, targets, reduction)
        value = value[0] / value[1] if reduction == "weighted" else value
        parts = jnp.split(errors, np.cumsum(sizes)[:-1])
        if reduction == "microbatch_mean":
            value = jnp.mean(jnp.stack([jnp.mean(part) for part in parts]))
        aux = map(_aux, parts)
        return value, jax.tree.map(lambda *leaves: jnp.stack(leaves), *aux)

    return loss
