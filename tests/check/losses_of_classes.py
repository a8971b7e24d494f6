"""Losses of classes, as people write them: means over the examples, and others.

Each is given logits ``y`` of shape [12, 5] and classes ``t`` of shape [12].
"""

import jax
import jax.numpy as jnp
import optax

BATCH, WIDTH = 12, 5
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def by_class(y, t):
    """Examples weighed by how many of their class are in the batch."""
    return (cross_entropy(y, t) * (len(t) / jnp.bincount(t, length=WIDTH))[t]).mean()


def centres(y, t):
    count = jax.ops.segment_sum(jnp.ones(len(t)), t, WIDTH)[:, None]
    centre = jax.ops.segment_sum(y, t, WIDTH) / jnp.maximum(count, 1)
    return ((y - centre[t]) ** 2).mean()


def balanced(y, t):
    """The rarer answer weighs more."""
    positive = t > 2
    share = positive.mean()
    losses = optax.sigmoid_binary_cross_entropy(y[:, 0], positive.astype(y.dtype))
    return (jnp.where(positive, 1 - share, share) * losses).mean()


def pairwise(y, t):
    difference = y[:, 0][:, None] - y[:, 0][None]
    return (jax.nn.softplus(-difference) * (t[:, None] > t[None])).mean()


def relativistic(y, t):
    return jax.nn.relu(1 - (y[:, 0] - y[:, 1].mean())).mean()


def proportional_hazards(y, t):
    risk = y[:, 0][jnp.argsort(-t)]
    return -(risk - jax.lax.cumlogsumexp(risk)).mean()


def spread_out(y, t):
    likeness = y @ y.T - 9 * jnp.eye(len(y))
    return -jnp.log(jnp.linalg.norm(y - y[likeness.argmax(1)], axis=-1)).mean()


def mixed_labels(y, t):
    other = t[jax.random.permutation(jax.random.key(3), len(t))]
    return 0.7 * cross_entropy(y, t).mean() + 0.3 * cross_entropy(y, other).mean()


def hard_ones(y, t):
    losses = cross_entropy(y, t)
    chosen = losses >= jnp.sort(losses)[len(t) // 2]
    return (losses * chosen).sum() / chosen.sum()


def discounted(y, t):
    def add(after, reward):
        after = reward + 0.9 * after
        return after, after

    returns = jax.lax.scan(add, 0.0, t.astype(y.dtype), reverse=True)[1]
    return (returns * y[:, 0]).mean()


def same_choice(y, t):
    return (y[jnp.array([0, 3, 5])] ** 2).mean()


def real_or_not(y, t):
    """As a loss makes labels of a batch that is one half real and one half made."""
    half = len(y) // 2
    labels = jnp.concatenate([jnp.ones(half), jnp.zeros(len(y) - half)])
    return optax.sigmoid_binary_cross_entropy(y[:, 0], labels).mean()


def not_padded(y, t):
    return jnp.where(jnp.arange(len(y)) < 10, cross_entropy(y, t), 0).mean()


def later_ones_less(y, t):
    return jnp.linspace(1, 0, len(y)) @ cross_entropy(y, t) / len(y)


def places_as_labels(y, t):
    return cross_entropy(y, jnp.arange(len(y)) % WIDTH).mean()


def sample(y, t):
    some = jax.random.permutation(jax.random.key(3), len(y))[: len(y) // 2]
    return cross_entropy(y, t)[some].mean()


def by_rank(y, t):
    ranks = jnp.argsort(jnp.argsort(y[:, 1]))
    return (cross_entropy(y, t) * ranks).mean() / len(y)


def hardest_half(y, t):
    losses = cross_entropy(y, t)
    return losses[jnp.argsort(-losses)[: len(y) // 2]].mean()


def added_up(y, t):
    def add(i, total):
        return total + jnp.sum(y[i] ** 2)

    return jax.lax.fori_loop(0, len(y), add, 0.0) / len(y)


# Between the means of micro-batches.
ABOUT = 0.0
OTHERS = {
    "real or not": real_or_not,
    "not padded": not_padded,
    "later ones less": later_ones_less,
    "places as labels": places_as_labels,
    "same choice": same_choice,
    "by class": by_class,
    "centres": centres,
    "balanced": balanced,
    "pairwise": pairwise,
    "relativistic": relativistic,
    "proportional hazards": proportional_hazards,
    "spread out": spread_out,
    "mixed labels": mixed_labels,
    "hard ones": hard_ones,
    "discounted": discounted,
    "the largest, about": lambda y, t: jax.lax.approx_max_k(
        cross_entropy(y, t), len(y) // 2
    )[0].mean(),
    "a product": lambda y, t: jnp.prod(y[:, 0] + 2),
    "weighed by a bound, once it counts": (
        lambda y, t: (
            jnp.where((y.mean() > ABOUT) & jnp.array(True), 2.0, 1.0)
            * cross_entropy(y, t).mean()
        )
    ),
    "weighed by what is not": (
        lambda y, t: (
            jnp.where(~(y.mean() > ABOUT), 2.0, 1.0) * cross_entropy(y, t).mean()
        )
    ),
    "free bits": lambda y, t: jnp.maximum((y**2).mean(0), 1.2).sum(),
    "flooding": lambda y, t: jnp.abs(cross_entropy(y, t).mean() - 2) + 2,
    "volume": (lambda y, t: jnp.linalg.slogdet(jnp.eye(WIDTH) + y.T @ y / len(y))[1]),
    "unbiased": (lambda y, t: (y**2).sum() / (len(y) - 1)),
    "weights beside the largest": (
        lambda y, t: (jnp.exp(y[:, 0] - y[:, 0].max()) * cross_entropy(y, t)).mean()
    ),
    "partners": (lambda y, t: ((y - y[t]) ** 2).mean()),
    "sample": sample,
    "hardest half": hardest_half,
    "by rank": by_rank,
    "noise": (
        lambda y, t: ((y + jax.random.normal(jax.random.key(2), y.shape)) ** 2).mean()
    ),
}
# In each micro-batch of a multiple of four examples.
MEANS = {
    "groups of a micro-batch": lambda y, t: (
        (y[:, 0].reshape(-1, 4) - y[:, 0].reshape(-1, 4).mean(1, keepdims=True)) ** 2
    ).mean(),
    "all but the first of each group": lambda y, t: jnp.mean(
        y.reshape(-1, 4, WIDTH)[:, 1:] ** 2
    ),
    "each with the first of its group": lambda y, t: jax.nn.relu(
        1 + y[:, 0].reshape(-1, 4)[:, 1:] - y[:, 0].reshape(-1, 4)[:, :1]
    ).mean(),
    "steps in each group": lambda y, t: jnp.mean(
        jnp.diff(y.reshape(-1, 4, WIDTH), axis=1) ** 2
    ),
    "pairs": lambda y, t: jax.nn.softplus(y[1::2, 0] - y[::2, 0]).mean(),
    "in chunks": lambda y, t: jax.lax.map(
        lambda one: cross_entropy(*one), (y, t), batch_size=3
    ).mean(),
    "added up": added_up,
    "weights that are alike": lambda y, t: (
        jnp.full(len(y), 1 / len(y)) @ cross_entropy(y, t)
    ),
    "weights that are rounded": lambda y, t: (
        jnp.linspace(0.7, 0.7, len(y)) @ cross_entropy(y, t) / len(y)
    ),
    "signs by turns": lambda y, t: ((-1) ** jnp.arange(len(y)) @ y).sum() / len(y),
    "by a count of the shape": lambda y, t: y.sum() / jnp.array(y.shape).prod(),
}


def data():
    y = jax.random.normal(jax.random.key(0), (BATCH, WIDTH))
    return y, jax.random.randint(jax.random.key(1), (BATCH,), 0, WIDTH)
