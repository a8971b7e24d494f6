"""Features that are taken, or written, where all examples say together."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import jpipe

from .. import reference as ref

BATCH, PARTS, WIDTH = 12, 3, 6
KEY = jax.random.key(0)


def strongest(x, count=3):
    return jax.lax.top_k(jnp.abs(x).mean(0), count)[1]


def kept(x):
    return jnp.take(x, strongest(x), axis=1)


def ordered(x):
    return x[:, jnp.argsort(x.var(0))]


def by_row(x):
    places = strongest(x)
    return jax.vmap(lambda row: row[places])(x)


def removed(x):
    return x.at[:, jnp.argmax(x.mean(0))].set(0.0)


def more_of_some(x):
    return x.at[:, jnp.argsort(x.sum(0))[:2]].multiply(2.0)


def written_in_order(x):
    return jnp.zeros_like(x).at[:, jnp.argsort(x.mean(0))].set(x)


def in_groups(x):
    return jax.ops.segment_sum(x.T, jnp.argsort(x.mean(0)) // 2, WIDTH // 2).T


def updated(x):
    nothing, place = jnp.zeros((len(x), 1)), jnp.argmin(x.mean(0))
    return jax.lax.dynamic_update_slice_in_dim(x, nothing, place, 1)


TOLD = [
    kept,
    ordered,
    by_row,
    removed,
    more_of_some,
    written_in_order,
    in_groups,
    updated,
]


def of_each(x):
    return jnp.take_along_axis(x, jnp.argsort(x, -1)[:, :3], axis=1)


def from_a_table(x):
    table = jnp.sin(jnp.arange(5.0 * WIDTH)).reshape(5, WIDTH)
    return x + table[jnp.clip(x[:, 0], 0, 4).astype(int)]


def everywhere(x):
    """What is indexed by nothing has an index without elements."""
    return x.at[:].add(1.0) + jnp.zeros(WIDTH).at[...].add(2.0)


APART = [of_each, from_a_table, everywhere]


def data():
    return jax.random.normal(KEY, (BATCH, WIDTH))


def gradient_by(layer, num_microbatches, loss_fn=None):
    pipe = jpipe.sequential([nn.Dense(WIDTH), layer], num_microbatches)
    find = pipe.value_and_grad(loss_fn or (lambda y, _: jnp.mean(jnp.sin(y) ** 2)))
    return find(pipe.init(KEY, data()), data(), data())


@pytest.mark.parametrize("layer", TOLD)
def test_what_all_examples_choose_is_told(layer):
    x = data()
    parts = jnp.concatenate([*map(layer, jnp.split(x, PARTS))])
    assert not np.allclose(layer(x), parts, atol=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        says = r"layer 1 \(.*\) computes with what is made of all examples"
        with pytest.raises(UserWarning, match=says):
            gradient_by(layer, PARTS)


@pytest.mark.parametrize("layer", APART)
def test_what_each_chooses_is_not(layer):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = gradient_by(layer, PARTS)
    ref.assert_close(found, gradient_by(layer, 1), 1e-5)


def test_what_a_loss_chooses_by_all_is_told():
    with pytest.warns(UserWarning, match="loss_fn computes with what is made of all"):
        gradient_by(jnp.tanh, PARTS, lambda y, _: jnp.mean(y[:, strongest(y, 2)]))
