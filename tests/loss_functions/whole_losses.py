"""Losses of a whole mini-batch, none of which is a mean or a sum over its examples.

Each takes the embeddings ``z`` of the examples, the number ``scale`` that a model
learns, and one label and one number for each example.
"""

import jax
import jax.numpy as jnp
import optax

_cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def _unit(z):
    return z / jnp.linalg.norm(z, axis=-1, keepdims=True)


def _same(targets):
    """True for two examples of one label, and not for an example and itself."""
    label = targets["label"]
    return (label[:, None] == label) & ~jnp.eye(len(label), dtype=bool)


def _distances(z):
    return jnp.sum((z[:, None] - z) ** 2, axis=-1)


def clip(z, scale, targets):
    first, second = jnp.split(_unit(z), 2, axis=1)
    logits = jnp.exp(scale) * first @ second.T
    pairs = jnp.arange(len(z))
    return _cross_entropy(logits, pairs).mean() + _cross_entropy(logits.T, pairs).mean()


def supcon(z, scale, targets):
    same = _same(targets)
    logits = _unit(z) @ _unit(z).T * jnp.exp(scale) - 1e3 * jnp.eye(len(z))
    log_probs = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.sum(log_probs * same, axis=1) / jnp.maximum(same.sum(1), 1))


def nt_xent(z, scale, targets):
    views = _unit(jnp.concatenate(jnp.split(z, 2, axis=1)))
    logits = views @ views.T * jnp.exp(scale) - 1e3 * jnp.eye(len(views))
    return _cross_entropy(logits, jnp.roll(jnp.arange(len(views)), len(z))).mean()


def triplets(z, scale, targets):
    """With the hardest positive and negative of each example."""
    distances = _distances(z)
    same = _same(targets)
    positive = jnp.max(jnp.where(same, distances, 0.0), axis=1)
    negative = jnp.min(jnp.where(same, jnp.inf, distances + 9 * jnp.eye(len(z))), 1)
    return jnp.mean(jax.nn.softplus(positive - negative))


def auc(z, scale, targets):
    """A squared hinge for each pair of a positive and a negative example."""
    score = z[:, 0] * scale
    is_positive = targets["label"] == 0
    margins = jnp.maximum(1 - (score[:, None] - score), 0) ** 2
    pairs = is_positive[:, None] & ~is_positive
    return jnp.sum(margins * pairs) / jnp.sum(pairs)


def quantile(z, scale, targets):
    return jnp.quantile(jnp.abs(z[:, 0] - targets["number"]), 0.8)


def rmse(z, scale, targets):
    return jnp.sqrt(jnp.mean((z[:, 1] * scale - targets["number"]) ** 2))


def normalized(z, scale, targets):
    """A classifier behind a batch norm."""
    h = (z - z.mean(0)) / jnp.sqrt(z.var(0) + 1e-3)
    return _cross_entropy(h * scale, targets["label"]).mean()


def correlation(z, scale, targets):
    score = z[:, 0] - z[:, 0].mean()
    number = targets["number"] - targets["number"].mean()
    return -jnp.sum(score * number) / jnp.sqrt(jnp.sum(score**2) * jnp.sum(number**2))


def dice(z, scale, targets):
    probability = jax.nn.sigmoid(z[:, 2] * scale)
    is_positive = targets["label"] == 1
    overlap = jnp.sum(probability * is_positive)
    return 1 - 2 * overlap / (jnp.sum(probability) + jnp.sum(is_positive))


LOSSES = (
    clip,
    supcon,
    nt_xent,
    triplets,
    auc,
    quantile,
    rmse,
    normalized,
    correlation,
    dice,
)


def all_losses(z, scale, targets):
    """Their sum, and each of them."""
    values = {loss.__name__: loss(z, scale, targets) for loss in LOSSES}
    return sum(values.values()), values
