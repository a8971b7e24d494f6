"""After what makes each example anew, one after the other, they lie where they lay.

So a loss of two halves is found to be one, whatever the layers before it did.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import jpipe

from .asked import KEY, PARTS, WIDTH, data, of_outputs_alone

ROWS = 2


def rows(x):
    return x.reshape(len(x), ROWS, -1)


def ends_of(x):
    return (x[:, 0] > 0).astype(int)


def last_of_each(x):
    """As of a reward, at the last token of each text."""
    return rows(x)[jnp.arange(len(x)), ends_of(x)]


def from_one_table(x):
    flat = rows(x).reshape(len(x) * ROWS, -1)
    return flat[jnp.arange(len(x)) * ROWS + ends_of(x)]


def written(x):
    return x.at[jnp.arange(len(x)), ends_of(x)].multiply(2.0)


def written_one_by_one(x):
    starts = ends_of(x)[:, None]
    return jax.vmap(jax.lax.dynamic_update_slice)(x, x[:, :1] * 2, starts)


def pooled(x):
    """As graphs in one table, by the number of the graph of each node."""
    graphs = jnp.repeat(jnp.arange(len(x)), ROWS)
    return jax.ops.segment_sum(x.reshape(len(x) * ROWS, -1), graphs, len(x))


def of_frequencies(x):
    return jnp.abs(jnp.fft.rfft(x, axis=-1))


def one_by_one(x):
    return jax.lax.map(jnp.tanh, x)


def if_all_are_finite(x):
    return jax.lax.cond(jnp.isfinite(x).all(), lambda: 2 * x, lambda: x)


def solved(x):
    matrices = x[:, :, None] * x[:, None, :] + jnp.eye(WIDTH)
    return jnp.linalg.solve(matrices, x[..., None])[..., 0]


LAYERS = [
    last_of_each,
    from_one_table,
    written,
    written_one_by_one,
    pooled,
    of_frequencies,
    one_by_one,
    if_all_are_finite,
    solved,
]


def preferred(y, _):
    """Chosen ones first, and those rejected after."""
    chosen, rejected = jnp.split(y[:, 0], 2)
    return -jnp.mean(jax.nn.log_sigmoid(chosen - rejected))


@pytest.mark.parametrize("layer", LAYERS)
def test_a_loss_of_halves_is_refused(layer):
    x = data()
    y = layer(x)
    parts = [preferred(part, None) for part in np.split(y, PARTS)]
    assert abs(np.mean(parts) - preferred(y, None)) > 1e-3
    pipe = jpipe.sequential([nn.Dense(WIDTH), layer], PARTS)
    with pytest.raises(ValueError, match=r"loss_fn (compares|is, of random)"):
        pipe.value_and_grad(preferred)(pipe.init(KEY, x), x, x)


def the_first_half_alone(x):
    return x * (jnp.arange(len(x)) < len(x) // 2)[:, None]


@pytest.mark.parametrize("layer", [last_of_each, pooled, if_all_are_finite])
def test_the_next_layer_finds_the_places(layer):
    x = data()
    pipe = jpipe.sequential([nn.Dense(WIDTH), layer, the_first_half_alone], PARTS)
    says = r"layer 2 \(the_first_half_alone\) tells examples apart by their place"
    with pytest.warns(UserWarning, match=says):
        pipe.value_and_grad(of_outputs_alone)(pipe.init(KEY, x), x, x)
