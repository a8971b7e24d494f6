"""Losses as people write them: means and sums over the examples, and others.

Each is given logits ``y`` of shape [12, 2, 5] and tokens ``t`` of shape [12, 2].
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

BATCH, TOKENS, WORDS = 12, 2, 5
KEY = jax.random.key(3)
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


def of_each(y, t):
    return cross_entropy(y, t).mean(-1)


def along_time(y, t):
    def add(total, place):
        return total + cross_entropy(y[:, place], t[:, place]).sum(), None

    return jax.lax.scan(add, 0.0, jnp.arange(TOKENS))[0]


def as_long_as_needed(y, t):
    def add(carried):
        place, total = carried
        return place + 1, total + cross_entropy(y[:, place], t[:, place]).mean()

    start = 0, jnp.zeros((), y.dtype)
    return jax.lax.while_loop(lambda carried: carried[0] < TOKENS, add, start)[1]


def in_groups(y, t):
    """Recomputed in the backward, group by group."""
    grouped = y.reshape(2, -1, TOKENS, WORDS), t.reshape(2, -1, TOKENS)
    of_group = jax.checkpoint(lambda group: cross_entropy(*group).sum())
    return jax.lax.map(of_group, grouped).sum() / t.size


def beside_the_largest(y):
    """A softmax that somebody wrote, less one number for all."""
    powers = jnp.exp(y - y.max())
    return powers / powers.sum(-1, keepdims=True)


MEANS = {
    "mean": lambda y, t: cross_entropy(y, t).mean(),
    "of the masked mean of each": lambda y, t: (
        (jnp.sum(cross_entropy(y, t) * (t > 0), -1))
        / jnp.maximum(jnp.sum(t > 0, -1), 1)
    ).mean(),
    "and a constant": lambda y, t: 3 * cross_entropy(y, t).mean() + 7,
    "of those of each pair": lambda y, t: jnp.maximum(
        0, 1 - jnp.sum((y[::2] - y[1::2]) ** 2, (1, 2))
    ).mean(),
    "penalty of gradients": lambda y, t: jnp.mean(
        jax.vmap(jax.grad(lambda one: jnp.sum(jnp.tanh(one) ** 3)))(y) ** 2
    ),
    "bfloat16": lambda y, t: cross_entropy(y.astype(jnp.bfloat16), t).sum() / t.size,
    "scan": lambda y, t: along_time(y, t) / t.size,
    "while": as_long_as_needed,
    "in groups": in_groups,
    "ctc": lambda y, t: optax.ctc_loss(
        y, jnp.zeros(t.shape), jnp.clip(t, 1), jnp.zeros(t.shape).at[:, 1].set(1)
    ).mean(),
    "centred, and linear": lambda y, t: jnp.mean(y - y.mean(0)) + y.mean(),
    "softmax, less the largest of all": lambda y, t: (
        -jnp.mean(one_hot(t) * jnp.log(beside_the_largest(y)))
    ),
    "and nothing of a root": lambda y, t: (
        y.mean() + 0.0 * jnp.sqrt(jnp.mean((y - one_hot(t)) ** 2))
    ),
    "none of the examples": lambda y, t: jnp.float32(2),
    # In each micro-batch of a multiple of four examples.
    "steps in each group": lambda y, t: jnp.mean(
        jnp.diff(y.reshape(-1, 4, TOKENS * WORDS), axis=1) ** 2
    ),
    "weights that are rounded": lambda y, t: (
        jnp.linspace(0.7, 0.7, len(y)) @ of_each(y, t) / len(y)
    ),
}
SUMS = {
    "sum": lambda y, t: cross_entropy(y, t).sum(),
    "by a number": lambda y, t: cross_entropy(y, t).sum() / BATCH,
    "scan": along_time,
    "square of a norm": lambda y, t: jnp.linalg.norm(y - one_hot(t)) ** 2,
}


def masked(y, t):
    return jnp.sum(cross_entropy(y, t) * (t > 0)) / jnp.sum(t > 0)


def embedded(y):
    return y.reshape(len(y), -1)


def hardest(y, t):
    """Triplets of each example with the farthest alike and the nearest other one."""
    distance = jnp.sum((embedded(y)[:, None] - embedded(y)[None]) ** 2, -1)
    alike = t[:, 0, None] == t[None, :, 0]
    farthest = jnp.max(jnp.where(alike, distance, 0), 1)
    return jnp.mean(farthest - jnp.min(jnp.where(alike, 1e3, distance), 1))


def by_class(y, t):
    """Examples weighed by how many of their class are in the batch."""
    counts = jnp.bincount(t[:, 0], length=WORDS)
    return (of_each(y, t) * (len(t) / counts)[t[:, 0]]).mean()


def spread_out(y, t):
    """Of one example it is infinite."""
    y = y[:, 0]
    likeness = y @ y.T - 9 * jnp.eye(len(y))
    return -jnp.log(jnp.linalg.norm(y - y[likeness.argmax(1)], axis=-1)).mean()


def discounted(y, t):
    def add(after, reward):
        after = reward + 0.9 * after
        return after, after

    returns = jax.lax.scan(add, 0.0, t[:, 0].astype(y.dtype), reverse=True)[1]
    return (returns * y[:, 0, 0]).mean()


def real_or_not(y, t):
    """As a loss makes labels of a batch that is one half real and one half made."""
    half = len(y) // 2
    labels = jnp.concatenate([jnp.ones(half), jnp.zeros(len(y) - half)])
    return optax.sigmoid_binary_cross_entropy(y[:, 0, 0], labels).mean()


OTHERS = {
    "masked": masked,
    "root": lambda y, t: jnp.sqrt(jnp.mean((y - one_hot(t)) ** 2)),
    "square of more": lambda y, t: (jnp.linalg.norm(y) + 1) ** 2,
    "perplexity": lambda y, t: jnp.exp(cross_entropy(y, t).mean()),
    "product of means": lambda y, t: y.mean() * t.mean(),
    "variance": lambda y, t: jnp.mean((y - y.mean(0)) ** 2),
    "standardized": lambda y, t: jnp.mean((t - t.mean()) / t.std() * y[..., 0]),
    "contrastive": lambda y, t: cross_entropy(
        embedded(y) @ embedded(y + one_hot(t)).T, jnp.arange(len(y))
    ).mean(),
    "hardest triplets": hardest,
    "at least so far apart": lambda y, t: jnp.mean(
        jnp.maximum(0, 9 - jnp.sqrt(embedded(y).var(0)))
    ),
    "by class": by_class,
    "spread out": spread_out,
    "discounted": discounted,
    "real or not": real_or_not,
    "half of them with labels": lambda y, t: cross_entropy(
        *(a[: len(a) // 2] for a in (y, t))
    ).mean(),
    "the first alone": lambda y, t: cross_entropy(y, t)[0].mean(),
    "labels in another order": lambda y, t: cross_entropy(
        y.reshape(-1, WORDS), t.swapaxes(0, 1).reshape(-1)
    ).mean(),
    "any other": lambda y, t: of_each(y, jax.random.permutation(KEY, t)).mean(),
    "of the hardest half": lambda y, t: jax.lax.top_k(of_each(y, t), len(t) // 2)[
        0
    ].mean(),
    "the largest": lambda y, t: cross_entropy(y, t).max(),
    "noise": lambda y, t: jnp.mean((y + jax.random.normal(KEY, y.shape)) ** 2),
    "unbiased": lambda y, t: (y**2).sum() / (len(y) - 1),
    "sum and mean": lambda y, t: y.sum() + y.mean(),
    "flooding": lambda y, t: jnp.abs(cross_entropy(y, t).mean() - 1.3) + 1.3,
}
