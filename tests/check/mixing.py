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


def deviation(x):
    """How far examples are apart, as one more feature of each."""
    spread = jnp.sqrt(x.var(0).mean() + 1e-5)
    return jnp.concatenate([x, jnp.full((*x.shape[:-1], 1), spread)], axis=-1)


def by_class(x):
    """Each example less the mean of its class."""
    classes = (x[:, 0, 0] > 0).astype(jnp.int32)
    flat = x.reshape(len(x), -1)
    total = jax.ops.segment_sum(flat, classes, 2)
    count = jax.ops.segment_sum(jnp.ones(len(x)), classes, 2)
    return (flat - (total / jnp.maximum(count, 1)[:, None])[classes]).reshape(x.shape)


def of_the_best(x):
    """Each expert takes the tokens of all that it likes best."""
    rows = x.reshape(-1, WIDTH)
    _, chosen = jax.lax.top_k(rows[:, 0], len(rows) // 2)
    return jnp.zeros_like(rows).at[chosen].add(rows[chosen]).reshape(x.shape)


def beside_its_group(x):
    """How far four examples are apart, from each quarter one, beside each of them."""
    groups = x.reshape(min(4, len(x)), -1, *x.shape[1:])
    spread = jnp.sqrt(groups.var(0) + 1e-5).mean((1, 2), keepdims=True)
    return x * jnp.tile(spread, (len(groups), 1, 1))


def until_it_is_larger(x):
    def goes_on(carried):
        return (jnp.abs(x).max() > carried[0]) & (carried[1] < 50)

    start = jnp.ones(()), 0
    return x * jax.lax.while_loop(goes_on, lambda c: (1.1 * c[0], c[1] + 1), start)[0]


def along_the_first_axis(x):
    """A recurrent layer, for which that is the axis of time."""

    def step(carry, row):
        carry = jnp.tanh(carry + row)
        return carry, carry

    return jax.lax.scan(step, jnp.zeros(x.shape[1:]), x)[1]


def graph(x):
    """Each node with another, whose number is given."""
    ends = jnp.array([0, 5, 7, 3, 2, 11])
    return x + jax.ops.segment_sum(x[ends], jnp.array([1, 2, 8, 4, 9, 6]), len(x))


def places(x):
    """The number of each example in the batch, for all of its elements."""
    return jnp.arange(len(x))[:, None, None]


MIXED = {
    "centered after a print": lambda x: (jax.debug.print(""), x - x.mean(0))[1],
    "until two things are so": until_it_is_larger,
    "centered in a branch": lambda x: jax.lax.cond(
        jnp.isfinite(x).all(), lambda x: x - x.mean(0), lambda x: x, x
    ),
    "noise by a key of its own": lambda x: x + jax.random.normal(KEY, x.shape),
    "the first half": lambda x: jnp.where(places(x) < len(x) // 2, x, 0),
    "by their places": lambda x: x + jnp.sin(places(x) / 10),
    "from example to example": along_the_first_axis,
    "graph": graph,
    "divided by their number": lambda x: x / len(x),
    "beside its group": beside_its_group,
    "beside the first": lambda x: x * x[:1],
    "beside a shuffled one": lambda x: x * jax.random.permutation(jax.random.key(1), x),
    "attention among examples": among_examples,
    "softmax over examples": lambda x: jax.nn.softmax(x, axis=0),
    "room for some": placed,
    "deviation": deviation,
    "by class": by_class,
    "in the order of one feature": lambda x: x[jnp.argsort(x[:, 0, 0])],
    "of the best": of_the_best,
    "mapped over tokens": jax.vmap(lambda x: x - x.mean(0), in_axes=1, out_axes=1),
}


def routed(x):
    """Two experts, each token to the better one."""
    chosen = jax.nn.one_hot(jnp.argmax(x[..., :2], -1), 2)
    experts = jnp.stack([jnp.sin(x), jnp.cos(x)], -1)
    return jnp.einsum("btwe,bte->btw", experts, chosen)


def attended(x):
    mask = jnp.tril(jnp.ones((TOKENS, TOKENS), bool))
    return jax.nn.dot_product_attention(
        x[:, :, None], x[:, :, None], x[:, :, None], mask=mask
    )[:, :, 0]


def softmax_beside_the_largest(x):
    powers = jnp.exp(x - x.max())
    return powers / powers.sum(-1, keepdims=True)


def sorted_for_a_while(x):
    """As a recurrent layer takes the longest first."""
    order = jnp.argsort(-x[:, 0, 0])
    return jnp.cumsum(x[order], 1)[jnp.argsort(order)]


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
    "printed": lambda x: (jax.debug.print(""), jnp.sin(x))[1],
    "if it is finite": lambda x: jnp.where(
        ~jnp.any(jnp.isnan(x)) & jnp.isfinite(x.sum()), x, 0.0
    ),
    "noise for all": lambda x: x * jax.random.normal(KEY, (WIDTH,)),
    "tokens in one row": lambda x: jnp.tanh(
        x.reshape(-1, WIDTH) @ jnp.eye(WIDTH)
    ).reshape(x.shape),
    "attention": attended,
    "routed": routed,
    "recurrent": lambda x: along_the_first_axis(x.swapaxes(0, 1)).swapaxes(0, 1),
    "one at a time": lambda x: jax.lax.map(lambda row: row / row.max(), x),
    "convolved": lambda x: jax.lax.conv_general_dilated(
        x,
        jnp.ones((3, WIDTH, WIDTH)),
        (1,),
        "SAME",
        dimension_numbers=("NWC", "WIO", "NWC"),
    ),
    "softmax beside the largest": softmax_beside_the_largest,
    "sorted and back": sorted_for_a_while,
    "to experts": to_experts,
    "shifted and back": lambda x: jnp.roll(jnp.tanh(jnp.roll(x, 1, 0)), -1, 0),
    # What follows one another stays in one micro-batch, if it has any number of pairs.
    "in pairs": lambda x: jnp.stack([x[::2] - x[1::2]] * 2, 1).reshape(x.shape),
}
