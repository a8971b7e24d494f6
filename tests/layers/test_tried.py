"""Layers of which no jaxpr tells are tried: all examples, and parts of them."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import jpipe

from .. import reference as ref
from ..functions.test_measured import (
    centred,
    clipped,
    each_of_length_one,
    of_length_one,
    reversed_,
    squares,
    totals,
    turned,
    with_backward,
    with_noise_of_its_own,
)

BATCH, PARTS, WIDTH = 12, 3, 4
SAID = "each micro-batch by itself"
TOGETHER = "gives other results for examples together than for parts of them"


def less_the_next(x):
    return jnp.stack([x[i] - x[i - 1] for i in range(len(x))])


def less_all(x):
    return x - jnp.ones((len(x), len(x))) @ x / len(x)


def fading(x):
    return jax.lax.scan(lambda c, row: (0.5 * c, c * row), jnp.ones(()), x)[1]


def running_sum(x):
    return jax.lax.associative_scan(jnp.add, x)


def with_the_next(x):
    """Each number is there as often as before."""
    return jnp.stack([x[i - 1] for i in range(len(x))])


def printed(x):
    jax.debug.print("")
    return with_the_next(x)


class OfARoot(nn.Module):
    """Not a number for most numbers."""

    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.ones, (WIDTH, WIDTH))
        return less_the_next(x) @ jnp.sqrt(scale)


def what_overflows(x):
    """Rows in two groups, in each of which seven tenths of them have a place."""
    rows = x.reshape(-1, 2)
    group = (rows[:, 0] > 0).astype(int)
    order = jnp.argsort(group, stable=True)
    ahead = jnp.searchsorted(group[order], jnp.arange(2))[group[order]]
    fits = jnp.arange(len(rows)) - ahead < int(0.7 * len(rows))
    return (
        jnp.zeros_like(rows).at[order].set(rows[order] * fits[:, None]).reshape(x.shape)
    )


MIXED = [
    less_the_next,
    less_all,
    fading,
    running_sum,
    with_the_next,
    printed,
    what_overflows,
]


def one_by_one(x):
    return jnp.stack([jnp.tanh(row) for row in x])


def tokens_before_examples(x):
    """Its rows are in another order, each of one example, and rounded."""
    pairs = x.reshape(len(x), 2, -1)
    kernel = jax.random.normal(jax.random.key(5), (WIDTH // 2, WIDTH))
    return jnp.concatenate([jnp.tanh(pairs[:, i] @ kernel) @ kernel.T for i in (0, 1)])


def infinite_and_empty(x):
    rows = jnp.stack([jnp.where(row > 0, row, -jnp.inf) for row in x])
    return jnp.maximum(rows, 0) + jnp.zeros((len(x), 0)).sum(1, keepdims=True), x[:, :0]


class Dropped(nn.Module):
    """Other examples draw other numbers, which tells nothing."""

    @nn.compact
    def __call__(self, x, train):
        rows = nn.Dropout(0.2, deterministic=not train)(x)
        return jnp.stack([*rows])


def below_a_quotient_by_zero(x):
    return jnp.minimum(x, jnp.float32(1) / jnp.float32(0))


APART = [
    below_a_quotient_by_zero,
    one_by_one,
    tokens_before_examples,
    infinite_and_empty,
    Dropped(),
]


def data():
    return jax.random.normal(jax.random.key(0), (BATCH, WIDTH))


def of_outputs_alone(made, targets):
    return jnp.mean(jax.tree.leaves(made)[0] ** 2)


def gradient_of(layer, loss_fn=squares, reduction="mean"):
    x = data()
    pipe = jpipe.sequential([nn.Dense(WIDTH), layer], PARTS)
    variables = pipe.init(jax.random.key(0), x)
    find = pipe.value_and_grad(loss_fn, reduction=reduction)
    return find(variables, x, jnp.sin(x), rngs=jax.random.key(1))


@pytest.mark.parametrize("layer", MIXED)
def test_a_layer_that_mixes_examples_is_told(layer):
    parts = jnp.concatenate([*map(layer, jnp.split(data(), PARTS))])
    assert not np.allclose(layer(data()), parts, atol=1e-3)
    with pytest.warns(
        UserWarning, match=rf"itself: (.|\n)*layer 1 \(.*\) {TOGETHER}\n"
    ):
        gradient_of(layer)


@pytest.mark.parametrize("layer", APART)
def test_a_layer_that_keeps_them_apart_is_not(layer):
    gradient_of(layer, of_outputs_alone)  # a warning is an error


def test_a_layer_of_roots_is_told():
    with pytest.warns(UserWarning, match=rf"{SAID}: (.|\n)*layer 1 .* {TOGETHER}\n"):
        gradient_of(OfARoot())


def with_a_sum(x):
    """What is not along the examples is that of all of them too."""
    first = [jnp.mean(x[i : i + 2]) for i in range(0, len(x), 2)]
    return x, jnp.square(sum(first) / len(first))


def test_what_is_beside_the_examples_is_told():
    pipe = jpipe.sequential([nn.Dense(WIDTH), with_a_sum], PARTS)
    variables = pipe.init(jax.random.key(0), data())
    with pytest.warns(UserWarning, match=rf"{SAID}: (.|\n)*layer 1 .* {TOGETHER}\n"):
        pipe.value_and_grad(lambda y, t: squares(y[0], t) + y[1])(
            variables, data(), data()
        )


def beside_the_mean(x):
    return x, jnp.mean(x**2)


def beside_the_largest(x):
    return x, jnp.max(x**2)


def divided_one_by_one(both):
    x, of_all = both
    return jnp.stack([row / (1 + of_all) for row in x])


def first_one_by_one(both):
    return jnp.stack([*both[0]])


@pytest.mark.parametrize(
    ("before", "says"),
    [(beside_the_mean, TOGETHER), (beside_the_largest, "is another computation")],
)
def test_what_is_given_beside_the_examples_is_another_of_each_part(before, says):
    x = data()
    pipe = jpipe.sequential([before, divided_one_by_one], PARTS)
    with pytest.warns(UserWarning, match=rf"{SAID}: (.|\n)*layer 1 .* {says}"):
        pipe.value_and_grad(squares)(pipe.init(jax.random.key(0), x), x, x)


def test_what_is_given_beside_the_examples_and_not_used_is_left_alone():
    x = data()
    pipe = jpipe.sequential([beside_the_mean, first_one_by_one], PARTS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe.value_and_grad(squares)(pipe.init(jax.random.key(0), x), x, x)


def powers_of_two_alone(x):
    assert len(x) & (len(x) - 1) == 0
    return x


TABLE = jnp.eye(16, WIDTH)


@pytest.mark.parametrize(
    "layer", [powers_of_two_alone, lambda x: x + 0 * TABLE[: len(x)]]
)
def test_what_comes_after_a_layer_of_some_numbers_alone_is_told(layer):
    x = jnp.concatenate([data(), data()[:4]])
    pipe = jpipe.sequential([layer, lambda x: x - x.mean(0), nn.Dense(WIDTH)], 4)
    variables = pipe.init(jax.random.key(0), x)
    with pytest.warns(UserWarning, match=rf"{SAID}: (.|\n)*layer 1 .* adds what"):
        pipe.value_and_grad(squares)(variables, x, x)


def of_so_many_alone(x):
    return x.reshape(BATCH // PARTS, WIDTH)


def test_what_comes_after_a_layer_of_one_number_alone_is_told():
    """One device could not run it with all examples; yet it is not what mixes."""
    entry = [nn.Dense(WIDTH), of_so_many_alone, nn.relu, of_so_many_alone]
    pipe = jpipe.sequential([*entry, lambda x: x - x.mean(0), nn.Dense(WIDTH)], PARTS)
    variables = pipe.init(jax.random.key(0), data())
    with pytest.warns(
        UserWarning, match=rf"{SAID}: (.|\n)*layer 4 .* adds what"
    ) as told:
        pipe.value_and_grad(squares)(variables, data(), data())
    assert "layer 1" not in str(told[0].message)


def shown_at_once(x):
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return x + jax.pure_callback(np.asarray, like, jax.lax.stop_gradient(x))


def shown_one_by_one(x):
    like = jax.ShapeDtypeStruct(x.shape[1:], x.dtype)

    def show(row):
        return jax.pure_callback(np.asarray, like, row, vmap_method="sequential")

    return x + jax.vmap(show)(jax.lax.stop_gradient(x))


def test_a_callback_that_is_given_several_examples_is_told():
    with pytest.warns(UserWarning, match=rf"{SAID}: (.|\n)*layer 1 .* not of JAX"):
        gradient_of(shown_at_once)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradient_of(shown_one_by_one)


@jax.custom_vjp
def solved(x):
    return x


def _until_it_is_small(_, ct):
    def goes_on(carried):
        return jnp.abs(carried[0] - carried[1]).max() > 1e-30

    def step(carried):
        return carried[1], jnp.cos(carried[1]) * ct

    return (jax.lax.while_loop(goes_on, step, (ct, 2 * ct))[1],)


solved.defvjp(lambda x: (x, None), _until_it_is_small)


def test_a_backward_that_may_not_end_ends():
    x = 1e-6 * data()
    pipe = jpipe.sequential([nn.Dense(WIDTH), solved], PARTS)
    with pytest.warns(UserWarning, match=rf"(.|\n)*layer 1 .* {FOLLOWS}"):
        pipe.value_and_grad(squares)(pipe.init(jax.random.key(0), x), x, x)


class OfATable(nn.Module):
    """Few rows of it have a gradient."""

    @nn.compact
    def __call__(self, x):
        rows = nn.Embed(512, WIDTH)((10 * jnp.abs(x[:, 0])).astype(int))
        return with_backward(centred)(x + rows)


@jax.custom_vjp
def add_loss(x, loss):
    return x


add_loss.defvjp(lambda x, loss: (x, None), lambda _, ct: (ct, jnp.ones(())))


class OfAnAuxiliaryLoss(nn.Module):
    """Each micro-batch adds the gradient of a loss of its own, as large as all."""

    @nn.compact
    def __call__(self, x):
        chosen = nn.softmax(nn.Dense(WIDTH)(x))
        return add_loss(x * chosen, 0.01 * jnp.sum(chosen.mean(0) ** 2))


class OfAParameter(nn.Module):
    """The backward of a kernel finds what all examples of a micro-batch add up to."""

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (WIDTH, WIDTH))
        return x @ with_backward(clipped)(kernel)


class BesideANorm(nn.Module):
    """What a batch norm does is known, and meant; what is beside it is not."""

    @nn.compact
    def __call__(self, x, train):
        return with_backward(centred)(nn.BatchNorm(not train)(x))


def with_tangents(rule):
    @jax.custom_jvp
    def identity(x):
        return x

    identity.defjvp(lambda primals, tangents: (primals[0], rule(tangents[0])))
    return lambda x: jax.checkpoint(identity)(jax.nn.relu(x)) + jax.nn.softmax(x)


MIXES = "has a backward that makes something of the cotangents of several examples"


def skipped(ct):
    """Nothing, where there is too much of it in all; random numbers are less."""
    return jax.lax.cond(jnp.linalg.norm(ct) > 1e9, lambda: 0 * ct, lambda: ct)


FOLLOWS = "has a backward that computes with what is made of all examples"
DRAWS = "has a backward that draws random numbers by a key that is not of this step"
SQUARES, TOTALS = (squares, "mean"), (totals, "weighted")
BACKWARDS = [
    (with_backward(of_length_one), *SQUARES, MIXES),
    (with_backward(centred), *SQUARES, MIXES),
    (with_backward(turned), *SQUARES, MIXES),
    (OfAnAuxiliaryLoss(), *SQUARES, MIXES),
    (OfAParameter(), *SQUARES, MIXES),
    (OfATable(), *SQUARES, MIXES),
    (BesideANorm(), *SQUARES, MIXES),
    (with_tangents(centred), *SQUARES, MIXES),
    (with_tangents(reversed_), *SQUARES, ""),
    (with_backward(skipped), *SQUARES, FOLLOWS),
    (with_backward(with_noise_of_its_own), *SQUARES, DRAWS),
    (with_backward(each_of_length_one), *SQUARES, ""),
    (with_backward(each_of_length_one), *TOTALS, ""),
    (with_backward(clipped), *SQUARES, ""),
    (with_backward(clipped), *TOTALS, ""),
    (with_backward(reversed_), *SQUARES, ""),
    (with_backward(reversed_), *TOTALS, ""),
]


@pytest.mark.parametrize(("layer", "loss_fn", "reduction", "says"), BACKWARDS)
def test_a_backward_of_its_own_is_measured(layer, loss_fn, reduction, says):
    if says:
        with pytest.warns(UserWarning, match=rf"(.|\n)*layer 1 \(.*\) {says}"):
            gradient_of(layer, loss_fn, reduction)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, grads = gradient_of(layer, loss_fn, reduction)
    x = data()
    pipe = jpipe.sequential([nn.Dense(WIDTH), layer], 1)
    (entry, _) = pipe.init(jax.random.key(0), x)

    def whole(params):
        made = loss_fn(layer(nn.Dense(WIDTH).apply({"params": params}, x)), jnp.sin(x))
        return made[0] / made[1] if reduction == "weighted" else made

    ref.assert_close(grads[0], jax.grad(whole)(entry["params"]), 1e-5)
