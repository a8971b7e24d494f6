"""What is shifted by the largest of all examples, until a quotient loses the shift."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

from .asked import check_left, check_told, gradient_by


def raised(x):
    return jnp.exp(x - x.max())


def shares(x, more=0.0, rest=1e-3):
    made = raised(x)
    return made / (jnp.sum(made, -1, keepdims=True) * (1 + more) + rest)


def cut(x):
    made = jnp.exp(jnp.clip(x - x.max(), -3, 0))
    return made / made.sum(-1, keepdims=True)


def by_another(x):
    return raised(x) / raised(2 * x).sum(-1, keepdims=True)


def without_small_ones(x):
    made = raised(x)
    return jnp.where(made > 0.05, made, 0) / made.sum(-1, keepdims=True)


def squares_by_a_sum(x):
    made = raised(x)
    return made * made / made.sum(-1, keepdims=True)


TOLD = {
    "a little beside": shares,
    "one beside": lambda x: shares(x, rest=1.0),
    "a curve": lambda x: jnp.tanh(raised(x)),
    "a logarithm": lambda x: jnp.log1p(raised(x)),
    "a bend": lambda x: nn.relu(raised(x) - 0.1),
    "a sum": lambda x: x + raised(x),
    "a quotient by itself and one": lambda x: raised(x) / (1 + raised(x)),
    "what chooses": lambda x: jnp.where(raised(x) > 0.1, x, 0.0),
    "the largest of several": lambda x: jnp.minimum(raised(x), 0.3),
    "cut": cut,
    "by another": by_another,
    "without small ones": without_small_ones,
    "squares by a sum": squares_by_a_sum,
}


def normed(x, power=1):
    made = jnp.where(x > -1, raised(x), 0) ** power
    return made / made.sum(-1, keepdims=True)


def of_length_one(x):
    made = raised(x)
    return made * jax.lax.rsqrt(jnp.sum(jnp.square(made), -1, keepdims=True))


def linear_attention(x):
    """Features of queries and of keys, each with a shift of its own."""
    queries, keys = raised(x)[..., None], raised(jnp.sin(x))[..., None]
    made = jnp.einsum("bif,bjf,bj->bi", queries, keys, x)
    return made / jnp.einsum("bif,bjf->bi", queries, keys)


def by_the_largest(x):
    made = raised(x)
    return made / made.max(-1, keepdims=True)


APART = {
    "shares": normed,
    "of squares": lambda x: normed(x, 2),
    "by the largest": by_the_largest,
    "of length one": of_length_one,
    "linear attention": linear_attention,
}


@pytest.mark.parametrize("name", TOLD)
def test_a_shift_that_stays_is_told(name):
    check_told(TOLD[name], ".*(the largest|made of all)")


@pytest.mark.parametrize("name", APART)
def test_a_shift_that_a_quotient_loses_is_not(name):
    check_left(APART[name])


def test_advantages_that_are_cut_off_are_told():
    def weighed(y, t):
        weights = jnp.exp((t[:, 0] - t[:, 0].max()) / 0.5)
        return jnp.mean(y[:, 0] ** 2 * jnp.minimum(weights, 0.5))

    with pytest.warns(UserWarning, match="loss_fn computes with what is shifted"):
        gradient_by(jnp.tanh, loss_fn=weighed)
