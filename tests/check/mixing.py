"""Layers that make something of several examples, and layers that do not."""

import jax
import jax.numpy as jnp

BATCH, TOKENS, WIDTH = 12, 3, 4
KEY = jax.random.key(2)


def data():
    """Examples for which layers with a branch take another for some than for all."""
    return jax.random.normal(jax.random.key(2), (BATCH, TOKENS, WIDTH))


def among_examples(x):
    """Attention of the examples to one another."""
    flat = x.reshape(len(x), -1)
    return (jax.nn.softmax(flat @ flat.T) @ flat).reshape(x.shape)


def placed(x):
    """What an expert has room for: the first few tokens of all."""
    chosen = (x[..., :1] > 0).reshape(-1, 1)
    before = jnp.cumsum(chosen, axis=0)
    return x * (before <= 5).reshape(*x.shape[:-1], 1)


def beside_its_group(x):
    """How far four examples are apart, from each quarter one, beside each of them."""
    groups = x.reshape(min(4, len(x)), -1, *x.shape[1:])
    spread = jnp.sqrt(groups.var(0) + 1e-5).mean((1, 2), keepdims=True)
    return x * jnp.tile(spread, (len(groups), 1, 1))


def places(x):
    """The number of each example in the batch, for all of its elements."""
    return jnp.arange(len(x))[:, None, None]


MIXED = {
    "centered in a branch": lambda x: jax.lax.cond(
        jnp.isfinite(x).all(), lambda x: x - x.mean(0), lambda x: x, x
    ),
    "noise by a key of its own": lambda x: x + jax.random.normal(KEY, x.shape),
    "by their places": lambda x: x + jnp.sin(places(x) / 10),
    "beside its group": beside_its_group,
    "beside the first": lambda x: x * x[:1],
    "attention among examples": among_examples,
    "room for some": placed,
}


def routed(x):
    """Two experts, each token to the better one."""
    chosen = jax.nn.one_hot(jnp.argmax(x[..., :2], -1), 2)
    experts = jnp.stack([jnp.sin(x), jnp.cos(x)], -1)
    return jnp.einsum("btwe,bte->btw", experts, chosen)


def to_experts(x):
    """Each token to one expert, whose tokens lie side by side, with room for all."""
    rows = x.reshape(-1, WIDTH)
    expert = jnp.argmax(rows[:, :2], -1)
    order = jnp.argsort(expert)
    counts = jnp.bincount(expert, length=2)
    weights = jnp.stack([jnp.eye(WIDTH), 2 * jnp.eye(WIDTH)])
    y = jax.lax.ragged_dot(rows[order], weights, counts)
    return y[jnp.argsort(order)].reshape(x.shape)


APART = {
    "if it is finite": lambda x: jnp.where(
        ~jnp.any(jnp.isnan(x)) & jnp.isfinite(x.sum()), x, 0.0
    ),
    "noise for all": lambda x: x * jax.random.normal(KEY, (WIDTH,)),
    "routed": routed,
    "to experts": to_experts,
    # What follows one another stays in one micro-batch, if it has any number of pairs.
    "in pairs": lambda x: jnp.stack([x[::2] - x[1::2]] * 2, 1).reshape(x.shape),
}
