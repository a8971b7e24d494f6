"""The layers of random models: small, so that an example is quick.

The last axis of an array is its width; the first, its examples. A tree is an array "h"
with integers and booleans, one for each of its rows.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

import jpipe

from ..layers import nnx_modules
from ..reference import dense

PyTree = Any
WORDS = 5
MOMENTUM = 0.9

# ------------------------------------------------------------------------ skips

# By hand a skip is an entry of a dictionary, by namespace and name.
Shelf = dict[tuple[Hashable, Hashable], PyTree]
_shelf: ContextVar[tuple[Shelf, Hashable] | None] = ContextVar("shelf", default=None)


@contextmanager
def by_hand(shelf: Shelf, namespace: Hashable) -> Iterator[None]:
    """The scope in which skips are put on a shelf instead of in a pipeline."""
    token = _shelf.set((shelf, namespace))
    try:
        yield
    finally:
        _shelf.reset(token)


def _stash(name: Hashable, x: PyTree) -> None:
    if (found := _shelf.get()) is None:
        jpipe.stash(name, x)
    else:
        shelf, namespace = found
        shelf[namespace, name] = x


def _pop(name: Hashable) -> PyTree:
    if (found := _shelf.get()) is None:
        return jpipe.pop(name)
    shelf, namespace = found
    return shelf.pop((namespace, name))


def keep(name: Hashable) -> Callable[[PyTree], PyTree]:
    """A function that stashes what it is given."""

    def keep(x):
        _stash(name, x)
        return x

    return keep


def add(name: Hashable) -> Callable[[PyTree], PyTree]:
    """A function that adds to each row the means of what it pops."""

    def add(x):
        h, put_back = _opened(x)
        means = _means(_pop(name))
        return put_back(h + means.reshape(-1, *[1] * (h.ndim - 1)).astype(h.dtype))

    return add


def _opened(x: PyTree) -> tuple[jax.Array, Callable[[jax.Array], PyTree]]:
    """The floating part of what layers pass on, and how to put another in its place."""
    if isinstance(x, dict):
        return x["h"], lambda h: {**x, "h": h}
    return x, lambda h: h


def _means(x: PyTree) -> jax.Array:
    """One number per example of all leaves."""
    leaves = [
        leaf.astype(float).reshape(len(leaf), -1).mean(1) for leaf in jax.tree.leaves(x)
    ]
    return sum(leaves[1:], start=leaves[0])


class Keep(nn.Module):
    """A module that stashes in the middle of its work."""

    name_of_skip: Hashable
    dtype: Any

    @nn.compact
    def __call__(self, x):
        h = jnp.tanh(dense(3, self.dtype)(x))
        _stash(self.name_of_skip, {"h": h, "sum": x.sum(-1)})
        return dense(3, self.dtype)(h)


# -------------------------------------------------------------- plain functions


def same(x):
    """Nothing: the output is the input itself."""
    return x


def stop(x):
    """No gradient goes back from here."""
    return jax.tree.map(jax.lax.stop_gradient, x)


def forget(x):
    """The output does not depend on the input."""
    h, put_back = _opened(x)
    return put_back(jnp.full_like(h, 0.5))


def in_ref(x):
    """Adds up in a ref of its own."""
    h, put_back = _opened(x)
    total = jax.new_ref(jnp.zeros_like(h))
    total[...] += jnp.tanh(h)
    total[...] = total[...] + h
    return put_back(total[...])


def unread(x):
    """Computes what nobody reads."""
    h, _ = _opened(x)
    jnp.sort(h, axis=-1)
    jnp.take(h, 0, axis=-1)
    return x


def noise(x, rngs=None, train=False):
    """Draws from a stream that it asks for."""
    if not train:
        return x
    return x + 0.1 * jax.random.normal(rngs["dropout"], x.shape, x.dtype)


def wrap(x):
    """A tree of an array."""
    return {
        "ids": jnp.full(x.shape[:-1], 2, jnp.int32),
        "h": x,
        "mask": jnp.isfinite(x[..., 0]),
    }


def unwrap(x):
    """The array of a tree."""
    return x["h"]


def masked(x):
    """Reads the booleans, and turns the order of ids."""
    h = jnp.where(x["mask"][..., None], x["h"], 0.25)
    return {**x, "h": h, "ids": (x["ids"] * 3 + 1) % WORDS, "mask": ~x["mask"]}


def hold(x):
    """Puts an entry into a tree that later layers hand on."""
    return {**x, "held": jnp.sin(x["h"]).sum(-1, keepdims=True)}


def use_held(x):
    """Reads that entry, if there is one."""
    return {**x, "h": x["h"] + 0.1 * x.get("held", 0)}


def batch_first(x):
    return jnp.moveaxis(x, 1, 0)


def attend(x):
    """Reads a memory that is not cut in micro-batches."""
    h, memory = x
    return h + nn.softmax(h @ memory.T) @ memory


def join(x):
    """One row per example, of as many numbers as there are."""
    return x.reshape(len(x), -1)[:, :3] + x.reshape(len(x), -1)[:, -3:]


# ---------------------------------------------------------------- linen modules


def embed(dtype):
    return nn.Embed(WORDS, 3, dtype=dtype, param_dtype=dtype)


def conv(num_axes, dtype):
    size = (2,) * num_axes
    return nn.Conv(3, size, dtype=dtype, param_dtype=dtype)


def layer_norm(dtype):
    return nn.LayerNorm(dtype=dtype, param_dtype=dtype)


def group_norm(dtype):
    return nn.GroupNorm(1, dtype=dtype, param_dtype=dtype)


def batch_norm(dtype):
    options = {"dtype": dtype, "param_dtype": dtype}
    # Statistics of single precision otherwise, whatever the dtypes.
    return nn.BatchNorm(momentum=MOMENTUM, force_float32_reductions=False, **options)


class Block(nn.Module):
    """A residual block."""

    dtype: Any
    rate: float = 0.0

    @nn.compact
    def __call__(self, x, train: bool = False):
        h = jnp.sin(dense(2, self.dtype)(x))
        h = nn.Dropout(self.rate, deterministic=not train)(h)
        return x + dense(x.shape[-1], self.dtype)(h)


class Scanned(nn.Module):
    """The same block over and over, with weights of its own each time, last first."""

    dtype: Any

    @nn.compact
    def __call__(self, x):
        def body(module, x, _):
            return jnp.tanh(module(x)), None

        options = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        scan = nn.scan(body, **options, length=2, reverse=True)
        return scan(dense(x.shape[-1], self.dtype), x, None)[0]


class Layers(nn.Module):
    """Blocks that are scanned, their parameters stacked along an axis."""

    dtype: Any
    length: int
    axis: int = 0
    reverse: bool = False
    remat: bool = False
    rate: float = 0.0

    @nn.compact
    def __call__(self, x, train: bool = False):
        def body(block, x, _):
            return block(x, train), None

        scan = nn.scan(
            body,
            variable_axes={"params": self.axis},
            split_rngs={"params": True, "dropout": True},
            length=self.length,
            reverse=self.reverse,
        )
        block = nn.remat(Block, static_argnums=2) if self.remat else Block
        return scan(block(self.dtype, self.rate), x, None)[0]


class Odd(nn.Module):
    """Parameters that are frozen, unused, of integers, or scalars."""

    dtype: Any

    @nn.compact
    def __call__(self, x):
        normal = nn.initializers.normal(1.0)
        used = self.param("used", normal, (x.shape[-1], 3), self.dtype)
        frozen = self.param("frozen", normal, (x.shape[-1],), self.dtype)
        self.param("unused", normal, (2, 2), self.dtype)
        shift = self.param("shift", lambda key: jnp.arange(3, dtype=jnp.int32))
        gain = self.param("gain", normal, (), self.dtype)
        return (x * jax.lax.stop_gradient(frozen)) @ used * gain + shift


class Averages(nn.Module):
    """Keeps a mean of what it was given, and the number of its calls."""

    dtype: Any

    @nn.compact
    def __call__(self, x, train: bool = False):
        mean = self.variable("averages", "mean", jnp.zeros, x.shape[-1:], self.dtype)
        calls = self.variable("averages", "calls", jnp.zeros, (), jnp.int32)
        if train:
            mean.value = x.mean(tuple(range(x.ndim - 1)))
            calls.value += 1
        return x * self.param("gain", nn.initializers.ones, (1,), self.dtype)


class Table(nn.Module):
    """Two methods that use one matrix."""

    dtype: Any

    def setup(self):
        normal = nn.initializers.normal(1.0)
        self.matrix = self.param("matrix", normal, (3, 2), self.dtype)

    def __call__(self, x):
        return x @ self.matrix

    def back(self, x):
        return x @ self.matrix.T


class Around(nn.Module):
    """Applies a module to the array of a tree."""

    inner: nn.Module

    @nn.compact
    def __call__(self, x, train: bool = False):
        h, put_back = _opened(x)
        told = {"train": train} if isinstance(self.inner, Block) else {}
        return put_back(self.inner(h, **told))


class Fill(nn.Module):
    """Adds a table of integers' own rows to the array of a tree."""

    dtype: Any

    @nn.compact
    def __call__(self, x):
        rows = embed(self.dtype)(x["ids"])
        return {**x, "h": x["h"] + rows[..., : x["h"].shape[-1]]}


# ------------------------------------------------------- other origins of layers


def nnx_linear(before, width, dtype):
    return nnx.Linear(before, width, rngs=nnx.Rngs(1), dtype=dtype, param_dtype=dtype)


def nnx_batch_norm(width, dtype):
    module = nnx_modules.batch_norm(width, dtype)
    module.momentum = MOMENTUM
    return module


class NnxBlock(nnx.Module):
    """A block that shares a part inside of itself."""

    def __init__(self, width, dtype, rate=0.0):
        options = {"rngs": nnx.Rngs(2), "dtype": dtype, "param_dtype": dtype}
        self.linear = nnx.Linear(width, width, **options)
        self.again = self.linear
        self.gain = nnx.Param(jnp.full((width,), 0.5, dtype))
        self.order = nnx.Param(jnp.arange(width, dtype=jnp.int32)[::-1])
        self.dropout = nnx.Dropout(rate, rngs=nnx.Rngs(3)) if rate else None

    def __call__(self, x):
        h = self.again(jnp.tanh(self.linear(x)))[..., self.order[...]]
        h = h if self.dropout is None else self.dropout(h)
        return x + h * self.gain[...]


def scale(dtype):
    """A `jpipe.Layer` with a constant beside its parameters."""

    def init(key, x):
        gain = jax.random.normal(key, (x.shape[-1],), dtype)
        return {"params": [gain], "constants": {"shift": jnp.ones((), dtype)}}

    def apply(variables, x):
        return x * variables["params"][0] + variables["constants"]["shift"]

    return jpipe.Layer(init, apply, name="scale")


# All that is defined here, and `dense`: what the text of a program may name.
__all__ = ["dense"]
__all__ += [
    name
    for name, value in globals().items()
    if name[0] != "_" and getattr(value, "__module__", None) == __name__
]
