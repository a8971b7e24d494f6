"""Layers whose equations print alike, and which compute something else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import jpipe

from .. import reference as ref

KEY, WIDTH = jax.random.key(0), 6
X, TARGETS = ref.regression(8)


def bits_made_by(is_partitionable):
    """Numbers of a key, where a setting says how they are made of it."""

    def normal(shape):
        with jax.threefry_partitionable(is_partitionable):
            return jax.random.normal(KEY, shape)

    return normal


def called_back(value):
    """A number of the host, by functions that JAX prints alike."""

    def constant(shape):
        spec = jax.ShapeDtypeStruct(shape, jnp.float32)
        return jax.pure_callback(lambda: np.full(shape, value, np.float32), spec)

    return constant


@pytest.mark.parametrize("make", [bits_made_by, called_back])
def test_initial_values_that_print_alike_are_each_layers_own(make):
    draws = [make(False), make(True)]
    layers = [
        nn.Dense(5, kernel_init=lambda key, shape, dtype, draw=draw: draw(shape))
        for draw in draws
    ]
    variables = jpipe.pipeline(layers, 2).init(KEY, X)
    for entry, draw in zip(variables, draws, strict=True):
        kernel = ref.on_host(entry["params"]["kernel"])
        ref.assert_equal(kernel, ref.on_host(draw((5, 5))))


def test_layers_of_other_settings_of_random_bits_are_no_equal_layers():
    def noise(draw):
        return lambda x: x + draw(x.shape)

    def both(draw):
        return [ref.dense(WIDTH), noise(draw)]

    layers = [*both(jnp.ones), *both(bits_made_by(True)), *both(bits_made_by(False))]
    layers += [ref.dense(4)]
    pipe = jpipe.pipeline(layers, 1, balance=[2, 2, 2, 1])
    ref.compare(pipe, layers, X, TARGETS, 1e-5)


def perturbed(scale):
    """A function whose derivative is another where its second operand has none."""

    @jax.custom_vjp
    def product(x, y):
        return x * y

    def forward(x, y):
        return x.value * y.value, (y.value, y.perturbed)

    def backward(kept, g):
        y, has_tangent = kept
        return g * y * (1.0 if has_tangent else scale), jnp.zeros_like(y)

    product.defvjp(forward, backward, symbolic_zeros=True)
    return lambda x: product(x, 2 * jnp.ones_like(x))


def test_rules_that_ask_what_is_perturbed_are_no_equal_layers():
    parts = [ref.dense(WIDTH), perturbed(1.0), perturbed(3.0), ref.dense(4)]
    ref.compare(jpipe.pipeline(parts, 2), parts, X, TARGETS, 1e-5)
