"""A model of two stages, a batch, and a layer that raises."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import jpipe

KEY = jax.random.key(0)
X = np.arange(12, dtype=np.float32).reshape(4, 3) / 12
TARGETS = np.ones((4, 2), np.float32)


def mse(outputs, targets):
    return jnp.mean((outputs - targets) ** 2)


def says(*parts: str) -> str:
    """A pattern: these texts, literally, in this order, with anything between."""
    parts = tuple(part for text in parts for part in text.split(" ... "))
    return "(?s)" + ".*".join(map(re.escape, parts))


def rows(table: dict[Any, dict[str, Any]]) -> list[Any]:
    """Of a table of calls by exception and message: call, exception and pattern."""
    return [
        pytest.param(call, error, says(message), id=message)
        for error, calls in table.items()
        for message, call in calls.items()
    ]


def two_stages() -> list[Any]:
    return [nn.Dense(5), nn.relu, nn.Dense(2)]


class Unlucky(Exception):
    """An exception that neither JAX nor Flax knows."""


class Fragile(nn.Module):
    """Raises where its test asks it to."""

    when: str

    @nn.compact
    def __call__(self, x, train: bool = False):
        if self.when == "always" or (self.when == "training" and train):
            raise Unlucky("no luck today")
        if self.when == "small" and len(x) == 2:
            raise Unlucky("no luck in small numbers")
        return nn.Dense(2)(x)


def fragile(when: str) -> jpipe.Pipeline:
    layers = [nn.Dense(3), nn.relu, nn.tanh, Fragile(when)]
    return jpipe.pipeline(layers, 2, balance=[1, 1, 2])


def on_host(state: jpipe.TrainState) -> jpipe.TrainState:
    readable = dataclasses.replace(state, rng=jax.random.key_data(state.rng))
    return jax.tree.map(np.asarray, readable)
