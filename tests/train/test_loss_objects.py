"""Losses that are objects: known again as `jax.jit` knows functions."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import jpipe

X, TARGETS = jnp.linspace(0, 1, 12).reshape(4, 3), jnp.ones((4, 2))


@dataclasses.dataclass(frozen=True)
class Frozen:
    """It has the hash and the equality of what it holds."""

    scale: float

    def __call__(self, y, t):
        return self.scale * jnp.mean((y - t) ** 2)


@dataclasses.dataclass
class Unhashable:
    scale: float

    def __call__(self, y, t):
        return self.scale * jnp.mean((y - t) ** 2)


@pytest.fixture(scope="module")
def model():
    pipe = jpipe.sequential([nn.Dense(2)], 2)
    return pipe, pipe.init(jax.random.key(0), X)


@pytest.mark.parametrize("kind", [Frozen, Unhashable])
def test_losses_that_hold_other_values_are_others(model, kind):
    pipe, variables = model
    one, two = (pipe.value_and_grad(kind(scale)) for scale in (1.0, 2.0))
    first, second = (f(variables, X, TARGETS) for f in (one, two))
    np.testing.assert_allclose(second[0], 2 * first[0], rtol=1e-6)
    for name, grad in first[1][0].items():
        np.testing.assert_allclose(second[1][0][name], 2 * grad, rtol=1e-5)


def test_loss_that_changes_is_read_again_where_something_is_built(model):
    """Between two builds it is what was traced, as under `jax.jit`."""
    pipe, variables = model
    loss_fn = Unhashable(1.0)
    built = pipe.value_and_grad(loss_fn)
    first, _ = built(variables, X, TARGETS)
    loss_fn.scale = 2.0
    assert built(variables, X, TARGETS)[0] == first
    again, _ = pipe.value_and_grad(loss_fn)(variables, X, TARGETS)
    np.testing.assert_allclose(again, 2 * first, rtol=1e-6)
