"""A parameter made of a Python number has no dtype of its own until it is updated."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import jpipe

from .. import reference as ref


class Weak(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x * self.param("scale", lambda _: jnp.full(3, 0.5))


class WeakNnx(nnx.Module):
    def __init__(self):
        self.scale = nnx.Param(0.5)

    def __call__(self, x):
        return x * self.scale


@pytest.mark.parametrize("kind", [Weak, WeakNnx])
def test_parameter_made_of_a_number_is_of_the_default_dtype_from_the_start(kind):
    """JAX alone computes in another dtype from its first update on."""
    pipe = jpipe.pipeline([kind(), jnp.sin], 2)
    x = jnp.ones((4, 3), jnp.bfloat16)
    variables = pipe.init(jax.random.key(0), x)
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(variables))
    expected = jnp.sin(x * jnp.full(3, 0.5, jnp.float32))
    ref.assert_close(pipe.apply(variables, x), expected, ref.FLOAT32)
