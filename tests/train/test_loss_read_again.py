"""A loss that reads what was changed since: built again, it is the loss of now."""

import functools
import types

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn

import jpipe

from .. import reference as ref

HERE = types.SimpleNamespace()


def weighted(scale):
    return lambda y, t: scale * (y - t) ** 2


class Focal:
    def __init__(self, power):
        self.power = power

    def __call__(self, y, t):
        return jnp.abs(y - t) ** self.power


class Scaled:
    @property
    def scale(self):
        return HERE.value

    def loss(self, y, t):
        return (self.scale * (y - t) ** 2).mean()


def scaled(function):
    @functools.wraps(function)
    def wrapper(y, t):
        return HERE.value * function(y, t)

    return wrapper


@jax.custom_vjp
def ruled(y):
    return y**2


ruled.defvjp(lambda y: (y**2, y), lambda y, g: (g * y * HERE.value,))


def two(y, t):
    return (HERE.value[0](y, t) + HERE.value[1](y, t)).mean()


def criterion(y, t):
    return HERE.value(y, t).mean()


# The loss, and what it finds before and after.
READ = {
    "function of a library": (criterion, optax.l2_loss, optax.huber_loss),
    "functions of one name": (
        two,
        (weighted(1.0), weighted(2.0)),
        (weighted(3.0), weighted(2.0)),
    ),
    "keywords of a partial": (
        criterion,
        functools.partial(optax.huber_loss, delta=0.1),
        functools.partial(optax.huber_loss, delta=0.2),
    ),
    "schedule": (
        lambda y, t: HERE.value(1) * ((y - t) ** 2).mean(),
        optax.linear_schedule(1.0, 0.0, 10),
        optax.linear_schedule(2.0, 0.0, 10),
    ),
    "bound method": (criterion, Focal(1.0).__call__, Focal(4.0).__call__),
    "decorator": (scaled(lambda y, t: ((y - t) ** 2).mean()), 1.0, 3.0),
    "property": (Scaled().loss, 1.0, 3.0),
    "rule of a gradient": (lambda y, t: ruled(y - t).mean(), 1.0, 3.0),
    "array": (
        lambda y, t: (HERE.value * (y - t) ** 2).mean(),
        jnp.arange(3.0),
        jnp.ones(3),
    ),
}


@pytest.mark.parametrize("name", READ)
def test_a_step_that_is_built_again_has_the_loss_of_now(name):
    loss, before, after = READ[name]
    x, targets = ref.regression(4)
    pipe = jpipe.pipeline([nn.Dense(4), nn.Dense(3)], 2)
    variables = pipe.init(jax.random.key(0), x)

    def by_hand(params):
        first, last = params
        y = (x @ first["kernel"] + first["bias"]) @ last["kernel"] + last["bias"]
        return loss(y, targets[:, :3])

    for HERE.value in (before, after, before):
        found = pipe.value_and_grad(loss)(variables, x, targets[:, :3])
        expected = jax.value_and_grad(by_hand)(ref.params_of(ref.on_host(variables)))
        ref.assert_close(found, expected, 1e-5)


def test_what_a_build_was_traced_with_is_not_what_it_was_built_with():
    def loss(y, t):
        return HERE.value * ((y - t) ** 2).mean()

    x, targets = ref.regression(4)
    pipe = jpipe.pipeline([nn.Dense(4)], 2)
    variables = pipe.init(jax.random.key(0), x)
    HERE.value = 1.0
    expected, _ = pipe.value_and_grad(loss)(variables, x, targets[:, :4])
    late = pipe.value_and_grad(loss)
    HERE.value = 5.0
    assert late(variables, x, targets[:, :4])[0] == pytest.approx(5 * expected)
    HERE.value = 1.0
    assert pipe.value_and_grad(loss)(variables, x, targets[:, :4])[0] == expected


def test_a_loss_that_comes_to_the_same_is_not_traced_with_the_layers_again():
    traced = []

    def layer(x):
        traced.append(0)
        return 2 * x

    def loss(y, t):
        return ((y - t) ** 2).mean()

    x, targets = ref.regression(4)
    pipe = jpipe.pipeline([nn.Dense(4), layer], 2)
    variables = pipe.init(jax.random.key(0), x)
    pipe.value_and_grad(loss)(variables, x, targets[:, :4])
    before = len(traced)
    pipe.value_and_grad(loss)(variables, x, targets[:, :4])
    assert len(traced) == before > 0
