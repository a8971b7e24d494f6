"""Batches of any size and tree, and unusual leaves: the numbers of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import jpipe

from . import reference as ref


def test_an_input_without_an_axis_stays_the_callers_in_all_micro_batches():
    def layer(x):
        return x["rows"] @ x["matrix"]

    axes = {"rows": 0, "matrix": None}
    pipe = jpipe.pipeline([layer, jnp.sin], 3, in_axes=axes)
    x = {"rows": jnp.ones((6, 4)), "matrix": jnp.eye(4, 5)}
    expected = jnp.sin(jnp.eye(4, 5).sum(0))
    np.testing.assert_allclose(pipe.apply(({}, {}), x), [expected] * 6, rtol=1e-6)
    assert not x["matrix"].is_deleted()


class Quantized(nn.Module):
    """What a model returns beside its examples: a codebook, a temperature."""

    @nn.compact
    def __call__(self, x):
        temperature = jnp.exp(self.param("temperature", nn.initializers.ones, ()))
        book = nn.Embed(5, 3)
        nearest = jnp.argmax(book.attend(x) / temperature, axis=-1)
        # A parameter as it stands, and what follows from one.
        return {"z": x + book(nearest), "model": (book.embedding, temperature)}


def test_outputs_without_an_axis_are_given_once_by_shards_too():
    layers, devices = [nn.Dense(3), Quantized()], jax.devices()[:4]
    options = {"mesh": jax.make_mesh((2, 2), ("stage", "data"), devices=devices)}
    pipe = jpipe.pipeline(layers, 2, out_axes={"z": 0, "model": None}, **options)
    x = jax.random.normal(jax.random.key(1), (4, 6))
    variables = pipe.init(jax.random.key(0), x)
    on_host = jax.device_get(variables)
    expected = layers[1].apply(on_host[1], layers[0].apply(on_host[0], x))
    ref.assert_close(pipe.apply(variables, x), expected, ref.FLOAT32)
    # Which of the outputs are joined is no matter of a loss.
    ref.compare(pipe, layers, x, x[:, :3], ref.FLOAT32, lambda y, t: ref.mse(y["z"], t))


def test_a_batch_is_split_in_more_micro_batches_than_one_call_cuts():
    layers, devices = [ref.dense(6), jnp.tanh, ref.dense(4)], jax.devices()[:2]
    pipe = jpipe.pipeline(layers, 19, balance=[1, 2], devices=devices)
    ref.compare(pipe, layers, *ref.regression(40), ref.FLOAT32)


class Shifted(nn.Module):
    """A parameter of integers beside those of a dense layer."""

    @nn.compact
    def __call__(self, x):
        return ref.dense(4)(x) + self.param("shift", lambda _: jnp.arange(4))


def test_an_optimizer_of_ones_own_loop_leaves_integers_as_they_are():
    pipe, (x, targets) = jpipe.pipeline([Shifted(), Shifted()], 2), ref.regression(8)
    variables = pipe.init(jax.random.key(0), x)
    params = tuple(entry["params"] for entry in variables)
    tx = pipe.optimizer(optax.sgd(0.5))
    _, grads = pipe.value_and_grad(ref.mse)(variables, x, targets)
    updates, _ = tx.update(grads, tx.init(params), params)
    for own, update, grad in zip(params, updates, grads, strict=True):
        np.testing.assert_array_equal(own["shift"] + update["shift"], np.arange(4))
        ref.assert_close(
            update["Dense_0"], jax.tree.map(lambda g: -g / 2, grad["Dense_0"]), 1e-6
        )
