"""Losses that no jaxpr tells of are measured: all examples, and parts of them."""

import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import jpipe

from .. import reference as ref

BATCH, PARTS, WIDTH = 12, 3, 4


def squares(y, t):
    return jnp.mean((y - t) ** 2)


def each_with_each(y, t):
    pairs = [(i, j) for i in range(len(y)) for j in range(i)]
    return sum(jnp.sum((y[i] - y[j]) ** 2) for i, j in pairs) / len(y) ** 2


def one_by_one(y, t):
    return sum(jnp.mean((a - b) ** 2) for a, b in zip(y, t, strict=True)) / len(y)


def as_long_as_the_batch(y, t):
    """What it holds is cut to the examples, which go into it."""
    weights = jnp.arange(1.0, BATCH + 1).reshape(-1, len(y))[0]
    return jnp.mean(weights[:, None] * (y - t) ** 2)


def less_all(y, t):
    return jnp.mean((y - jnp.ones((len(y), len(y))) @ y / len(y)) ** 2)


def running_maximum(y, t):
    return jnp.mean(jax.lax.associative_scan(jnp.maximum, y))


def of_few_or_many(y, t):
    return squares(y, t) if len(y) > BATCH else jnp.sum(y)


def without_what_is_none(y, t):
    return jnp.nan_to_num(squares(y, t))


def of_logarithms(y, t):
    """Not a number for most numbers."""
    return squares(y, t) + 0.1 * each_with_each(jnp.log(jnp.abs(y)), t)


def with_little_of_all(y, t):
    return one_by_one(y, t) + 2e-3 * each_with_each(y, t)


def printed(y, t):
    jax.debug.callback(lambda y: None, y)
    return each_with_each(y, t)


REFUSED = {
    each_with_each: "mean",
    as_long_as_the_batch: "mean",
    less_all: "mean",
    running_maximum: "mean",
    of_logarithms: "mean",
    with_little_of_all: "mean",
    printed: "mean",
    of_few_or_many: "mean",
    without_what_is_none: "sum",
}


def in_bfloat16(y, t):
    return one_by_one(y.astype(jnp.bfloat16), t.astype(jnp.bfloat16))


def summed_one_by_one(y, t):
    return sum(jnp.sum((a - b) ** 2) for a, b in zip(y, t, strict=True))


def of_some_numbers_alone(y, t):
    if len(y) not in (BATCH, BATCH // PARTS):
        raise ValueError("another number")
    return one_by_one(y, t)


def with_noise(y, t):
    """What is drawn by places is told; here all draw the same."""
    return one_by_one(y + jax.random.normal(jax.random.key(0), (WIDTH,)), t)


LEFT = {
    one_by_one: "mean",
    in_bfloat16: "mean",
    summed_one_by_one: "sum",
    of_some_numbers_alone: "mean",
    without_what_is_none: "mean",
    with_noise: "mean",
    # Which says that the loss of each micro-batch by itself is meant.
    lambda y, t: (len(y) * each_with_each(y, t), len(y)): "weighted",
}


def data():
    y = jax.random.normal(jax.random.key(0), (BATCH, WIDTH))
    return y, jax.random.normal(jax.random.key(1), (BATCH, WIDTH))


def gradient_of(loss_fn, reduction="mean", num_microbatches=PARTS):
    """The loss, and its gradient by one factor of all outputs."""
    y, t = data()
    pipe = jpipe.sequential([nn.Dense(WIDTH)], num_microbatches)
    kernel = {"params": {"kernel": 2 * jnp.eye(WIDTH), "bias": jnp.zeros(WIDTH)}}
    find = pipe.value_and_grad(loss_fn, reduction=reduction)
    loss, (grads,) = find((kernel,), y, t)
    return loss, grads["kernel"]


def by_hand(loss_fn, reduction, num_microbatches):
    """The same of each micro-batch by itself."""

    def loss_of(kernel, y, t):
        made = loss_fn(y @ kernel, t)
        return made[0] / made[1] if reduction == "weighted" else made

    parts = zip(*(jnp.split(a, num_microbatches) for a in data()), strict=True)
    find = jax.jit(jax.value_and_grad(loss_of))
    found = [find(2 * jnp.eye(WIDTH), *part) for part in parts]
    summed = jax.tree.map(lambda *each: sum(each), *found)
    count = 1 if reduction == "sum" else num_microbatches
    return jax.tree.map(lambda total: total / count, summed)


@pytest.mark.parametrize("loss_fn", REFUSED)
def test_what_micro_batches_make_another_loss_of_is_refused(loss_fn):
    reduction = REFUSED[loss_fn]
    whole, parts = (by_hand(loss_fn, reduction, count)[0] for count in (1, PARTS))
    assert not np.isclose(whole, parts, rtol=1e-5)
    says = rf"loss_fn is, of random numbers, \S+ for \d+ examples.*={reduction!r} its"
    with pytest.raises(ValueError, match=says):
        gradient_of(loss_fn, reduction)
    found = gradient_of(loss_fn, reduction, 1)
    ref.assert_close(found, by_hand(loss_fn, reduction, 1), 1e-5)


@pytest.mark.parametrize("loss_fn", LEFT)
def test_what_they_do_not_or_what_nobody_knows_is_left_alone(loss_fn):
    reduction = LEFT[loss_fn]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = gradient_of(loss_fn, reduction)
    rtol = 2e-2 if loss_fn is in_bfloat16 else 1e-5
    ref.assert_close(found, by_hand(loss_fn, reduction, PARTS), rtol)


def called_back(y, t):
    """No function of the user's is called with random numbers."""

    def shown(y):
        assert y.shape == (BATCH // PARTS, WIDTH)
        return y

    like = jax.ShapeDtypeStruct(y.shape, y.dtype)
    return one_by_one(y, jax.pure_callback(shown, like, t))


def called_at_once(y, t):
    like = jax.ShapeDtypeStruct(y.shape, y.dtype)
    return squares(y, jax.pure_callback(np.asarray, like, t))


@pytest.mark.parametrize(
    ("loss_fn", "says"),
    [(called_back, "cannot be computed on random"), (called_at_once, "not of JAX")],
)
def test_a_callback_is_told(loss_fn, says):
    with pytest.warns(UserWarning, match=rf"(.|\n)*loss_fn .*{says}"):
        found = gradient_of(loss_fn)
    ref.assert_close(found, by_hand(loss_fn, "mean", PARTS), 1e-5)


def with_backward(backward):
    """What is given, and another gradient of it."""

    @jax.custom_vjp
    def same(x):
        return x

    same.defvjp(lambda x: (x, None), lambda _, ct: (backward(ct),))
    return same


def of_length_one(ct):
    return ct / jnp.linalg.norm(ct)


def each_of_length_one(ct):
    return ct / jnp.linalg.norm(ct, axis=-1, keepdims=True)


def centred(ct):
    return ct - ct.mean(0)


def turned(ct):
    return ct[::-1]


def largest_half(ct):
    return ct * (jnp.abs(ct) >= jnp.median(jnp.abs(ct)))


def with_a_constant(ct):
    return ct + 0.01


def clipped(ct):
    return jnp.clip(ct, -0.02, 0.02)


def with_noise_of_its_own(ct):
    return ct + jax.random.normal(jax.random.key(0), ct.shape)


def reversed_(ct):
    return -0.3 * ct


def totals(y, t):
    return jnp.sum((y - t) ** 2), jnp.sum(t > 0)


MIXES = "makes something of the cotangents of several examples"
SQUARES = (squares, "mean")
TOTALS = (totals, "weighted")
DRAWS = "draws random numbers by a key that is not of this step"
BACKWARDS = [
    (with_noise_of_its_own, *SQUARES, DRAWS),
    (of_length_one, *SQUARES, MIXES),
    (of_length_one, *TOTALS, MIXES),
    (centred, *SQUARES, MIXES),
    (turned, *SQUARES, MIXES),
    (largest_half, *SQUARES, MIXES),
    (with_a_constant, *SQUARES, ""),
    (with_a_constant, *TOTALS, ""),
    (each_of_length_one, *SQUARES, ""),
    (each_of_length_one, *TOTALS, ""),
    (clipped, *SQUARES, ""),
    (clipped, *TOTALS, ""),
    (reversed_, *SQUARES, ""),
    (reversed_, *TOTALS, ""),
]


@pytest.mark.parametrize(("backward", "loss_fn", "reduction", "says"), BACKWARDS)
def test_a_backward_of_its_own_is_measured(backward, loss_fn, reduction, says):
    loss = partial(lambda same, y, t: loss_fn(same(y), t), with_backward(backward))
    if says:
        with pytest.raises(ValueError, match=f"loss_fn has a backward that {says}"):
            gradient_of(loss, reduction)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = gradient_of(loss, reduction)
    ref.assert_close(found, by_hand(loss, reduction, 1), 1e-5)
