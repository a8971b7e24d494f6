"""Losses that take what is trained elsewhere, which would not train it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jpipe

X = jnp.ones((4, 3))


def linear(seed=0):
    return nnx.Linear(3, 3, rngs=nnx.Rngs(seed))


def mse(y, t):
    return jnp.mean((y - t) ** 2)


class Distance:
    def __init__(self, module):
        self.module = module

    def __call__(self, y, t):
        return mse(self.module(y), t)

    def other(self, y, t):
        return mse(y, t)


class Temperature(nnx.Module):
    def __init__(self):
        self.temperature = nnx.Param(jnp.ones(()))

    def __call__(self, y, t):
        return mse(y * self.temperature, t)


class Model(nnx.Module):
    def __init__(self):
        self.first, self.second, self.scale = linear(), linear(1), 2.0

    def loss(self, y, t):
        return self.scale * mse(y, t)

    def tied(self, y, t):
        return mse(self.head(y), t)

    def head(self, y):
        return self.first(y)


class Parts(nn.Module):
    def setup(self):
        self.first, self.second = nn.Dense(3), nn.Dense(3)

    def __call__(self, x):
        return self.second(self.first(x))


def losses(module, kernel):
    return {
        "function": lambda y, t: mse(module(y), t),
        "a part": lambda y, t: mse(y @ kernel, t),
        "object": Distance(module),
        "bound method": Distance(module).__call__,
        "partial": functools.partial(lambda m, y, t: mse(m(y), t), module),
    }


@pytest.mark.parametrize("name", losses(None, None))
def test_a_loss_that_takes_a_layer_is_refused(name):
    layer = nnx.Sequential(linear(), linear(1))
    part = layer.layers[1]
    loss = losses(part, part.kernel)[name]
    pipe = jpipe.pipeline([linear(2), layer], 2)
    says = r"(?s)compute it in the last layer .*takes .*, a \w+, of layer 1"
    with pytest.raises(TypeError, match=says):
        pipe.value_and_grad(loss)
    with pytest.raises(TypeError, match=says):
        pipe.train_step(loss, optax.sgd(0.1))


def test_a_loss_that_takes_a_bound_layer_is_refused():
    parts = Parts()
    bound = parts.bind(parts.init(jax.random.key(0), X))
    pipe = jpipe.pipeline([bound.first, nn.Dense(3)], 2)
    with pytest.raises(TypeError, match="takes bound, a Parts, of layer 0"):
        pipe.value_and_grad(lambda y, t: mse(bound(y), t))
    second = bound.second
    pipe.value_and_grad(lambda y, t: mse(second(y), t))


@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: m.__call__, functools.partial])
def test_a_loss_that_is_a_module_with_parameters_is_refused(wrap):
    pipe = jpipe.pipeline([linear()], 2)
    with pytest.raises(TypeError, match=r"is a Temperature, .*list it as the last lay"):
        pipe.value_and_grad(wrap(Temperature()))


def test_a_frozen_teacher_is_none_of_this():
    layer, teacher = linear(), linear(1)
    pipe = jpipe.pipeline([layer], 2)
    variables = pipe.init(jax.random.key(0), X)
    loss, _ = pipe.value_and_grad(lambda y, t: mse(y, teacher(t)))(variables, X, X)
    np.testing.assert_allclose(loss, mse(layer(X), teacher(X)), rtol=1e-5)
    pipe.value_and_grad(Distance(layer).other)


def test_a_loss_is_a_method_of_the_model_of_which_it_takes_nothing_that_is_trained():
    model = Model()
    pipe = jpipe.pipeline([model.first, model.second], 2)
    pipe.value_and_grad(model.loss)
    pipe.value_and_grad(lambda y, t: model.loss(y, t))
    for loss in (model.tied, lambda y, t: model.tied(y, t)):
        with pytest.raises(TypeError, match=r"takes self.first, a Linear, of layer 0$"):
            pipe.value_and_grad(loss)
