"""Losses of tokens: means and sums over the examples, and others.

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
    """Logits [12, 2, 5] and tokens [12, 2]."""
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(BATCH, TOKENS, WORDS))
    tokens = rng.integers(0, WORDS, (BATCH, TOKENS))
    return jnp.asarray(logits), jnp.asarray(tokens)


def one_hot(t):
    return jax.nn.one_hot(t, WORDS)


def merged(y, t):
    return cross_entropy(y.reshape(-1, WORDS), t.reshape(-1))


def masked(y, t):
    return jnp.sum(cross_entropy(y, t) * (t > 0)), jnp.sum(t > 0)


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


def indexed(y, t):
    return -jax.nn.log_softmax(y[:, 0])[jnp.arange(len(t)), t[:, 0]]


def embedded(y):
    return y.reshape(len(y), -1)


def beside_the_largest(y):
    """A softmax that somebody wrote, less one number for all."""
    powers = jnp.exp(y - y.max())
    return powers / powers.sum(-1, keepdims=True)


def hardest(y, t):
    """Triplets of each example with the farthest alike and the nearest other one."""
    distance = jnp.sum((embedded(y)[:, None] - embedded(y)[None]) ** 2, -1)
    alike = t[:, 0, None] == t[None, :, 0]
    farthest = jnp.max(jnp.where(alike, distance, 0), 1)
    return jnp.mean(farthest - jnp.min(jnp.where(alike, 1e3, distance), 1))


MEANS = {
    "mean": lambda y, t: cross_entropy(y, t).mean(),
    "by the size": lambda y, t: cross_entropy(y, t).sum() / t.size,
    "by a count of ones": lambda y, t: (
        cross_entropy(y, t).sum() / jnp.ones(t.shape).sum()
    ),
    "merged": lambda y, t: merged(y, t).mean(),
    "squares": lambda y, t: jnp.mean(optax.l2_loss(y, one_hot(t))),
    "of the masked mean of each": lambda y, t: (
        (jnp.sum(cross_entropy(y, t) * (t > 0), -1))
        / jnp.maximum(jnp.sum(t > 0, -1), 1)
    ).mean(),
    "and another mean": lambda y, t: (
        merged(y, t).mean() + 1e-2 * jnp.mean(jax.nn.logsumexp(y, -1) ** 2)
    ),
    "and a constant": lambda y, t: 3 * cross_entropy(y, t).mean() + 7,
    "of those of each pair": lambda y, t: jnp.maximum(
        0, 1 - jnp.sum((y[::2] - y[1::2]) ** 2, (1, 2))
    ).mean(),
    "clipped, as of a policy": lambda y, t: jnp.mean(
        jnp.minimum(jnp.exp(y[:, 0, 0]), jnp.clip(jnp.exp(y[:, 0, 0]), 0.8, 1.2))
        * (t[:, 0] - 1.0)
    ),
    "distilled": lambda y, t: (
        optax.losses.kl_divergence(
            jax.nn.log_softmax(y / 2), jax.nn.softmax(one_hot(t) / 2)
        ).mean()
        * 2**2
    ),
    "penalty of gradients": lambda y, t: jnp.mean(
        jax.vmap(jax.grad(lambda one: jnp.sum(jnp.tanh(one) ** 3)))(y) ** 2
    ),
    "einsum": lambda y, t: -jnp.einsum("btv,btv->", y, one_hot(t)) / len(y),
    "bfloat16": lambda y, t: cross_entropy(y.astype(jnp.bfloat16), t).sum() / t.size,
    "scan": lambda y, t: along_time(y, t) / t.size,
    "while": as_long_as_needed,
    "in groups": in_groups,
    "a branch": lambda y, t: jax.lax.cond(
        WORDS > 2, lambda: y.mean(), lambda: (y**2).mean()
    ),
    "median of each": lambda y, t: jnp.median(y, -1).mean(),
    "ctc": lambda y, t: optax.ctc_loss(
        y, jnp.zeros(t.shape), jnp.clip(t, 1), jnp.zeros(t.shape).at[:, 1].set(1)
    ).mean(),
    "centred, and linear": lambda y, t: jnp.mean(y - y.mean(0)) + y.mean(),
    "softmax, less the largest of all": lambda y, t: (
        -jnp.mean(one_hot(t) * jnp.log(beside_the_largest(y)))
    ),
    "written in places": lambda y, t: jnp.mean(
        y[:, 0].at[jnp.arange(len(t)), t[:, 0]].add(-1.0) ** 2
    ),
    "and nothing of a root": lambda y, t: (
        y.mean() + 0.0 * jnp.sqrt(jnp.mean((y - one_hot(t)) ** 2))
    ),
    "behind a barrier": lambda y, t: jax.lax.optimization_barrier(
        cross_entropy(*jax.lax.optimization_barrier((y, t))).mean()
    ),
    "none of the examples": lambda y, t: jnp.float32(2),
}
SUMS = {
    "sum": lambda y, t: cross_entropy(y, t).sum(),
    "by a number": lambda y, t: cross_entropy(y, t).sum() / BATCH,
    "vdot": lambda y, t: -jnp.vdot(one_hot(t), jax.nn.log_softmax(y)),
    "scan": along_time,
    "merged": lambda y, t: merged(y, t).sum(),
    "indexed": lambda y, t: indexed(y, t).sum(),
    "written in places": lambda y, t: jnp.sum(
        y[:, 0].at[jnp.arange(len(t)), t[:, 0]].set(1.0) ** 2
    ),
    "where": lambda y, t: jnp.sum(cross_entropy(y, t), where=t > 0),
    "square of a norm": lambda y, t: jnp.linalg.norm(y - one_hot(t)) ** 2,
}
OTHERS = {
    "masked": (lambda y, t: masked(y, t)[0] / masked(y, t)[1]),
    "masked, clamped": (lambda y, t: masked(y, t)[0] / jnp.maximum(masked(y, t)[1], 1)),
    "masked, and a little": (lambda y, t: masked(y, t)[0] / (masked(y, t)[1] + 1e-6)),
    "mean where": (lambda y, t: cross_entropy(y, t).mean(where=t > 0)),
    "weighted average": (lambda y, t: jnp.average(cross_entropy(y, t), weights=t + 1)),
    "masked, indexed": (
        lambda y, t: jnp.sum(indexed(y, t) * t[:, 0]) / jnp.sum(t[:, 0])
    ),
    "root": (lambda y, t: jnp.sqrt(jnp.mean((y - one_hot(t)) ** 2))),
    "norm": (lambda y, t: jnp.linalg.norm(y - one_hot(t))),
    "square of more": (lambda y, t: (jnp.linalg.norm(y) + 1) ** 2),
    "perplexity": (lambda y, t: jnp.exp(cross_entropy(y, t).mean())),
    "product of means": (lambda y, t: y.mean() * t.mean()),
    "variance": (lambda y, t: jnp.mean((y - y.mean(0)) ** 2)),
    "standardized": (lambda y, t: jnp.mean((t - t.mean()) / t.std() * y[..., 0])),
    "contrastive": (
        lambda y, t: cross_entropy(
            embedded(y) @ embedded(y + one_hot(t)).T, jnp.arange(len(y))
        ).mean()
    ),
    "of a policy, with advantages standardized": (
        lambda y, t: (
            -jnp.mean(
                jnp.minimum(jnp.exp(y[..., 0]), jnp.clip(jnp.exp(y[..., 0]), 0.8, 1.2))
                * (y[..., 1] - y[..., 1].mean())
                / (y[..., 1].std() + 1e-8)
            )
        )
    ),
    "one after the other": (lambda y, t: jnp.mean(jnp.cumsum(y[:, 0, 0]))),
    "pairs": (lambda y, t: jnp.mean((embedded(y)[:, None] - embedded(y)[None]) ** 2)),
    "of the hardest half": (
        lambda y, t: jax.lax.top_k(cross_entropy(y, t).mean(-1), len(t) // 2)[0].mean()
    ),
    "hardest triplets": (hardest),
    "at least so far apart": (
        lambda y, t: jnp.mean(jnp.maximum(0, 9 - jnp.sqrt(embedded(y).var(0))))
    ),
    "half against half": (
        lambda y, t: jnp.mean(embedded(y)[: len(y) // 2] * embedded(y)[len(y) // 2 :])
    ),
    "half of them with labels": (
        lambda y, t: cross_entropy(*(a[: len(a) // 2] for a in (y, t))).mean()
    ),
    "all but one": (lambda y, t: cross_entropy(y[:-1], t[:-1]).mean()),
    "the first alone": (lambda y, t: cross_entropy(y, t)[0].mean()),
    "the next as another": (
        lambda y, t: jnp.mean(embedded(y) * jnp.roll(embedded(y), 1, axis=0))
    ),
    "any other": (
        lambda y, t: jnp.mean(
            embedded(y) * jax.random.permutation(jax.random.key(0), embedded(y))
        )
    ),
    "labels in another order": (
        lambda y, t: cross_entropy(
            y.reshape(-1, WORDS), t.swapaxes(0, 1).reshape(-1)
        ).mean()
    ),
    "the largest": (lambda y, t: cross_entropy(y, t).max()),
    "that of the largest": (lambda y, t: y[jnp.argmax(y[:, 0, 0])].sum()),
    "median": (lambda y, t: jnp.median(cross_entropy(y, t))),
    "distance of two distributions": (
        lambda y, t: jnp.abs(
            jnp.sort(y[..., 0], axis=0) - jnp.sort(y[..., 1], axis=0)
        ).mean()
    ),
    "covariance": (lambda y, t: jnp.sum(jnp.cov(embedded(y), rowvar=False) ** 2)),
    "sum and mean": (lambda y, t: y.sum() + y.mean()),
    "an expected error": (lambda y, t: (y.mean() - t.mean()) ** 2),
}
