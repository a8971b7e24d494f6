"""Modules of nnx inside those of linen, and of linen inside those of nnx."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jpipe

from .. import reference as ref
from .normed import committed

KEY, X = jax.random.key(0), jnp.ones((8, 5))
MEAN, VAR = 0.3, 2.0


class Open(nnx.Module):
    """A batch norm that nobody tells; its statistics are those of other data."""

    def __init__(self, rngs, frozen=False):
        self.norm = nnx.BatchNorm(
            5, momentum=0.9, rngs=rngs, use_running_average=frozen
        )
        self.norm.mean[...] = jnp.full(5, MEAN)
        self.norm.var[...] = jnp.full(5, VAR)

    def __call__(self, x):
        return self.norm(x)


class Linen(nn.Module):
    """Calls a module of nnx, perhaps in a transformation."""

    module_class: Any
    wrap: Any = staticmethod(lambda module_class: module_class)

    @nn.compact
    def __call__(self, x):
        return self.wrap(nnx.bridge.ToLinen)(self.module_class, name="bridged")(x)


def stats_after_a_step(layer):
    x, targets = ref.regression(8)
    state = committed(jpipe.sequential([layer, ref.dense(4)], 2), x, targets)
    leaves = jax.tree_util.tree_leaves_with_path(state.model_state[0])
    return {path[-1].key: np.asarray(leaf) for path, leaf in leaves}, x


class Frozen(Open):
    def __init__(self, rngs):
        super().__init__(rngs, frozen=True)


@pytest.mark.parametrize(
    ("layer", "rate"),
    [(Linen(Open), 0.1), (Linen(Open, wrap=nn.jit), 0.1), (Linen(Frozen), 0.0)],
)
def test_statistics_of_nnx_in_linen_are_those_of_the_mini_batch(layer, rate):
    stats, x = stats_after_a_step(layer)
    batch = {"mean": x.mean(0), "var": x.var(0)}
    for name, first in (("mean", MEAN), ("var", VAR)):
        expected = (1 - rate) * first + rate * np.asarray(batch[name])
        ref.assert_close(stats[name], expected, ref.FLOAT32)


class LinenNorm(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        norm = nn.BatchNorm(not train, momentum=0.9, name="norm")
        return nn.Dropout(0.0)(norm(x), deterministic=not train)


class Nnx(nnx.Module):
    """Calls a linen module, whose statistics may change in training."""

    def __init__(self, function):
        bridged = nnx.bridge.ToNNX(LinenNorm(), rngs=nnx.Rngs(0, dropout=1))
        self.bridged = nnx.bridge.lazy_init(bridged, X)
        self.function = function

    def __call__(self, x, train):
        def call(bridged, x):
            return bridged(x, train, mutable=["batch_stats"] if train else False)

        return self.function(call, self.bridged, x)


def test_statistics_of_linen_in_nnx_are_those_of_the_mini_batch():
    stats, x = stats_after_a_step(
        Nnx(lambda call, bridged, x: nnx.remat(call)(bridged, x))
    )
    expected = {"mean": 0.1 * x.mean(0), "var": 0.9 + 0.1 * x.var(0)}
    ref.assert_close(stats, jax.device_get(expected), ref.FLOAT32)


def test_check_notes_a_norm_of_linen_in_nnx_without_a_switch():
    pipe = jpipe.sequential([Nnx(lambda call, bridged, x: bridged(x))], 2)
    (note,) = pipe.check(pipe.init(KEY, X), X).layers[0].notes
    assert note.startswith("off in training: batch norm norm; let each call around it")


class Noisy(nnx.Module):
    """Draws from a stream of its own name, which no key is given for."""

    def __init__(self, rngs):
        self.noise = rngs.noise.fork()

    def __call__(self, x):
        return x + jax.random.normal(self.noise(), x.shape)


class Inside(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nnx.bridge.to_linen(nnx.Linear, 5, 4)(nn.Dense(5)(x))


def bridged(module):
    return jpipe.layer(nnx.bridge.to_linen(module), lambda module, x: module(x))


def test_initial_values_of_nnx_in_linen_are_those_of_flax():
    module = Inside()
    x, _ = ref.regression(4)
    variables = jpipe.pipeline(module, 2, num_stages=2).init(KEY, x)
    keys = {"params": KEY, "default": jax.random.fold_in(KEY, 1)}
    ref.assert_equal(variables["params"], jax.jit(module.init)(keys, x)["params"])


def test_one_key_serves_streams_of_any_name():
    pipe = jpipe.pipeline([bridged(Noisy), jnp.copy], 2)
    x = jnp.zeros((4, 3))
    variables = pipe.init(KEY, x)
    drawn = [
        np.asarray(pipe.apply(variables, x, rngs=jax.random.key(k), train=True))
        for k in (1, 2)
    ]
    rows = np.concatenate(drawn)  # a row for each example, of four micro-batches
    assert len({row.tobytes() for row in rows}) == len(rows)
    again = pipe.apply(variables, x, rngs=jax.random.key(1), train=True)
    np.testing.assert_array_equal(again, drawn[0])
