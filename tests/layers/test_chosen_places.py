"""What is taken, or written, where all examples say together."""

import jax
import jax.numpy as jnp
import pytest

from .asked import BATCH, check_left, check_told, gradient_by

WIDTH = 6


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


def valid(x, fill_value=0):
    """Those that count, first; and one of them again in the places that are left."""
    places = jnp.nonzero(x[:, 0] > 0, size=len(x), fill_value=fill_value)[0]
    return x[places]


def in_place_of_others(x):
    return jnp.where(x[:, :1] > 0, x, valid(x, 1))


def compressed(x):
    made = jnp.compress(x[:, 0] > 0, x, axis=0, size=len(x), fill_value=0)
    return made * jnp.tanh(x)


def from_the_largest_on(x):
    return x[jnp.argsort(x[:, 0])[::-1]] * jnp.tanh(x)


def by_rank(x):
    ranks = jnp.argsort(jnp.argsort(x[:, 0]))
    return x + jnp.sin(jnp.arange(2.0 * BATCH))[ranks][:, None]


def drawn_by_a_sum(x):
    key = jax.random.key((jnp.abs(x).sum() * 1000).astype(int))
    return x + jax.random.normal(key, (WIDTH,))


# In one version of JAX `nonzero` adds up, in another it searches.
COUNTED = "(goes along the examples|takes or writes examples at places that are given)"
FOLLOWS = "computes with what is made of all examples"
TOLD = {
    kept: FOLLOWS,
    ordered: FOLLOWS,
    by_row: FOLLOWS,
    removed: FOLLOWS,
    more_of_some: FOLLOWS,
    written_in_order: FOLLOWS,
    in_groups: FOLLOWS,
    updated: FOLLOWS,
    valid: COUNTED,
    in_place_of_others: COUNTED,
    compressed: "compares examples with one another",
    from_the_largest_on: "compares examples with one another",
    by_rank: FOLLOWS,
    drawn_by_a_sum: FOLLOWS,
}


def of_each(x):
    return jnp.take_along_axis(x, jnp.argsort(x, -1)[:, :3], axis=1)


def from_a_table(x):
    table = jnp.sin(jnp.arange(5.0 * WIDTH)).reshape(5, WIDTH)
    return x + table[jnp.clip(x[:, 0], 0, 4).astype(int)]


def everywhere(x):
    """What is indexed by nothing has an index without elements."""
    return x.at[:].add(1.0) + jnp.zeros(WIDTH).at[...].add(2.0)


def sorted_and_back(x):
    order = jnp.argsort(x[:, 0])[::-1]
    return jnp.tanh(x[order])[jnp.argsort(order)]


APART = [of_each, from_a_table, everywhere, sorted_and_back]


@pytest.mark.parametrize("layer", TOLD)
def test_what_all_examples_choose_is_told(layer):
    check_told(layer, TOLD[layer], WIDTH)


@pytest.mark.parametrize("layer", APART)
def test_what_each_chooses_is_not(layer):
    check_left(layer, WIDTH)


def test_what_a_loss_chooses_by_all_is_told():
    with pytest.warns(UserWarning, match="loss_fn computes with what is made of all"):
        gradient_by(jnp.tanh, loss_fn=lambda y, _: jnp.mean(y[:, strongest(y, 2)]))
