"""Frozen parts stay frozen in training; parts that are open are trained."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jpipe

from .. import reference as ref
from .nnx_modules import batch_norm

KEY, TX = jax.random.key(0), optax.sgd(0.1)
OPTIONS = {"dtype": jnp.float64, "param_dtype": jnp.float64}


def data(batch=6):
    key_x, key_t = jax.random.split(jax.random.key(3))
    x = jax.random.normal(key_x, (batch, 4), jnp.float64)
    return x, jax.random.normal(key_t, (batch, 4), jnp.float64)


def norm(**options):
    """A batch norm whose statistics are those of other data."""
    norm = batch_norm(4, jnp.float64)
    norm.mean[...] = jnp.linspace(-1, 1, 4)
    norm.var[...] = jnp.linspace(0.3, 3, 4)
    for name, value in options.items():
        setattr(norm, name, value)
    return norm


class Block(nnx.Module):
    """Reads its mode from the attributes of its parts."""

    def __init__(self):
        self.linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0), **OPTIONS)
        self.norm = norm()
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return x + self.dropout(self.norm(jnp.tanh(self.linear(x))))


class Again(Block):
    """Is computed again in the backward, as is all that it holds."""

    def __call__(self, x):
        return nnx.remat(lambda block, x: Block.__call__(block, x))(self, x)


def frozen(module):
    module.eval()
    return module


def native(layers, x, targets):
    """The loss and the gradients of plain nnx, which changes statistics in place."""

    def loss(modules):
        y = x
        for module in modules:
            y = module(y)
        return ref.mse(y, targets)

    return nnx.value_and_grad(loss)(nnx.List(layers))


def step_and_gradient(layers, num_microbatches, x, targets):
    pipe = jpipe.pipeline(layers, num_microbatches, devices=jax.devices()[:1] * 9)
    state = pipe.init_train_state(KEY, x, TX)
    before = jax.device_get(state.model_state)
    value = pipe.value_and_grad(ref.mse)(state.variables, x, targets)
    value = jax.device_get(value)
    state, _ = pipe.train_step(ref.mse, TX)(state, x, targets)
    return value, before, jax.device_get(state.model_state)


def test_frozen_modules_of_nnx_are_those_of_a_plain_loop(double):
    x, targets = data()
    layers = [
        norm(use_running_average=True),
        nnx.Dropout(0.5, deterministic=True, rngs=nnx.Rngs(0)),
        frozen(Again()),
        nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(5), **OPTIONS), frozen(Block())),
        nnx.MultiHeadAttention(
            *(2, 4),
            dropout_rate=0.5,
            deterministic=True,
            decode=False,
            rngs=nnx.Rngs(1),
            **OPTIONS,
        ),
    ]
    value, before, after = step_and_gradient(layers, 3, x[:, None], targets[:, None])
    # No bit of the statistics moves, through transformations too.
    ref.assert_equal(after, before)
    expected = native(layers, x[:, None], targets[:, None])
    ref.assert_close(jax.tree.leaves(value), jax.tree.leaves(expected), ref.FLOAT64)


class Half(nnx.Module):
    """A frozen backbone and a head that is trained."""

    def __init__(self):
        self.backbone = frozen(Block())
        self.head = norm()

    def __call__(self, x):
        return self.head(self.backbone(x))


# What becomes of the statistics is not its subject.
@pytest.mark.filterwarnings("ignore:(value_and_grad|apply) leaves:UserWarning")
def test_open_parts_beside_frozen_ones_are_trained(double):
    x, targets = data()
    layers = [Half(), norm(use_running_average=True), norm(use_running_average=None)]
    _, before, after = step_and_gradient(layers, 1, x, targets)
    ref.assert_equal(after[1], before[1])
    ref.assert_equal(
        after[0]["batch_stats"]["backbone"], before[0]["batch_stats"]["backbone"]
    )
    layers[2].use_running_average = False
    native(layers, x, targets)
    for layer, stats in (
        (layers[0].head, after[0]["batch_stats"]["head"]),
        (layers[2], after[2]["batch_stats"]),
    ):
        ref.assert_close(stats["mean"], layer.mean[...], ref.FLOAT64)
        ref.assert_close(stats["var"], layer.var[...], ref.FLOAT64)


class Backbone(nn.Module):
    """A linen block that others freeze."""

    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(not train, **OPTIONS, force_float32_reductions=False)(x)
        x = nn.Dropout(0.5)(nn.tanh(ref.dense(4, jnp.float64)(x)), not train)
        return x + nn.BatchNorm(True, **OPTIONS, force_float32_reductions=False)(x)


class Above(nn.Module):
    """Freezes what is below, in a transformation or not."""

    norm_class: type

    @nn.compact
    def __call__(self, x, train):
        x = self.norm_class()(x, False)
        return nn.Dropout(0.5, deterministic=True)(ref.dense(4, jnp.float64)(x))


@pytest.mark.parametrize("wrap", [lambda module_class, **_: module_class, nn.remat])
def test_frozen_parts_of_linen_are_those_of_a_plain_loop(double, wrap):
    x, targets = data()
    layer = Above(wrap(Backbone, static_argnums=(2,)))
    pipe = jpipe.sequential([layer], 3)
    state = pipe.init_train_state(KEY, x, TX)
    shifted = jax.tree.map(lambda leaf: leaf + 0.3, state.model_state)
    variables = tuple(
        {**entry, **model}
        for entry, model in zip(state.variables, shifted, strict=True)
    )
    state = pipe.init_train_state(KEY, x, TX, variables=variables)
    before = jax.device_get(state.model_state)
    loss, grads = pipe.value_and_grad(ref.mse)(state.variables, x, targets)

    def whole(params):
        return ref.mse(layer.apply({"params": params, **before[0]}, x, True), targets)

    expected = jax.jit(jax.value_and_grad(whole))(ref.on_host(state.params[0]))
    ref.assert_close((loss, grads[0]), expected, ref.FLOAT64)
    state, _ = pipe.train_step(ref.mse, TX)(state, x, targets)
    ref.assert_equal(jax.device_get(state.model_state), before)
