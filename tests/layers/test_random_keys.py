"""Keys that are given in other ways than as ``rngs``."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

import jpipe

from .. import reference as ref

KEY, X = jax.random.key(3), jnp.zeros((6, 4))
RAW = jax.random.PRNGKey(3)


def drawn(key, x):
    return jax.random.normal(key, (1, x.shape[1]))


class Noisy(nn.Module):
    """Adds noise of a key among its variables: the same in each call."""

    key: jax.Array

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.ones, (4,))
        return x + w * drawn(self.variable("noise", "key", lambda: self.key).value, x)


@pytest.mark.parametrize("key", [KEY, RAW], ids=["typed", "raw"])
@pytest.mark.parametrize("is_list", [True, False])
def test_a_key_among_variables_is_the_same_in_each_micro_batch(key, is_list):
    module, targets = Noisy(key), jnp.ones((6, 4))
    model, number = ([module], None) if is_list else (module, 1)
    pipe = jpipe.pipeline(model, 3, num_stages=number)
    variables = pipe.init(KEY, X)

    def loss(params):
        module_variables = {"params": params, "noise": {"key": key}}
        return ref.mse(module.apply(module_variables, X), targets)

    module_variables = variables[0] if is_list else variables
    ref.assert_close(
        pipe.apply(variables, X), module.apply(module_variables, X), ref.FLOAT32
    )
    expected = jax.jit(jax.value_and_grad(loss))(module_variables["params"])
    value, grads = pipe.value_and_grad(ref.mse)(variables, X, targets)
    result = value, grads[0] if is_list else grads
    ref.assert_close(result, expected, ref.FLOAT32)


@pytest.mark.parametrize("balance", [[2], [1, 1]])
def test_a_raw_key_in_the_input_is_folded_in_each_stage_as_a_typed_one(balance):
    def first(inputs):
        x = jnp.sin(inputs["x"] + drawn(inputs["key"], inputs["x"]))
        return {**inputs, "x": x}

    def last(inputs):
        return inputs["x"] + drawn(inputs["key"], inputs["x"])

    pipe = jpipe.pipeline(
        [first, last], 3, balance=balance, in_axes={"x": 0, "key": None}
    )
    keys = [jpipe.microbatch_key(KEY, m) for m in range(3)]
    expected = jnp.concatenate([last(first({"x": X[:2], "key": key})) for key in keys])
    for key in (KEY, RAW):
        result = pipe.apply(({}, {}), {"x": X, "key": key})
        ref.assert_close(result, expected, ref.FLOAT32)


def test_a_raw_key_makes_the_variables_that_it_makes_in_flax():
    module, x = nn.Sequential([nn.Dense(4), nn.LayerNorm(), nn.Dense(3)]), X[:, :2]
    model = jpipe.pipeline(module, 3, num_stages=2)
    ref.assert_close(model.init(RAW, x), module.init(RAW, x), ref.FLOAT32)
    layers = jpipe.pipeline(module.layers, 3)
    ref.assert_equal(layers.init(RAW, x), layers.init(KEY, x))


class Dropping(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        for _ in range(2):
            x = nn.Dropout(0.5, deterministic=not train)(nn.Dense(4)(x))
        return x + jax.random.normal(self.make_rng("noise"), x.shape) * train


@pytest.mark.parametrize(
    "rngs", [KEY, RAW, {"dropout": KEY, "params": RAW}], ids=["typed", "raw", "named"]
)
def test_keys_of_a_linen_model_mean_what_they_mean_to_its_apply(rngs):
    module: Any = Dropping()
    x = jax.random.normal(KEY, (6, 4))
    pipe = jpipe.pipeline(module, 3, num_stages=2)
    variables = pipe.init(KEY, x)

    def loss(params):
        total = 0.0
        for m, part in enumerate(jnp.split(x, 3)):
            keys = jax.tree.map(lambda key, m=m: jpipe.microbatch_key(key, m), rngs)
            y = module.apply({"params": params}, part, train=True, rngs=keys)
            total += ref.mse(y, part) / 3
        return total

    expected = jax.jit(jax.value_and_grad(loss))(jax.device_get(variables["params"]))
    result = pipe.value_and_grad(ref.mse)(variables, x, x, rngs=rngs)
    ref.assert_close(result, expected, ref.FLOAT32)
