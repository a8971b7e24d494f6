"""Cotangents are as large as on one device: what their size decides is the same."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jpipe

from .. import reference as ref
from ..mesh.stages import mesh

BATCH = 12


def with_backward(rule):
    @jax.custom_vjp
    def identity(x):
        return x

    identity.defvjp(lambda x: (x, x), lambda x, ct: (rule(ct, x),))
    return identity


def clipped(ct, _):
    return jnp.clip(ct, -0.05, 0.05)


def penalized(ct, x):
    """Beside it the gradient of an auxiliary loss, a sum over the examples."""
    return ct + 0.01 * x


def cast(ct, _):
    return ct.astype(jnp.bfloat16).astype(ct.dtype)


def in_a_small_range(ct, _):
    """Little of what is below 2**-6 is left."""
    return ct.astype(jnp.float8_e4m3fn).astype(ct.dtype)


def sign(ct, _):
    return 1e-3 * jnp.sign(ct)


KINDS = [clipped, penalized, cast, in_a_small_range, sign]


def layers(rule=clipped):
    first, last = ref.dense(6, jnp.float64), ref.dense(4, jnp.float64)
    return [first, with_backward(rule), jnp.tanh, last]


@functools.cache
def data():
    rng = np.random.default_rng(0)
    x, values = rng.normal(size=(BATCH, 5)), rng.normal(size=(BATCH, 4))
    mask = rng.random((BATCH, 4)) < 0.7
    mask[-3:] = False  # the last micro-batch of four has nothing but padding
    return x, {"values": 3 * values, "mask": mask}


def squares(y, t):
    return (y - t["values"]) ** 2


def total(y, t):
    return jnp.sum(jnp.where(t["mask"], squares(y, t), 0))


def masked(y, t):
    return total(y, t), jnp.sum(t["mask"])


def counted(y, t):
    """Its weight reads outputs; it is zero where all is padding."""
    return total(y, t), jnp.sum(t["mask"] & (y < 1))


def mean(y, t):
    return jnp.mean(squares(y, t))


def quotient(y, t):
    return total(y, t) / jnp.sum(t["mask"])


def compare(pipe, loss_fn, reduction, expected):
    """Asserts that loss and gradients are what is expected of the parameters."""
    x, targets = data()
    variables = pipe.init(jax.random.key(0), x)
    value_and_grad = pipe.value_and_grad(loss_fn, reduction=reduction)
    found = value_and_grad(variables, x, targets)
    params = ref.params_of(variables)
    ref.assert_close(found, expected(params, x, targets), ref.FLOAT64)


def by_hand(model, num_parts):
    """Backward of total / (M weight), then times M weight, and by all weights."""

    def gradient(params, x, t, by):
        return jax.grad(lambda p: total(ref.compose(model, p, x), t) / by)(params)

    def expected(params, x, targets):
        sums, weights, grads = 0.0, 0.0, []
        for own in np.array_split(np.arange(BATCH), num_parts):
            x_m, t_m = jax.tree.map(lambda leaf: leaf[own], (x, targets))  # noqa: B023
            one, weight = counted(ref.compose(model, params, x_m), t_m)
            by = num_parts * float(weight or 1)
            found = gradient(params, x_m, t_m, by)
            grads.append(jax.tree.map(lambda g: g * by, found))  # noqa: B023
            sums, weights = sums + one, weights + float(weight)
        return sums / weights, jax.tree.map(lambda *g: sum(g) / weights, *grads)

    return expected


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize("rule", KINDS)
def test_the_sum_of_weights_that_targets_tell_is_divided_by_first(
    rule, num_microbatches
):
    model = layers(rule)
    expected = ref.gradient(model, quotient)
    pipe = jpipe.pipeline(model, num_microbatches, balance=[2, 2])
    compare(pipe, masked, "weighted", expected)
    compare(jpipe.sequential(model, num_microbatches), masked, "weighted", expected)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("rule", KINDS)
def test_a_weight_that_reads_outputs_is_guessed_by_each_micro_batch(rule):
    model = layers(rule)
    pipe = jpipe.pipeline(model, 4, balance=[2, 2])
    compare(pipe, counted, "weighted", by_hand(model, 4))


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("rule", KINDS)
def test_of_means_and_sums(rule):
    model = layers(rule)
    pipe = jpipe.pipeline(model, 5, balance=[2, 2])  # of three and of two examples
    for loss_fn, reduction in ((mean, "mean"), (total, "sum")):
        compare(pipe, loss_fn, reduction, ref.gradient(model, loss_fn))


@pytest.mark.usefixtures("double")
def test_one_micro_batch_knows_a_weight_that_reads_outputs():
    model = layers()

    def whole(y, t):
        total, weight = counted(y, t)
        return total / weight

    pipe = jpipe.pipeline(model, 1, balance=[2, 2])
    compare(pipe, counted, "weighted", ref.gradient(model, whole))


@pytest.mark.usefixtures("double")
def test_the_weights_of_more_micro_batches_than_one_call_adds():
    model = [ref.dense(1, jnp.float64), with_backward(clipped)]
    x = jnp.linspace(-1, 1, 36).reshape(18, 2)
    t = {"values": x[:, :1], "mask": x[:, :1] < 0.5}
    pipe = jpipe.sequential(model, 17)  # of two examples, and sixteen times of one
    variables = pipe.init(jax.random.key(0), x)
    found = pipe.value_and_grad(masked, reduction="weighted")(variables, x, t)
    params = ref.params_of(variables)
    expected = ref.value_and_grad(model, params, x, t, quotient)
    ref.assert_close(found, expected, ref.FLOAT64)


def in_a_loop(y, t):
    """As a head of many classes sums up its losses, some tokens at a time."""

    def step(sums, part):
        return jax.tree.map(jnp.add, sums, masked(*part)), None

    start = jnp.zeros(()), jnp.zeros((), int)
    parts = y.T, jax.tree.map(jnp.transpose, t)
    return jax.lax.scan(step, start, parts)[0]


@jax.custom_vjp
def by_rule(y, t):
    return masked(y, t)


by_rule.defvjp(
    lambda y, t: (masked(y, t), (y, t)),
    lambda kept, cts: (jax.grad(total)(*kept) * cts[0], None),
)


def with_rule(y, t):
    total, weight = by_rule(y, t)
    return total, jax.lax.stop_gradient(weight)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    "loss_fn", [jax.jit(masked), jax.checkpoint(masked), in_a_loop, with_rule]
)
def test_the_weight_is_found_in_calls_and_loops(loss_fn):
    model = layers()
    pipe = jpipe.pipeline(model, 4, balance=[2, 2])
    compare(pipe, loss_fn, "weighted", ref.gradient(model, quotient))


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("reads_outputs", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "zb_h1"},
        {"schedule": "gpipe", "remat": "full"},
        {"replicas": [1, 2]},
        {"mesh": mesh(2, 2, names=("stage", "data"))},
    ],
    ids=lambda options: next(iter(options)),
)
def test_under_any_schedule_and_on_several_devices(options, reads_outputs):
    model = layers()
    pipe = jpipe.pipeline(model, 5, balance=[2, 2], **options)
    if reads_outputs:
        shards = 2 if "mesh" in options else 1
        compare(pipe, counted, "weighted", by_hand(model, 5 * shards))
    else:
        compare(pipe, masked, "weighted", ref.gradient(model, quotient))


@pytest.mark.usefixtures("double")
def test_a_step_trains_by_them_some_parameters_and_with_aux():
    model, tx = layers(), optax.sgd(1.0)
    x, targets = data()

    def with_aux(y, t):
        return masked(y, t), jnp.sum(t["mask"])

    pipe = jpipe.pipeline(model, 4, balance=[2, 2])
    state = pipe.init_train_state(jax.random.key(0), x, tx, trainable="0/*")
    params = tuple(ref.on_host(own) for own in state.params)
    step = pipe.train_step(
        with_aux, tx, reduction="weighted", has_aux=True, trainable="0/*"
    )
    state, metrics = step(state, x, targets)
    loss, grads = ref.value_and_grad(model, params, x, targets, quotient)
    after = jax.tree.map(jnp.subtract, params[0], grads[0])
    ref.assert_close(state.params, (after, *params[1:]), ref.FLOAT64)
    ref.assert_close(metrics["loss"], loss, ref.FLOAT64)
    assert metrics["aux"][-1] == 0


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_half_precision_under_a_loss_scale_stays_finite(num_microbatches):
    """Of a sum over all tokens the gradient would be infinite."""
    model = [ref.dense(6, jnp.float16), jnp.tanh, ref.dense(4, jnp.float16)]
    rng = np.random.default_rng(0)
    x = rng.normal(size=(256, 5)).astype(np.float16)
    targets = 4 + rng.normal(size=(256, 4)).astype(np.float32)

    def scaled(y, t):
        return 1024 * jnp.sum((y.astype(jnp.float32) - t) ** 2), jnp.float32(t.size)

    def whole(y, t):
        total, weight = scaled(y, t)
        return total / weight

    pipe = jpipe.pipeline(model, num_microbatches, balance=[2, 1])
    variables = pipe.init(jax.random.key(0), x)
    found = pipe.value_and_grad(scaled, reduction="weighted")(variables, x, targets)
    expected = ref.value_and_grad(model, ref.params_of(variables), x, targets, whole)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(expected))
    ref.assert_close(found, expected, 2**-7)
