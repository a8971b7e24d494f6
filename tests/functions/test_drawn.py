"""Losses that are another only of numbers that one has to think of, to draw them.

Labels that do not count, lengths that differ between examples, and what is so of few.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jpipe

from .. import reference as ref

BATCH, PARTS, LENGTH, WORDS = 12, 3, 16, 8
IGNORED = -100


def negative_likelihoods(y, labels):
    y = y.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(y, labels)


def summed(y, labels):
    """Of what counts, the sum and the number."""
    counts = labels != IGNORED
    each = negative_likelihoods(y, jnp.where(counts, labels, 0))
    return jnp.sum(each * counts), jnp.sum(counts)


def in_chunks(y, labels):
    """As one does where the logits of all words do not fit."""
    chunks = y.reshape(-1, 4, WORDS), labels.reshape(-1, 4)
    total, count = jax.lax.map(jax.checkpoint(lambda chunk: summed(*chunk)), chunks)
    return total.sum() / count.sum()


def one_after_the_other(y, labels):
    def step(so_far, chunk):
        return jax.tree.map(jnp.add, so_far, summed(*chunk)), None

    chunks = y.reshape(-1, 4, WORDS), labels.reshape(-1, 4)
    (total, count), _ = jax.lax.scan(step, (0.0, jnp.int32(0)), chunks)
    return total / count


def negative_ones_are_none(y, labels):
    def of_chunk(chunk):
        y, labels = chunk
        each = negative_likelihoods(y, jnp.maximum(labels, 0))
        return jnp.sum(each * (labels >= 0)), jnp.sum(labels >= 0)

    total, count = jax.lax.map(of_chunk, (y, jnp.maximum(labels, -1)))
    return total.sum() / count.sum()


def marked_by_nan(y, labels):
    values = jnp.where(labels == IGNORED, jnp.nan, labels)

    def of_example(both):
        y, values = both
        counts = ~jnp.isnan(values)
        errors = jnp.square(y[:, 0] - jnp.where(counts, values, 0))
        return jnp.sum(jnp.where(counts, errors, 0)), jnp.sum(counts)

    total, count = jax.lax.map(of_example, (y, values))
    return total.sum() / count.sum()


def masked(y, targets):
    labels, mask = targets

    def of_chunk(chunk):
        y, labels, mask = chunk
        return jnp.sum(negative_likelihoods(y, labels) * mask), jnp.sum(mask)

    chunks = (leaf.reshape(-1, 4, *leaf.shape[2:]) for leaf in (y, labels, mask))
    total, count = jax.lax.map(of_chunk, tuple(chunks))
    return total.sum() / count.sum()


def lengths():
    """A mask: the first examples are the shortest."""
    ends = jnp.linspace(2, LENGTH, BATCH).astype(int)
    return (jnp.arange(LENGTH) < ends[:, None]).astype(jnp.int32)


def data():
    x = jax.random.normal(jax.random.key(0), (BATCH, LENGTH, WORDS))
    x += jnp.linspace(-2, 2, BATCH)[:, None, None]
    return x, jax.random.randint(jax.random.key(1), (BATCH, LENGTH), 0, WORDS)


def gradient_by(loss_fn, targets, num_microbatches=PARTS, dtype=jnp.float32, **options):
    pipe = jpipe.sequential([ref.dense(WORDS, dtype)], num_microbatches)
    x = data()[0].astype(dtype)
    find = pipe.value_and_grad(loss_fn, **options)
    return find(pipe.init(jax.random.key(2), x), x, targets)


def check_refused(loss_fn, targets, dtype=jnp.float32):
    """Micro-batches make another loss, and it is said that they do."""
    whole, _ = gradient_by(loss_fn, targets, 1, dtype)
    x = data()[0].astype(dtype)
    pipe = jpipe.sequential([ref.dense(WORDS, dtype)])
    y = pipe.apply(pipe.init(jax.random.key(2), x), x)
    cut = jax.tree.map(
        lambda leaf: leaf.reshape(PARTS, -1, *leaf.shape[1:]), (y, targets)
    )
    parts = jax.lax.map(lambda part: loss_fn(*part), cut)
    assert abs(np.mean(parts) - whole) > 0.01 * whole
    with pytest.raises(ValueError, match=r"loss_fn is, of random numbers, \d"):
        gradient_by(loss_fn, targets, dtype=dtype)


@pytest.mark.parametrize(
    "loss_fn",
    [in_chunks, one_after_the_other, negative_ones_are_none, marked_by_nan],
)
def test_labels_that_do_not_count(loss_fn):
    check_refused(loss_fn, jnp.where(lengths() == 1, data()[1], IGNORED))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_lengths_of_their_own(dtype):
    check_refused(masked, (data()[1], lengths()), dtype)


def test_sums_of_them_are_left_alone():
    def sums(y, labels):
        chunks = y.reshape(-1, 4, WORDS), labels.reshape(-1, 4)
        total, count = jax.lax.map(lambda chunk: summed(*chunk), chunks)
        return total.sum(), count.sum()

    targets = jnp.where(lengths() == 1, data()[1], IGNORED)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = gradient_by(sums, targets, reduction="weighted")
    ref.assert_close(found, gradient_by(in_chunks, targets, 1), ref.FLOAT32)


def of_neighbours(term):
    """A loop over pairs, of which no jaxpr tells."""

    def loss(y, t):
        pairs = zip(y, y[1:], t, t[1:], strict=False)
        return jnp.mean(y**2) + sum(term(*pair) for pair in pairs) / len(y)

    return loss


def labelled(y, _):
    """Four examples with labels, then four without, from a table of all."""
    return jnp.mean(y**2 * (jnp.arange(BATCH) % 6 < 3)[: len(y), None])


BEYOND_SOMETHING = {
    "long after": (
        of_neighbours(lambda a, b, s, t: jnp.where(t - s > 10.0, jnp.sum(a * b), 0)),
        jnp.cumsum(jnp.arange(BATCH) * 2.5),
    ),
    "nearer than a margin": (
        of_neighbours(lambda a, b, s, t: jax.nn.relu(1e-2 - jnp.sum((a - b) ** 2))),
        jnp.zeros(BATCH),
    ),
    "in other tens": (
        of_neighbours(lambda a, b, s, t: jnp.where(s // 10 == t // 10, 0, a @ b)),
        jnp.arange(BATCH) * 7,
    ),
    "logarithms of numbers": (
        of_neighbours(lambda a, b, s, t: jnp.log(s) * a @ b),
        jnp.arange(BATCH) + 2,
    ),
    "by a table as long as the batch": (labelled, jnp.zeros(BATCH)),
}


@pytest.mark.parametrize("name", BEYOND_SOMETHING)
def test_what_is_so_of_numbers_of_one_size(name):
    loss_fn, targets = BEYOND_SOMETHING[name]
    y = 1e-2 * jax.random.normal(jax.random.key(0), (BATCH, 4)) + jnp.ones((BATCH, 1))
    parts = [
        loss_fn(*part)
        for part in zip(jnp.split(y, 4), jnp.split(targets, 4), strict=True)
    ]
    assert abs(np.mean(parts) - loss_fn(y, targets)) > 1e-4
    pipe = jpipe.sequential([lambda y: y], 4)
    with pytest.raises(ValueError, match="loss_fn is, of random numbers"):
        pipe.value_and_grad(loss_fn)(pipe.init(jax.random.key(0), y), y, targets)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_little_of_neighbours_in_few_bits(dtype):
    """Less than what such numbers are rounded by, and yet another loss."""
    term = of_neighbours(lambda a, b, s, t: 0.02 * jnp.tanh(a @ b))
    y = jnp.ones((BATCH, 4))
    parts = [term(part, part) for part in jnp.split(y, 4)]
    assert 0.002 < term(y, y) / np.mean(parts) - 1 < 0.01
    y = y.astype(dtype)
    pipe = jpipe.sequential([lambda y: y], 4)
    with pytest.raises(ValueError, match="loss_fn is, of random numbers"):
        pipe.value_and_grad(term)(pipe.init(jax.random.key(0), y), y, y)


def test_a_layer_with_a_table_as_long_as_the_batch():
    def labelled(x):
        return x * (jnp.arange(BATCH) % 6 < 3)[: len(x), None]

    x = jax.random.normal(jax.random.key(0), (BATCH, 4))
    pipe = jpipe.sequential([ref.dense(4), labelled], 4)
    with pytest.warns(UserWarning, match=r"layer 1 \(labelled\) gives other results"):
        pipe.value_and_grad(ref.mse)(pipe.init(jax.random.key(0), x), x, x)
