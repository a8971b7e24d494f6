"""Totals and weights that are no sums over the examples, of `reduction="weighted"`."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jpipe

from .. import reference as ref

BATCH, PARTS, WIDTH = 12, 3, 4


def squares(y, t):
    return jnp.sum((y - t) ** 2, -1)


def mask(t):
    return t[:, 0] > 0


def priorities(t):
    """By the largest of all, as of a replay buffer."""
    return jnp.abs(t[:, 0]) / jnp.abs(t[:, 0]).max()


def masked(y, t, more=0.0, rest=0.0):
    return jnp.sum(squares(y, t) * mask(t)) + more, jnp.sum(mask(t)) + rest


def contrastive(y, t):
    likeness = y @ y.T
    return jax.nn.logsumexp(likeness, -1) - jnp.diag(likeness)


KEY = jax.random.key(2)


def called(t):
    like = jax.ShapeDtypeStruct(t.shape, t.dtype)
    return jax.pure_callback(lambda t: t - np.mean(t, 0), like, t)


NO_SUM = "returns a weight that is no sum: it "
GROWS = "adds what grows with the number of examples to what does not"
TOLD = {
    "an auxiliary mean": (
        lambda y, t: masked(y, t, 0.1 * jnp.mean(y**2)),
        "adds a sum over the examples to a mean; where that of each micro-batch by",
    ),
    "an auxiliary mean times the weight": (
        lambda y, t: masked(y, t, 0.1 * jnp.mean(y**2) * mask(t).sum()),
        "multiplies by what is made of all examples; where",
    ),
    "a penalty": (lambda y, t: masked(y, t, 5e-4 * jnp.sum(WEIGHTS**2)), GROWS),
    "one more": (lambda y, t: masked(y, t, rest=1.0), GROWS),
    "priorities": (
        lambda y, t: (squares(y, t) @ priorities(t), len(y)),
        "divides by what is made of all examples; where",
    ),
    "priorities as weights": (
        lambda y, t: (squares(y, t) @ priorities(t), priorities(t).sum()),
        NO_SUM + "divides",
    ),
    "the largest as a weight": (
        lambda y, t: (squares(y, t).sum(), jnp.abs(t).max()),
        NO_SUM + "takes the largest",
    ),
    "a root as a weight": (
        lambda y, t: (squares(y, t).sum(), jnp.sqrt(mask(t).sum())),
        NO_SUM + "takes the root",
    ),
    "weights of a key of its own": (
        lambda y, t: (squares(y, t) @ jax.random.uniform(KEY, (len(y),)), len(y)),
        "draws random numbers by a key that is not of this step",
    ),
    "what is not of JAX": (
        lambda y, t: (jnp.sum(squares(y, called(t))), len(y)),
        "gives several examples to what is not of JAX",
    ),
    "a masked mean, times the size, by the mask": (
        lambda y, t: (len(y) * masked(y, t)[0] / masked(y, t)[1], masked(y, t)[1]),
        "divides by what is made of all examples; where",
    ),
    "compared": (
        lambda y, t: (contrastive(y, t).sum(), len(y)),
        "compares examples with one another; where",
    ),
}
LEFT = {
    "masked": masked,
    "a little beside": lambda y, t: masked(y, t, rest=1e-6),
    "a mean": lambda y, t: (len(y) * squares(y, t).mean(), len(y)),
}
# That of each micro-batch by itself is meant.
SAID = {
    "each compared": lambda y, t: (len(y) * contrastive(y, t).mean(), len(y)),
    "as one": lambda y, t: (contrastive(y, t).mean(), 1.0),
    "in another dtype": lambda y, t: (
        jnp.float32(0.5 * (len(y) * jnp.sqrt(squares(y, t).mean())) / 3),
        jnp.float32(len(y)),
    ),
}
WEIGHTS = 30 * jnp.ones((WIDTH, WIDTH))


def data():
    y = jax.random.normal(jax.random.key(0), (BATCH, WIDTH))
    return y, jax.random.normal(jax.random.key(1), (BATCH, WIDTH))


def loss_by(loss_fn, num_microbatches=PARTS):
    y, t = data()
    pipe = jpipe.sequential([lambda y: y], num_microbatches)
    find = pipe.value_and_grad(loss_fn, reduction="weighted")
    return find(pipe.init(jax.random.key(0), y), y, t)[0]


def quotient(loss_fn, num_parts):
    parts = zip(*(jnp.split(each, num_parts) for each in data()), strict=True)
    total, weight = np.sum([loss_fn(*part) for part in parts], axis=0)
    return total / weight


@pytest.mark.parametrize("name", TOLD)
def test_what_is_no_sum_is_told(name):
    loss_fn, says = TOLD[name]
    assert not np.isclose(quotient(loss_fn, 1), quotient(loss_fn, PARTS), rtol=1e-4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=f"loss_fn {says}"):
            loss_by(loss_fn)


def test_a_weight_that_counts_what_there_is_is_measured():
    def of_kinds(y, t):
        kinds = jnp.zeros(8).at[jnp.int32(3 * jnp.abs(t[:, 0]))].set(1.0)
        return squares(y, t).sum(), kinds.sum()

    with pytest.raises(ValueError, match="loss_fn is, of random numbers, "):
        loss_by(of_kinds)


@pytest.mark.parametrize("name", [*LEFT, *SAID])
def test_sums_are_not_nor_what_is_said_to_be_of_each_micro_batch(name):
    loss_fn = (LEFT | SAID)[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = loss_by(loss_fn)
    expected = quotient(loss_fn, PARTS if name in SAID else 1)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_masked_mean_and_another_are_sums_by_given_numbers():
    """As the guide says it."""

    def both(y, targets):
        made = jnp.sum(squares(y, targets["t"]) * mask(targets["t"]))
        return made / targets["tokens"] + jnp.sum(y**2) / targets["size"]

    y, t = data()
    targets = {"t": t, "tokens": mask(t).sum(), "size": y.size}
    targets = jax.tree.map(jnp.asarray, targets)
    axes = {"t": 0, "tokens": None, "size": None}
    pipe = jpipe.sequential([lambda y: y], PARTS, target_axes=axes)
    find = pipe.value_and_grad(both, reduction="sum")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = find(pipe.init(jax.random.key(0), y), y, targets)[0]
    ref.assert_close(found, both(y, targets), 1e-5)
