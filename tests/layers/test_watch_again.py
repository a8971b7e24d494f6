"""What was asked once is asked again, though JAX does not run what it has traced."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import jpipe

KEY, X = jax.random.key(0), jnp.ones((4, 4))


@nn.jit
class Enabled(nn.Module):
    """Is evaluated in training, if nobody says more."""

    @nn.compact
    def __call__(self, x, enable_dropout=False):
        return nn.Dropout(0.5)(x, deterministic=not enable_dropout)


@functools.partial(nnx.jit, static_argnums=2)
def dropped(inner, x, deterministic):
    return inner(x, deterministic=deterministic)


class Inner(nnx.Module):
    def __init__(self):
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

    def __call__(self, x, deterministic=True):
        return dropped(self.dropout, x, deterministic)


class Outer(nnx.Module):
    """Is told, and holds what is not."""

    def __init__(self):
        self.inner = Inner()

    def __call__(self, x, train):
        return self.inner(x)


@pytest.mark.parametrize("listed", [Enabled, Outer])
def test_a_question_is_asked_again(listed):
    for _ in range(3):
        pipe = jpipe.sequential([listed()], 2)
        variables = pipe.init(KEY, X)
        with pytest.raises(ValueError, match="it is unclear what of this layer"):
            pipe.apply(variables, X, rngs={"dropout": KEY}, train=True)
