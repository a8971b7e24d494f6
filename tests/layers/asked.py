"""What is said of a layer, beside what micro-batches make of it by hand."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import jpipe

from .. import reference as ref

BATCH, PARTS, WIDTH = 12, 3, 4
KEY = jax.random.key(0)


def data(width=WIDTH):
    return 2 * jax.random.normal(KEY, (BATCH, width))


def of_outputs_alone(y, _):
    return jnp.mean(jnp.sin(y - 0.3) ** 2)


def gradient_by(layer, num_microbatches=PARTS, width=WIDTH, loss_fn=of_outputs_alone):
    """Loss and gradients; the layer is the second, number 1."""
    x = data(width)
    pipe = jpipe.sequential([nn.Dense(width), layer], num_microbatches)
    return pipe.value_and_grad(loss_fn)(pipe.init(KEY, x), x, jnp.cos(x))


def check_told(layer, says, width=WIDTH):
    """Parts give other results, or gradients, than the whole; and a warning says so."""

    def both(x):
        return layer(x), jax.grad(lambda x: jnp.sum(layer(x) ** 2))(x)

    x = data(width)
    parts = [both(part) for part in jnp.split(x, PARTS)]
    together = jax.tree.map(lambda *each: jnp.concatenate(each), *parts)
    pairs = zip(both(x), together, strict=True)
    assert not all(np.allclose(*pair, rtol=1e-3, atol=1e-3) for pair in pairs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=rf"layer 1 \(.*\) {says}"):
            gradient_by(layer, width=width)


def check_left(layer, width=WIDTH):
    """Nothing is said, and the gradients are those of the whole."""
    # Where exponentials are divided, a few more roundings than a sum has.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = gradient_by(layer, width=width)
    ref.assert_close(found, gradient_by(layer, 1, width), 2e-5)
