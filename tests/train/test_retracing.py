"""What is built again reads losses, layers and globals as they are now.

What was built keeps what it was traced with, as under `jax.jit`. Each row is a way to
hide a value from a cache that compares functions.
"""

import dataclasses
import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import jpipe

from .. import reference as ref

# Its programs are tried once: XLA need not optimize them.
pytestmark = pytest.mark.usefixtures("quick")

NOW = types.SimpleNamespace()
X, TARGETS = ref.regression(4)


@pytest.fixture(scope="module")
def one():
    """A pipeline of one layer, and its variables."""
    pipe = jpipe.pipeline([nn.Dense(4)], 2)
    return pipe, pipe.init(jax.random.key(0), X)


@dataclasses.dataclass
class Focal:
    """Compared by what it holds, but not hashed."""

    power: float

    def __call__(self, y, t):
        return jnp.abs(y - t) ** self.power


def decorated(function):
    @functools.wraps(function)
    def wrapper(y, t):
        return NOW.value * function(y, t)

    return wrapper


@jax.custom_vjp
def ruled(y):
    return y**2


ruled.defvjp(lambda y: (y**2, y), lambda y, g: (g * y * NOW.value,))


def criterion(y, t):
    return NOW.value(y, t).mean()


# The loss, and what it finds before and after.
LOSSES = {
    "global function": (criterion, optax.l2_loss, optax.huber_loss),
    "object": (criterion, Focal(1.0), Focal(4.0)),
    "decorator": (decorated(ref.mse), 1.0, 3.0),
    "rule of a gradient": (lambda y, t: ruled(y - t).mean(), 1.0, 3.0),
    "array": (lambda y, t: (NOW.value * (y - t)).mean(), jnp.arange(4.0), jnp.ones(4)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_gradient_function_keeps_the_globals_of_its_first_call(one, name):
    (pipe, variables), (loss, *values) = one, LOSSES[name]
    before, find, NOW.value = None, pipe.value_and_grad(loss), values[1]
    for NOW.value in (*values, values[0]):
        found = pipe.value_and_grad(loss)(variables, X, TARGETS)
        params = ref.params_of(variables)
        by_hand = ref.value_and_grad([nn.Dense(4)], params, X, TARGETS, loss)
        ref.assert_close(found, by_hand, ref.FLOAT32)
        before = found if before is None else before
        ref.assert_equal(find(variables, X, TARGETS), before)


def amplified(x):
    return jax.vmap(lambda row: NOW.value * row)(x)


class Amplified(nn.Module):
    config: types.SimpleNamespace

    def __call__(self, x):
        return self.config.value * x


LAYERS = {
    "function": amplified,
    "jpipe.layer": jpipe.layer(Amplified(NOW), lambda m, x: NOW.value * x),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_new_gradient_function_reads_globals_of_layers_again(name):
    NOW.value = 1.0
    pipe = jpipe.pipeline([nn.Dense(4), LAYERS[name]], 2)
    variables = pipe.init(jax.random.key(0), X)
    params = ref.params_of(variables)
    find = pipe.value_and_grad(ref.mse)
    before = find(variables, X, TARGETS)
    for NOW.value in (1.0, 3.0):
        ref.assert_equal(find(variables, X, TARGETS), before)  # as under jax.jit
        found = pipe.value_and_grad(ref.mse)(variables, X, TARGETS)
        by_hand = [nn.Dense(4), lambda x: NOW.value * x]
        expected = ref.value_and_grad(by_hand, params, X, TARGETS)
        ref.assert_close(found, expected, ref.FLOAT32)
        y = pipe.apply(variables, X)  # what is trained is what is evaluated
        ref.assert_close(y, ref.compose(by_hand, params, X), ref.FLOAT32)


def test_an_initializer_is_called_for_each_of_equal_layers():
    number = itertools.count()

    def following(key, shape, dtype):
        return jnp.full(shape, np.float32(next(number)), dtype)

    layers = [nn.Dense(3, kernel_init=following) for _ in range(3)]
    variables = jpipe.pipeline(layers, 2).init(jax.random.key(0), jnp.ones((4, 3)))
    values = [float(v["params"]["kernel"][0, 0]) for v in variables]
    assert len(set(values)) == 3
    assert values == sorted(values)


def test_programs_that_print_alike_and_read_different_refs_are_not_shared():
    """Of a `jax.Ref` the text has no more than that there is one."""
    pipe = jpipe.pipeline([jnp.tanh], 1)
    refs = [jax.new_ref(jnp.asarray(value)) for value in (2.0, 5.0)]
    placed = jax.device_put(jnp.ones(()), pipe.devices[0])
    assert [pipe.jit(lambda t, r=r: t * r[...])(placed) for r in refs] == [2.0, 5.0]
    refs[0][...] = 4.0
    assert pipe.jit(lambda t: t * refs[0][...])(placed) == 4.0
