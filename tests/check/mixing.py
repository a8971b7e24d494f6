"""Layers that make something of several examples, and layers that do not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

BATCH, TOKENS, WIDTH = 12, 3, 4
KEY = jax.random.key(2)


def data():
    """Examples for which layers with a branch take another for some than for all."""
    return jax.random.normal(jax.random.key(2), (BATCH, TOKENS, WIDTH))


def normalized(x):
    return (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-5)


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


def whitened(x):
    rows = x.reshape(-1, WIDTH)
    root = jnp.linalg.cholesky(rows.T @ rows / len(rows) + jnp.eye(WIDTH))
    return jax.scipy.linalg.solve_triangular(root, rows.T, lower=True).T.reshape(
        x.shape
    )


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


def in_two_groups(x):
    groups = x.reshape(2, -1, *x.shape[1:])
    return (groups - groups.mean(1, keepdims=True)).reshape(x.shape)


def first_half_against_second(x):
    one, other = jnp.split(x, 2)
    return jnp.concatenate([one - other, other - one])


def cut_and_mixed(x):
    return x.at[:, 1:2].set(jnp.roll(x, 1, axis=0)[:, 1:2])


def neighbours(x):
    flat = x.reshape(len(x), -1)
    apart = ((flat[:, None] - flat[None]) ** 2).sum(-1)
    return x[jax.lax.top_k(-apart, 2)[1]].mean(1)


def less_the_largest_of_its_class(x):
    classes = (x[:, 0, 0] > 0).astype(jnp.int32)
    return x - jax.ops.segment_max(x, classes, 2)[classes]


def halved_until_all_are_small(x):
    small = jax.lax.while_loop(
        lambda a: jnp.abs(a).sum() > 9, lambda a: a / 2, jax.lax.stop_gradient(x)
    )
    return x * small


def from_example_to_example(x):
    """As a recurrent layer does that takes the first axis for that of time."""

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


def noise_of_each(x):
    """By keys that follow from a key of its own and from the places of the batch."""

    def noisy(number, row):
        key = jax.random.fold_in(jax.random.key(2), number)
        return row * jax.random.bernoulli(key, 0.5, row.shape)

    return jax.vmap(noisy)(jnp.arange(len(x)), x)


def partner(x):
    """For each example the number of another, which follows from its own values."""
    return (x > 0).sum((1, 2)) % 4


def noise_in_a_loop(x):
    keys = jax.random.split(KEY, len(x))
    noisy = jax.lax.map(lambda one: one[1] + jax.random.normal(one[0]), (keys, x))
    return noisy


MIXED = {
    "centered after a print": lambda x: (jax.debug.print(""), x - x.mean(0))[1],
    "until two things are so": until_it_is_larger,
    "if not": lambda x: jnp.where(~(x.mean() > 0), x, 2 * x),
    "centered in a branch": lambda x: jax.lax.cond(
        jnp.isfinite(x).all(), lambda x: x - x.mean(0), lambda x: x, x
    ),
    "softmax in a branch": lambda x: jax.lax.cond(
        jnp.any(x > 0), lambda x: jax.nn.softmax(x, 0), lambda x: x, x
    ),
    "powers beside the largest": lambda x: jnp.exp(x - x.max()) + 0.01,
    "noise in a branch": lambda x: jax.lax.cond(
        jnp.isnan(x).any(),
        lambda x: x,
        lambda x: x + jax.random.normal(KEY, x.shape),
        x,
    ),
    "beside a partner": lambda x: x - x[partner(x)],
    "added to a partner": lambda x: x.at[partner(x)].add(x),
    "by partners": lambda x: x - jax.ops.segment_sum(x, partner(x), len(x)),
    "noise in a loop": noise_in_a_loop,
    "places in a loop": lambda x: jax.lax.map(
        lambda one: one[0] * one[1], (jnp.arange(len(x)), x)
    ),
    "a table by places": lambda x: (
        x + jax.random.normal(KEY, (64, TOKENS, WIDTH))[: len(x)]
    ),
    "places as a feature": lambda x: jnp.concatenate(
        [x, jnp.broadcast_to(places(x).astype(x.dtype), x.shape)], -1
    ),
    "a curve of places": lambda x: x * jnp.tanh(places(x) / 9),
    "noise by a key of its own": lambda x: x + jax.random.normal(KEY, x.shape),
    "dropped by a key of its own": lambda x: jnp.where(
        jax.random.bernoulli(jax.random.PRNGKey(1), 0.5, x.shape), x / 0.5, 0
    ),
    "noise of each": noise_of_each,
    "a token of each by chance": lambda x: x.at[
        jnp.arange(len(x)), jax.random.randint(KEY, len(x), 0, TOKENS)
    ].set(0),
    "the first half": lambda x: jnp.where(places(x) < len(x) // 2, x, 0),
    "by their places": lambda x: x + jnp.sin(places(x) / 10),
    "numbers of numpy": lambda x: x * np.linspace(0, 1, len(x))[:, None, None],
    "the first emptied": lambda x: x.at[0].set(0),
    "half of them doubled": lambda x: x.at[: len(x) // 2].multiply(2),
    "beside the next": lambda x: x - x[(jnp.arange(len(x)) + 1) % len(x)],
    "where it is more than nothing": lambda x: jnp.where(x > 0, x - x.mean(0), 0),
    "cut and mixed": cut_and_mixed,
    "neighbours": neighbours,
    "less the largest of its class": less_the_largest_of_its_class,
    "until all are small": halved_until_all_are_small,
    "if they are large": lambda x: jax.lax.cond(
        (x**2).mean() > 1, lambda: x, lambda: -2 * x
    ),
    "from example to example": from_example_to_example,
    "graph": graph,
    "less the median": lambda x: x - jnp.median(x, axis=0),
    "frequencies of examples": lambda x: jnp.fft.fft(x, axis=0).real,
    "windows of examples": lambda x: nn.avg_pool(
        x.reshape(1, len(x), -1), (3,), padding="SAME"
    ).reshape(x.shape),
    "an order of numpy": lambda x: x * x[np.random.default_rng(0).permutation(len(x))],
    "divided by their number": lambda x: x / len(x),
    "beside its group": beside_its_group,
    "in two groups": in_two_groups,
    "halves": first_half_against_second,
    "mixed up": lambda x: 0.7 * x + 0.3 * jnp.roll(x, 3, axis=0),
    "beside the first": lambda x: x * x[:1],
    "beside another copy": lambda x: (
        jnp.tile(x, (3, 1, 1)).reshape(len(x), 3, *x.shape[1:]).mean(1)
    ),
    "beside a shuffled one": lambda x: x * jax.random.permutation(jax.random.key(1), x),
    "centered": lambda x: x - x.mean(0),
    "normalized": normalized,
    "attention among examples": among_examples,
    "softmax over examples": lambda x: jax.nn.softmax(x, axis=0),
    "beside the largest": lambda x: x / jnp.abs(x).max(),
    "room for some": placed,
    "deviation": deviation,
    "whitened": whitened,
    "by class": by_class,
    "less the first": lambda x: x - x[0],
    "gram": lambda x: x @ jnp.einsum("bti,btj->ij", x, x),
    "sorted": lambda x: jnp.sort(x, axis=0),
    "in the order of one feature": lambda x: x[jnp.argsort(x[:, 0, 0])],
    "of the best": of_the_best,
    "norm of all": lambda x: x / jnp.linalg.norm(x),
    "mapped over tokens": jax.vmap(normalized, in_axes=1, out_axes=1),
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


def recurrent(x):
    def step(carry, row):
        carry = jnp.tanh(carry + row)
        return carry, carry

    start = jnp.zeros((len(x), WIDTH))
    return jax.lax.scan(step, start, x.swapaxes(0, 1))[1].swapaxes(0, 1)


def in_groups(x):
    return jax.lax.map(jnp.sin, x.reshape(2, -1, *x.shape[1:])).reshape(x.shape)


def guarded(x):
    return jnp.where(jnp.isfinite(x).all(), x, 0.0)


def padded(x):
    whole = jnp.pad(x, ((0, -len(x) % 8), (0, 0), (0, 0)))
    return jnp.sin(whole)[: len(x)]


def picked(x):
    order = jnp.argsort(x, axis=1)
    return jnp.take_along_axis(x, order, axis=1)


def marked(x):
    """Writes at a place that each example says."""
    rows, place = jnp.arange(len(x)), jnp.argmax(x[..., 0], 1)
    return x.at[rows, place].set(0).at[rows, place - 1].multiply(2)


def softmax_beside_the_largest(x):
    powers = jnp.exp(x - x.max())
    return powers / powers.sum(-1, keepdims=True)


def sorted_for_a_while(x, back):
    """As a recurrent layer takes the longest first."""
    order = jnp.argsort(-x[:, 0, 0])
    y = jnp.cumsum(x[order], 1)
    return y[jnp.argsort(order)] if back else jnp.zeros_like(y).at[order].set(y)


def to_experts(x):
    """Each token to one expert, whose tokens lie side by side, with room for all."""
    rows = x.reshape(-1, WIDTH)
    expert = jnp.argmax(rows[:, :2], -1)
    order = jnp.argsort(expert)
    counts = jnp.bincount(expert, length=2)
    weights = jnp.stack([jnp.eye(WIDTH), 2 * jnp.eye(WIDTH)])
    y = jax.lax.ragged_dot(rows[order], weights, counts)
    return y[jnp.argsort(order)].reshape(x.shape)


def example_by_example(x):
    def write(i, y):
        return y.at[i].set(jnp.sin(x[i]))

    return jax.lax.fori_loop(0, len(x), write, jnp.zeros_like(x))


APART = {
    "printed": lambda x: (jax.debug.print(""), jnp.sin(x))[1],
    "if it is finite": lambda x: jnp.where(
        ~jnp.any(jnp.isnan(x)) & jnp.isfinite(x.sum()), x, 0.0
    ),
    "noise for all": lambda x: x * jax.random.normal(KEY, (WIDTH,)),
    "a table of ones": lambda x: x * jnp.ones((64, 1, 1))[: len(x)],
    "doubled in a branch": lambda x: jax.lax.cond(
        jnp.isfinite(x).all(), lambda x: 2 * x, lambda x: x, x
    ),
    "at a place in one row": lambda x: x.reshape(-1)[
        places(x)[:, 0] * TOKENS * WIDTH + partner(x)[:, None]
    ][..., None],
    "taken where it is": lambda x: x[jnp.arange(len(x))],
    "every second by its number": lambda x: jnp.where(places(x) % 2 == 0, x, 0),
    "weights by turns": lambda x: (
        x * jnp.tile(jnp.array([1.0, 2.0]), len(x) // 2)[:, None, None]
    ),
    "ones": lambda x: x * jnp.ones(len(x))[:, None, None],
    "the first token emptied": lambda x: x.at[:, 0].set(0),
    "sine": jnp.sin,
    "tokens in one row": lambda x: jnp.tanh(
        x.reshape(-1, WIDTH) @ jnp.eye(WIDTH)
    ).reshape(x.shape),
    "time first": lambda x: jnp.cumsum(x.swapaxes(0, 1), 0).swapaxes(0, 1),
    "layer norm": lambda x: (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True),
    "over tokens and features": lambda x: x / x.sum((1, 2), keepdims=True),
    "attention": attended,
    "routed": routed,
    "recurrent": recurrent,
    "in groups": in_groups,
    "mapped": jax.vmap(lambda row: row / jnp.linalg.norm(row)),
    "one at a time": lambda x: jax.lax.map(lambda row: row / row.max(), x),
    "guarded": guarded,
    "padded": padded,
    "picked": picked,
    "sorted within": lambda x: jnp.sort(x, axis=1),
    "positions": lambda x: x + jnp.arange(TOKENS)[None, :, None],
    "convolved": lambda x: jax.lax.conv_general_dilated(
        x,
        jnp.ones((3, WIDTH, WIDTH)),
        (1,),
        "SAME",
        dimension_numbers=("NWC", "WIO", "NWC"),
    ),
    "fourier": lambda x: jnp.fft.fft(x, axis=1).real,
    "one of the tokens": lambda x: x[:, :1] + jnp.zeros_like(x),
    "marked": marked,
    "softmax beside the largest": softmax_beside_the_largest,
    "sorted and back": functools.partial(sorted_for_a_while, back=True),
    "sorted and written back": functools.partial(sorted_for_a_while, back=False),
    "reversed twice": lambda x: jnp.sin(x[::-1])[::-1],
    "to experts": to_experts,
    "example by example": example_by_example,
    "by numbers of examples": lambda x: jax.lax.map(
        lambda i: jnp.sin(x[i]), jnp.arange(len(x))
    ),
    "clipped by example": lambda x: (
        x * jnp.minimum(1, 1 / jnp.sqrt(jnp.sum(x**2, (1, 2), keepdims=True)))
    ),
    "shifted and back": lambda x: jnp.roll(jnp.tanh(jnp.roll(x, 1, 0)), -1, 0),
    # What follows one another stays in one micro-batch, if it has any number of pairs.
    "in pairs": lambda x: (
        x.reshape(-1, 2, *x.shape[1:])
        - x.reshape(-1, 2, *x.shape[1:]).mean(1, keepdims=True)
    ).reshape(x.shape),
    "every second": lambda x: jnp.stack([x[::2] - x[1::2]] * 2, 1).reshape(x.shape),
}
