"""Modules of nnx inside of linen ones: their streams of random numbers have keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jpipe

from .. import reference as ref

KEY = jax.random.key(0)


class Dropped(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(5, 4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.dense(x))


class Noisy(nnx.Module):
    """Draws from a stream of its own name, which no key is given for."""

    def __init__(self, rngs):
        self.noise = rngs.noise.fork()

    def __call__(self, x):
        return x + jax.random.normal(self.noise(), x.shape)


class Inside(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nnx.bridge.to_linen(Dropped)(nn.Dense(5)(x))


def bridged(module):
    return jpipe.layer(nnx.bridge.to_linen(module), lambda module, x: module(x))


@pytest.mark.parametrize(
    ("module", "layer"),
    [
        (nnx.bridge.to_linen(Dropped), bridged(Dropped)),
        (Inside(), jpipe.layer(Inside(), lambda module, x: module(x))),
    ],
    ids=["alone", "inside"],
)
def test_init_gives_the_values_of_flax(module, layer):
    pipe = jpipe.pipeline([layer, jnp.tanh], 2)
    x, targets = ref.regression(4)
    variables = pipe.init(KEY, x)
    keys = {"params": jax.random.fold_in(KEY, 0), "dropout": jax.random.key(7)}
    expected = jax.jit(module.init)(keys, x)
    ref.assert_equal(variables[0]["params"], expected["params"])

    loss_and_grad = pipe.value_and_grad(ref.mse)
    losses = {
        float(loss_and_grad(variables, x, targets, rngs=jax.random.key(k))[0])
        for k in (1, 2, 1)
    }
    assert len(losses) == 2


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
