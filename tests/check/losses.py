"""Losses as people write them: means and sums over the examples, and others.

Each is given logits ``y`` of shape [12, 2, 5] and tokens ``t`` of shape [12, 2].
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

BATCH, TOKENS, WORDS = 12, 2, 5
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


@functools.cache
def data():
    """Logits and tokens."""
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(BATCH, TOKENS, WORDS))
    tokens = rng.integers(0, WORDS, (BATCH, TOKENS))
    return jnp.asarray(logits), jnp.asarray(tokens)


def one_hot(t):
    return jax.nn.one_hot(t, WORDS)


def along_time(y, t):
    def add(total, place):
        return total + cross_entropy(y[:, place], t[:, place]).sum(), None

    return jax.lax.scan(add, 0.0, jnp.arange(TOKENS))[0]


def in_groups(y, t):
    """Recomputed in the backward, group by group."""
    grouped = y.reshape(2, -1, TOKENS, WORDS), t.reshape(2, -1, TOKENS)
    of_group = jax.checkpoint(lambda group: cross_entropy(*group).sum())
    return jax.lax.map(of_group, grouped).sum() / t.size


MEANS = {
    "mean": lambda y, t: cross_entropy(y, t).mean(),
    "of those of each pair": lambda y, t: jnp.maximum(
        0, 1 - jnp.sum((y[::2] - y[1::2]) ** 2, (1, 2))
    ).mean(),
    "bfloat16": lambda y, t: cross_entropy(y.astype(jnp.bfloat16), t).sum() / t.size,
    "scan": lambda y, t: along_time(y, t) / t.size,
    "in groups": in_groups,
    "none of the examples": lambda y, t: jnp.float32(2),
}
SUMS = {
    "sum": lambda y, t: cross_entropy(y, t).sum(),
    "scan": along_time,
    "square of a norm": lambda y, t: jnp.linalg.norm(y - one_hot(t)) ** 2,
}


def masked(y, t):
    return jnp.sum(cross_entropy(y, t) * (t > 0)) / jnp.sum(t > 0)


def embedded(y):
    return y.reshape(len(y), -1)


OTHERS = {
    "masked": masked,
    "root": lambda y, t: jnp.sqrt(jnp.mean((y - one_hot(t)) ** 2)),
    "variance": lambda y, t: jnp.mean((y - y.mean(0)) ** 2),
    "contrastive": lambda y, t: cross_entropy(
        embedded(y) @ embedded(y + one_hot(t)).T, jnp.arange(len(y))
    ).mean(),
    "unbiased": lambda y, t: (y**2).sum() / (len(y) - 1),
    "sum and mean": lambda y, t: y.sum() + y.mean(),
}
