"""Modules of nnx, and plain nnx on one device."""

import re
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from .. import reference as ref

KEY = jax.random.key(0)


class Scale(nnx.Variable):
    """A variable type of the user's own, of two words."""


class CallCount(nnx.Variable):
    """Another, with integers."""


class Block(nnx.Module):
    """Parameters in lists and dicts, one shared inside, and other collections."""

    def __init__(self, width: int, rngs: nnx.Rngs, dtype: Any = jnp.float32):
        options = {"rngs": rngs, "dtype": dtype, "param_dtype": dtype}
        self.norm = nnx.LayerNorm(width, **options)
        self.linear = nnx.Linear(width, width, **options)
        self.again = self.linear
        self.no_bias = nnx.Linear(width, width, use_bias=False, **options)
        gains = jax.random.normal(rngs.params(), (2, width), dtype)
        self.gains = nnx.List([nnx.Param(gains[0]), nnx.Param(gains[1])])
        self.shifts = nnx.Dict({"a": nnx.Param(gains[0] / 2)})
        self.scale = Scale(jnp.full((width,), 0.5, dtype))
        self.table = jnp.arange(width, dtype=dtype) / width

    def __call__(self, x):
        h = self.again(jnp.tanh(self.linear(self.norm(x))))
        for gain in self.gains:
            h = h * gain[...]
        h = self.no_bias(h + self.shifts["a"][...]) * self.scale[...]
        return x + h + self.table


class Mixed(nnx.Module):
    """A parameter of integers, and counts of calls."""

    def __init__(self, width: int, dtype: Any = jnp.float32):
        self.order = nnx.Param(jnp.arange(width)[::-1])
        self.weight = nnx.Param(jnp.linspace(0.5, 2, width, dtype=dtype))
        self.calls = CallCount(jnp.int32(0))
        self.mean_square = Scale(jnp.zeros((), dtype))

    def __call__(self, x):
        self.calls[...] += 1
        self.mean_square[...] = jnp.mean(x**2)
        return x[:, self.order[...]] * self.weight[...]


class Rematerialized(nnx.Module):
    """A block inside of nnx.remat, which is given a static argument."""

    def __init__(self, width: int, rngs: nnx.Rngs, dtype: Any = jnp.float32):
        self.block = Block(width, rngs, dtype)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    @nnx.remat(static_argnums=(2, 3))
    def __call__(self, x, twice=True, train=False):
        assert isinstance(train, bool)
        x = self.block(x)
        return self.dropout(x, deterministic=not train) * (2 if twice else 1)


class Noisy(nnx.Module):
    """Draws twice from streams that it holds."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Dropout(0.5, rngs=rngs)
        self.second = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return jnp.stack([self.first(x), self.second(x)], axis=1)


def mlp(dtype: Any = jnp.float32) -> list[Any]:
    """Six layers: nnx modules, linen modules and functions, of widths 5 to 4."""
    options = {"dtype": dtype, "param_dtype": dtype}
    return [
        nnx.Linear(5, 6, rngs=nnx.Rngs(0), **options),
        jnp.tanh,
        Block(6, nnx.Rngs(1), dtype),
        ref.dense(6, dtype),
        Rematerialized(6, nnx.Rngs(2), dtype),
        nnx.Sequential(
            Mixed(6, dtype), nnx.relu, nnx.Linear(6, 4, rngs=nnx.Rngs(3), **options)
        ),
    ]


def batch_norm(width: int, dtype: Any = jnp.float32) -> nnx.BatchNorm:
    """One whose statistics have its dtype: nnx makes them in single precision."""
    module = nnx.BatchNorm(width, rngs=nnx.Rngs(0), param_dtype=dtype)
    module.mean = nnx.BatchStat(jnp.zeros(width, dtype))
    module.var = nnx.BatchStat(jnp.ones(width, dtype))
    return module


def is_nnx(layer: Any) -> bool:
    return isinstance(layer, nnx.Module)


def reference_params(layers, linen):
    """The parameters as a caller of plain nnx would take them."""
    return tuple(
        nnx.to_pure_dict(nnx.state(layer, nnx.Param)) if is_nnx(layer) else own
        for layer, own in zip(layers, linen, strict=True)
    )


def compose(layers, params, x, train=False):
    """The layers one after the other: nnx modules cloned and updated, by plain nnx."""
    for layer, own in zip(layers, params, strict=True):
        if is_nnx(layer):
            module = nnx.clone(layer)
            nnx.update(module, nnx.State(own))
            module.train() if train else module.eval()
            x = module(x)
        elif isinstance(layer, nn.Module):
            x = layer.apply({"params": own}, x)
        else:
            x = layer(x)
    return x


def value_and_grad(layers, params, x, targets):
    def loss(params):
        return ref.mse(compose(layers, params, x), targets)

    return jax.jit(jax.value_and_grad(loss, allow_int=True))(params)


def snapshot(modules):
    """All that a module holds, on the host, with its static attributes."""
    return [
        (str(nnx.graphdef(m)), ref.on_host(nnx.to_pure_dict(nnx.state(m))))
        for m in modules
    ]


def assert_untouched(modules, before):
    for (graph, values), (old_graph, old) in zip(
        snapshot(modules), before, strict=True
    ):
        assert graph == old_graph
        ref.assert_equal(values, old)


def says(*parts):
    return "(?s)" + ".*".join(map(re.escape, parts))
