"""A file of a user's: factories of models, and what is none."""

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn


def make():
    layers = [nn.Dense(8), nn.tanh, nn.Dense(8), nn.tanh, nn.Dense(2)]
    return layers, jax.ShapeDtypeStruct((16, 4), jnp.float32)


def with_loss():
    layers, sample = make()
    return {
        "layers": layers,
        "sample": sample,
        "optimizer": optax.sgd(0.1),
        "loss": lambda y, targets: jnp.mean((y - targets) ** 2),
        "targets": jax.ShapeDtypeStruct((16, 2), jnp.float32),
    }


def only_layers():
    return make()[0]


def no_sample():
    return {"layers": make()[0], "sample": None}


def no_optimizer():
    return *make(), 1e-3


def raises():
    raise ValueError("mine")


def raises_in_a_layer():
    def second(x):
        raise TypeError("of a layer")

    layers, sample = make()
    return [layers[0], second], sample


def opens():
    return open("/nowhere/data.txt")
