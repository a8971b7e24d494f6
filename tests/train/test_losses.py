"""Losses, gradients and norms are those of the mini-batch, however it is cut."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jpipe

from .. import reference as ref

BATCH, TOKENS = 11, 3


# Eleven examples: alone, six and five, four four three, and three and four twos.
MICROBATCHES = [1, 2, 3, 5]


@functools.cache
def model():
    """Layers, and parameters, inputs and targets with a mask, made in plain NumPy."""
    layers = [ref.dense(6, jnp.float64), jnp.tanh, ref.dense(4, jnp.float64)]
    rng = np.random.default_rng(0)
    x = rng.normal(size=(BATCH, TOKENS, 5))
    targets = {
        "values": rng.normal(size=(BATCH, TOKENS, 4)),
        "mask": rng.random((BATCH, TOKENS)) < 0.6,
    }
    # The last micro-batch, of two examples or more, has nothing but padding.
    targets["mask"][-4:] = False
    params = ref.params_of(jpipe.sequential(layers).init(jax.random.key(0), x))
    return layers, params, x, targets


@functools.cache
def pipeline(num_microbatches):
    return jpipe.pipeline(model()[0], num_microbatches, balance=[2, 1])


def cut(rows):
    """Some rows of the inputs and of the targets."""
    _, _, x, targets = model()
    return x[rows], {name: leaf[rows] for name, leaf in targets.items()}


def squares(y, t):
    return jnp.mean((y - t["values"]) ** 2, axis=-1)


def mean(y, t):
    return jnp.mean(squares(y, t))


def total(y, t):
    return jnp.sum(jnp.where(t["mask"], squares(y, t), 0.0))


def total_and_weight(y, t):
    return total(y, t), jnp.sum(t["mask"])


def quotient(y, t):
    return total(y, t) / jnp.sum(t["mask"])


# What a reduction is given, and the loss that it makes of the whole batch.
REDUCTIONS = {
    "mean": (mean, mean),
    "sum": (total, total),
    "weighted": (total_and_weight, quotient),
}


@functools.cache
def expected(reduction):
    """Loss, gradients and their global norm: the whole batch on one device."""
    layers, params, x, targets = model()
    loss_fn = REDUCTIONS[reduction][1]
    loss, grads = ref.value_and_grad(layers, params, x, targets, loss_fn)
    return loss, grads, optax.tree.norm(grads)


def gradients(reduction, num_microbatches, loss_fn=None, rows=slice(None), **options):
    """What a pipeline of two stages makes of the batch, or of some of its rows."""
    pipe = pipeline(num_microbatches)
    variables = pipe.place([{"params": own} if own else {} for own in model()[1]])
    value_and_grad = pipe.value_and_grad(
        loss_fn or REDUCTIONS[reduction][0], reduction=reduction, **options
    )
    return value_and_grad(variables, *cut(rows))


@pytest.mark.parametrize("num_microbatches", MICROBATCHES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_loss_gradients_and_norm_do_not_depend_on_the_number_of_micro_batches(
    double, reduction, num_microbatches
):
    loss, grads = gradients(reduction, num_microbatches)
    norm = optax.tree.norm(ref.on_host(grads))
    ref.assert_close((loss, grads, norm), expected(reduction), ref.FLOAT64)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_aux_stands_beside_every_reduction_and_changes_none(double, reduction):
    loss_fn = REDUCTIONS[reduction][0]

    def with_aux(y, t):
        return loss_fn(y, t), {"tokens": jnp.sum(t["mask"]), "total": total(y, t)}

    (loss, aux), grads = gradients(reduction, 3, with_aux, has_aux=True)
    ref.assert_close((loss, grads), expected(reduction)[:2], ref.FLOAT64)
    mask = model()[3]["mask"]
    parts = np.split(mask, [4, 8])
    np.testing.assert_array_equal(aux["tokens"], [part.sum() for part in parts])
    assert aux["tokens"][-1] == 0
    np.testing.assert_allclose(jnp.sum(aux["total"]), expected("sum")[0], rtol=1e-12)


def test_a_mean_over_the_tokens_of_each_micro_batch_is_another_loss(double):
    """Why it is refused: padding is not spread evenly. It can be had by saying so."""
    layers, params, *_ = model()
    rows = slice(0, 6)
    with pytest.raises(
        ValueError, match=r"return .total, weight. and type reduction='weighted'"
    ):
        gradients("mean", 2, quotient, rows)

    def by_itself(y, t):
        return len(y) * quotient(y, t), len(y)

    loss, grads = gradients("weighted", 2, by_itself, rows)
    gradient = ref.gradient(layers, quotient)
    parts = [gradient(params, *cut(half)) for half in (slice(0, 3), slice(3, 6))]
    average = jax.tree.map(lambda a, b: (a + b) / 2, *parts)
    ref.assert_close((loss, grads), average, ref.FLOAT64)
    assert abs(float(loss) / float(gradients("weighted", 2, rows=rows)[0]) - 1) > 1e-3


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("select", [False, True])
def test_a_batch_without_any_weight_has_the_gradients_of_one_device(
    double, select, num_microbatches
):
    """None that is finite where a mask multiplies; none at all where it selects."""
    rows = slice(-4, None)
    layers, params, *_ = model()
    assert not cut(rows)[1]["mask"].any()

    def multiplied(y, t):
        return jnp.sum(t["mask"] * squares(y, t)), jnp.sum(t["mask"])

    loss_fn = total_and_weight if select else multiplied

    def whole(y, t):
        total, weight = loss_fn(y, t)
        return total / weight

    found = ref.on_host(gradients("weighted", num_microbatches, loss_fn, rows))
    expected = ref.value_and_grad(layers, params, *cut(rows), whole)
    jax.tree.map(np.testing.assert_array_equal, found, ref.on_host(expected))
    assert np.isnan(found[0])


# The first half of the batch has six examples, the second five, of these four masked.
HALVES = [slice(0, 6), slice(6, None)]


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gradients_of_two_halves_add_up_to_those_of_the_whole(double, reduction):
    """By the share of examples, as they are, or by the share of weight."""
    mask = model()[3]["mask"]
    shares = {
        "mean": [6 / 11, 5 / 11],
        "sum": [1.0, 1.0],
        "weighted": [mask[rows].sum() / mask.sum() for rows in HALVES],
    }[reduction]
    parts = [gradients(reduction, 2, rows=rows) for rows in HALVES]
    loss, grads = jax.tree.map(
        lambda a, b: shares[0] * a + shares[1] * b, *map(ref.on_host, parts)
    )
    ref.assert_close(jnp.asarray(loss), expected(reduction)[0], ref.FLOAT64)
    ref.assert_close(grads, expected(reduction)[1], ref.FLOAT64)


@pytest.mark.parametrize(
    ("reduction", "mean_of_steps"), [("mean", True), ("sum", False)]
)
def test_multi_steps_over_two_halves_take_the_step_of_the_whole(
    double, reduction, mean_of_steps
):
    layers, params, x, _ = model()
    tx = optax.MultiSteps(
        optax.adam(1e-2),
        2,
        use_grad_mean=mean_of_steps,
        accumulator_dtype=jnp.float64,
    )
    pipe = pipeline(2)
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    step = pipe.train_step(REDUCTIONS[reduction][0], tx, reduction=reduction)
    # It weighs its steps alike, so the halves are equal: five and five of ten.
    for rows in (slice(0, 5), slice(5, 10)):
        state, _ = step(state, *cut(rows))
    whole = cut(slice(0, 10))
    _, grads = ref.value_and_grad(layers, params, *whole, REDUCTIONS[reduction][1])
    adam = optax.adam(1e-2)
    updates, _ = adam.update(grads, adam.init(params), params)
    ref.assert_close(state.params, optax.apply_updates(params, updates), ref.FLOAT64)
