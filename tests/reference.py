"""What the tests compare with: the model composed by hand, on one device.

Nothing here imports jpipe: plain Flax ``apply``, plain `jax.value_and_grad`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

PyTree = Any


class Residual(nn.Module):
    """A block whose backward needs its input, its weights and what is in between."""

    width: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x):
        options = {"dtype": self.dtype, "param_dtype": self.dtype}
        h = nn.LayerNorm(**options)(x)
        h = nn.gelu(nn.Dense(2 * self.width, **options)(h))
        return x + nn.Dense(self.width, **options)(h)


def dense(width: int, dtype: Any = jnp.float32) -> nn.Dense:
    """A dense layer whose parameters have the dtype of its arithmetic."""
    return nn.Dense(width, dtype=dtype, param_dtype=dtype)


def mlp(dtype: Any = jnp.float32) -> list[Any]:
    """Six layers: modules with and without parameters, and functions."""
    return [
        dense(12, dtype),
        jnp.tanh,
        Residual(12, dtype),
        nn.relu,
        Residual(12, dtype),
        dense(4, dtype),
    ]


def regression(
    batch: int, dtype: Any = jnp.float32, seed: int = 7
) -> tuple[jax.Array, jax.Array]:
    """Inputs of width 5 and targets of width 4."""
    key_x, key_t = jax.random.split(jax.random.key(seed))
    x = jax.random.normal(key_x, (batch, 5), dtype)
    return x, jax.random.normal(key_t, (batch, 4), dtype)


def mse(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """A mean over examples."""
    return jnp.mean((outputs - targets) ** 2)


def compose(layers: Sequence[Any], params: Sequence[PyTree], x: PyTree) -> PyTree:
    """The layers one after the other, without jpipe."""
    for layer, own in zip(layers, params, strict=True):
        x = (
            layer.apply({"params": own}, x)
            if isinstance(layer, nn.Module)
            else layer(x)
        )
    return x


def gradient(
    layers: Sequence[Any], loss_fn: Callable[..., Any] = mse
) -> Callable[[PyTree, PyTree, PyTree], tuple[jax.Array, PyTree]]:
    """``(params, x, targets) -> (loss, grads)`` of the whole batch, on one device."""

    def loss(params: PyTree, x: PyTree, targets: PyTree) -> jax.Array:
        return loss_fn(compose(layers, params, x), targets)

    return jax.jit(jax.value_and_grad(loss, allow_int=True))


def value_and_grad(
    layers: Sequence[Any],
    params: Sequence[PyTree],
    x: PyTree,
    targets: PyTree,
    loss_fn: Callable[..., Any] = mse,
) -> tuple[jax.Array, PyTree]:
    """The loss of the whole batch and its gradients, on one device."""
    return gradient(layers, loss_fn)(params, x, targets)


def compare(
    pipe: Any,
    layers: Sequence[Any],
    x: PyTree,
    targets: PyTree,
    relative: float,
    loss_fn: Callable[..., Any] = mse,
) -> tuple[PyTree, PyTree]:
    """Asserts that a pipeline gives the loss and gradients of its layers.

    Returns:
      Its variables and its gradients.
    """
    variables = pipe.init(jax.random.key(0), x)
    loss, grads = pipe.value_and_grad(loss_fn)(variables, x, targets)
    expected = value_and_grad(layers, params_of(variables), x, targets, loss_fn)
    assert_close((loss, grads), expected, relative)
    return variables, grads


def optax_steps(
    layers: Sequence[Any],
    params: PyTree,
    x: PyTree,
    targets: PyTree,
    tx: optax.GradientTransformation,
    count: int,
) -> tuple[PyTree, PyTree, list[float]]:
    """Steps of an optimizer on the whole batch, on one device."""
    state = tx.init(params)
    losses = []
    step, update = gradient(layers), jax.jit(tx.update)
    for _ in range(count):
        loss, grads = step(params, x, targets)
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    return params, state, losses


@contextmanager
def unoptimized() -> Iterator[None]:
    """XLA leaves out most of its optimizations: it takes half as long to compile."""
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", False)


def on_host(tree: PyTree) -> PyTree:
    """The tree as NumPy arrays, wherever its leaves are."""

    def fetch(leaf: Any) -> np.ndarray:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        return np.asarray(leaf)

    return jax.tree.map(fetch, tree)


def params_of(variables: Sequence[Any]) -> tuple[PyTree, ...]:
    """The parameters of each layer, on the host."""
    return tuple(on_host(entry.get("params", {})) for entry in variables)


def assert_equal(actual: PyTree, expected: PyTree) -> None:
    """Every leaf has the same bits, shape, dtype and path."""
    _assert_same_structure(actual, expected)
    for path, a, e in _pairs(actual, expected):
        np.testing.assert_array_equal(a, e, err_msg=path, strict=True)


def assert_close(
    actual: PyTree, expected: PyTree, relative: float, scale: float = 0.0
) -> None:
    """Every leaf is close, relative to the largest entry of the expected leaf.

    Entries of one leaf are sums of terms of one size, so an entry near zero is as
    uncertain as the largest one.

    Args:
      actual: a tree.
      expected: what it should be.
      relative: how close.
      scale: the size of the terms, if it is more than that of the largest entry.
    """
    _assert_same_structure(actual, expected)
    for path, a, e in _pairs(actual, expected):
        assert a.shape == e.shape, path
        assert a.dtype == e.dtype, path
        if e.dtype == jax.dtypes.float0 or not e.size:
            continue
        size = max(float(np.max(np.abs(e))), scale, 1e-30)
        error = float(np.max(np.abs(a.astype(np.float64) - e.astype(np.float64))))
        assert error <= relative * size, f"{path}: {error / size:.2e} of {relative}"


def _assert_same_structure(actual: PyTree, expected: PyTree) -> None:
    chex.assert_trees_all_equal_structs(actual, expected)


def _pairs(actual: PyTree, expected: PyTree) -> list[tuple[str, Any, Any]]:
    flat = jax.tree_util.tree_leaves_with_path(on_host(actual))
    others = jax.tree.leaves(on_host(expected))
    return [
        (jax.tree_util.keystr(path), a, e)
        for (path, a), e in zip(flat, others, strict=True)
    ]


# Sums over a batch in another order, in other programs. Double precision has 52 bits
# (2e-16), of which sums over tens of terms through six layers lose fewer than ten.
FLOAT64 = 1e-12
# Single precision has 23 bits, an ulp of 1.2e-7: about forty of them.
FLOAT32 = 5e-6
