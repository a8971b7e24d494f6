"""What is trained in one place may not be a constant in another."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import jpipe

from .. import reference as ref

KEY, X = jax.random.key(0), jnp.ones((4, 3))
TARGETS = jnp.zeros((4, 3))


def linear():
    return nnx.Linear(3, 3, rngs=nnx.Rngs(0))


def gradient(layers, loss_fn=ref.mse, variables=None):
    pipe = jpipe.pipeline(layers, 2)
    variables = variables or pipe.init(KEY, X)
    return pipe.value_and_grad(loss_fn)(variables, X, TARGETS)


def test_function_that_reads_a_listed_module_raises():
    module = linear()
    with pytest.raises(
        TypeError, match=r"(?s)bias of layer 0 .Linear.*kernel of layer 0"
    ):
        gradient([module, lambda x: module(jnp.sin(x))])


def test_loss_that_reads_a_listed_module_raises():
    module = linear()
    with pytest.raises(TypeError, match=r"(?s)would be constants.*kernel of layer 0"):
        gradient([module], lambda y, t: ref.mse(y, t) + (module.kernel[...] ** 2).sum())


def test_loss_that_reads_the_variables_of_the_call_raises():
    pipe = jpipe.pipeline([nn.Dense(3), nn.relu], 2)
    variables = pipe.init(KEY, X)
    kernel = variables[0]["params"]["kernel"]
    with pytest.raises(TypeError, match=r"variables\[0\]\['params'\]\['kernel'\]"):
        gradient(
            [nn.Dense(3), nn.relu],
            lambda y, t: ref.mse(y, t) + (kernel**2).sum(),
            variables,
        )


def test_module_that_is_listed_nowhere_is_a_constant_as_under_jit():
    """Such as the teacher of a distillation."""
    teacher, student = linear(), nnx.Linear(3, 3, rngs=nnx.Rngs(1))
    _, grads = gradient([student, lambda y: y - jax.lax.stop_gradient(teacher(y))])
    assert set(grads[0]) == {"kernel", "bias"}
    assert grads[1] == {}
