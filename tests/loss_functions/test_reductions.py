"""What a loss is of its micro-batches: a mean, a sum, a quotient of sums."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import jpipe

from .. import reference as ref
from .small_losses import (
    TARGETS,
    X,
    matrices,
    perceptron,
    plain,
    run,
)


@pytest.mark.parametrize(
    "around",
    [lambda x: x, jnp.sum, jnp.array, lambda x: 2 * x.reshape(1).mean()],
)
def test_sum_counts_a_penalty_once(double, around):
    def total(params, x, targets):
        errors = (perceptron(params, x) - targets) ** 2
        penalty = 0.5 * sum(jnp.sum(w**2) for w in params)
        return around(jnp.sum(errors) + penalty)

    params = matrices(6, 8, 8, 3)
    expected = jax.value_and_grad(total)(params, X, TARGETS)
    grad_fn = jpipe.value_and_grad(total, 4, num_stages=3, reduction="sum")
    ref.assert_close(run(grad_fn, params, X, TARGETS), expected, ref.FLOAT64)


def long(total, penalty):
    """A sum of more summands than Python calls deep."""
    for _ in range(1100):
        total = total + penalty
    return total


def shared(total, penalty):
    """A sum with too many paths through it to follow each."""
    for _ in range(60):
        total = (total + total + penalty) * 0.5
    return total


@pytest.mark.parametrize("around", [long, shared])
def test_summands_may_be_many_and_shared(double, around):
    def total(params, x, targets):
        errors = (perceptron(params, x) - targets) ** 2
        return around(errors.sum(), sum(jnp.sum(w**2) for w in params))

    params = matrices(6, 3)
    grad_fn = jpipe.value_and_grad(total, 2, num_stages=1, reduction="sum")
    with ref.unoptimized():
        expected = jax.jit(jax.value_and_grad(total))(params, X, TARGETS)
        ref.assert_close(run(grad_fn, params, X, TARGETS), expected, ref.FLOAT64)


def contrastive(params, x, targets):
    y = perceptron(params, x)
    return optax.softmax_cross_entropy_with_integer_labels(
        y @ y.T, jnp.arange(len(y))
    ).mean()


def product(params, x, targets):
    penalty = sum(jnp.sum(w**2) for w in params)
    errors = (perceptron(params, x) - targets) ** 2
    return (errors.mean() + penalty) * errors.max()


def reciprocal(params, x, targets):
    penalty = sum(jnp.sum(w**2) for w in params)
    return 2 / (plain(params, x, targets) + penalty)


@pytest.mark.parametrize("function", [contrastive, product, reciprocal])
def test_microbatch_mean_is_the_mean_of_the_losses_of_micro_batches(double, function):
    params = matrices(6, 8, 3)
    parts = [
        jax.value_and_grad(function)(params, x, t)
        for x, t in zip(np.split(X, 5), np.split(TARGETS, 5), strict=True)
    ]
    expected = jax.tree.map(lambda *leaves: sum(leaves) / 5, *parts)
    options = {"num_stages": 2, "reduction": "microbatch_mean"}
    grad_fn = jpipe.value_and_grad(function, 5, **options)
    ref.assert_close(run(grad_fn, params, X, TARGETS), expected, ref.FLOAT64)


def test_sum_counts_a_penalty_once_whose_weight_is_an_argument(double):
    def total(params, x, targets, weight, key):
        errors = (perceptron(params, x) - targets) ** 2
        penalty = weight * sum(jnp.sum(w**2) for w in params)
        return (jnp.sum(errors) + penalty) / weight + 0 * jax.random.normal(key)

    params, args = matrices(6, 8, 8, 3), (X, TARGETS, np.array(0.3), jax.random.key(0))
    expected = jax.value_and_grad(total)(params, *args)
    options = {"reduction": "sum", "in_axes": (0, 0, None, None)}
    grad_fn = jpipe.value_and_grad(total, 4, num_stages=3, **options)
    ref.assert_close(run(grad_fn, params, *args), expected, ref.FLOAT64)


@jax.custom_vjp
def clipped(x):
    """Its gradients are clipped, so that their size tells."""
    return x


clipped.defvjp(lambda x: (x, None), lambda _, grads: (jnp.clip(grads, -0.1, 0.1),))


@pytest.mark.parametrize("weight_reads", ["targets", "outputs"])
def test_weighted_totals_are_divided_by_the_sum_of_weights(double, weight_reads):
    """Where targets alone tell the weight, cotangents are as large as on one device."""
    mask = (np.arange(10) % 3 > 0).astype(float)

    def masked(params, x, targets, mask):
        y = perceptron(params, x)
        if weight_reads == "targets":
            errors, weight = ((clipped(y) - targets) ** 2).sum(1), mask.sum()
        else:
            errors = ((y - targets) ** 2).sum(1)
            weight = jax.lax.stop_gradient(jnp.sum(mask + jnp.abs(y).sum(1)))
        penalty = sum(jnp.sum(w**2) for w in params)
        return (errors * mask).sum() + penalty, weight

    def quotient(params, *args):
        total, weight = masked(params, *args)
        return total / weight

    params, args = matrices(6, 8, 8, 3), (X, TARGETS, mask)
    expected = jax.value_and_grad(quotient)(params, *args)
    options = {"num_stages": 3, "reduction": "weighted"}
    grad_fn = jpipe.value_and_grad(masked, 4, **options)
    ref.assert_close(run(grad_fn, params, *args), expected, ref.FLOAT64)
    report = grad_fn.check(params, *args)
    assert report
    assert f"{expected[0]:.6g}" in str(report)


def test_a_weight_of_parameters_is_held_constant_or_refused(double):
    def total(hold, params, x, targets):
        y = perceptron(params, x)
        return jnp.sum((y - targets) ** 2), hold(jnp.sum(y**2))

    def quotient(params, *args):
        value, weight = total(jax.lax.stop_gradient, params, *args)
        return value / weight

    params, args = matrices(6, 8, 3), (X, TARGETS)
    options = {"num_stages": 2, "reduction": "weighted"}
    held, free = (
        jpipe.value_and_grad(functools.partial(total, hold), 4, **options)
        for hold in (jax.lax.stop_gradient, jnp.array)
    )
    expected = jax.value_and_grad(quotient)(params, *args)
    ref.assert_close(run(held, params, *args), expected, ref.FLOAT64)
    with pytest.raises(
        TypeError, match=r"\(total, jax\.lax\.stop_gradient\(weight\)\)"
    ):
        free.place(params, *args)


@pytest.mark.parametrize(
    ("function", "reduction", "is_same"),
    [
        (plain, "mean", True),
        (plain, "sum", False),
        (contrastive, "mean", False),
        (contrastive, "microbatch_mean", False),
    ],
)
def test_check_tries_a_reduction(double, function, reduction, is_same):
    params = matrices(6, 8, 3)
    grad_fn = jpipe.value_and_grad(function, 4, num_stages=2, reduction=reduction)
    report = grad_fn.check(params, X, TARGETS, microbatch_sizes=np.array([4, 6]))
    assert bool(report) == is_same
    assert "a call does not check the loss; grad_fn.check(params, *args) runs" in str(
        grad_fn
    )
    if not is_same:
        with pytest.raises(ValueError, match=r"outputs differ: .* at once, .*'sum'"):
            report.raise_if_different()
    with pytest.raises(
        ValueError, match=r"microbatch_sizes=\(4, 5\): .* the 10 of the batch"
    ):
        grad_fn.check(params, X, TARGETS, microbatch_sizes=(4, 5))
    with pytest.raises(ValueError, match=r"microbatch_sizes=\(\): "):
        grad_fn.check(params, X, TARGETS, microbatch_sizes=())


@pytest.mark.parametrize("sizes", [(2, 3, 5), (5, 5), (1,) * 10])
def test_check_runs_a_loss_with_aux_marks_and_a_key(double, sizes):
    def dropped(params, x, targets, key):
        first, last, scale = params
        y = jpipe.boundary(jnp.tanh(x @ first))
        y = y * jax.random.bernoulli(key, 0.5, y.shape) @ last * scale
        return jnp.mean((y - targets) ** 2), {"y": y}

    params = [*matrices(6, 8, 3), jnp.ones(())]
    options = {"has_aux": True, "in_axes": (0, 0, None), "aux_axes": {"y": 0}}
    grad_fn = jpipe.value_and_grad(dropped, 3, trainable="2", **options)
    args = X, TARGETS, jax.random.key(0)
    report = grad_fn.check(params, *args, microbatch_sizes=sizes)
    assert report, report
    assert report.microbatch_sizes == sizes
    assert report.loss.compared == ("outputs", "gradients")
    with pytest.raises(ValueError, match="once it was placed or called"):
        _ = grad_fn.plan  # a check divides nothing


def test_a_loss_that_was_refused_is_refused_again():
    pipe = jpipe.pipeline(nn.Dense(3), 4, num_stages=1)
    x = np.ones((8, 6), np.float32)
    variables = pipe.init(jax.random.key(0), x)
    gradient = pipe.value_and_grad(lambda y, t: ((y - t) ** 2).sum())
    for _ in range(2):
        with pytest.raises(ValueError, match="for a sum over examples type reduction"):
            gradient(variables, x, np.ones((8, 3), np.float32))


def test_a_loss_is_checked_on_the_batch_that_is_given():
    pipe = jpipe.pipeline(nn.Dense(3), 4, num_stages=1)
    x, targets = np.ones((20, 6), np.float32), np.ones((20, 3), np.float32)
    variables = pipe.init(jax.random.key(0), x)
    gradient = pipe.value_and_grad(lambda y, t: ((y - t) ** 2).mean())
    gradient.compile(variables, x, targets)
    for size in (8, 20):
        loss, _ = gradient(variables, x[:size], targets[:size])
    y = nn.Dense(3).apply(jax.device_get(variables), x)
    ref.assert_close(loss, ((y - targets) ** 2).mean(), 1e-6)
