"""A reduction of a loss: loss and gradients are those of the whole batch at once.

Cotangents have the size that they have on one device, too: a backward pass that is
not linear, such as one that clips, sees the same numbers whatever the micro-batches.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import jpipe

from .. import reference as ref
from ..mesh.stages import mesh
from ..slow import slow

BATCH = 18
RNG = np.random.default_rng(0)
X = RNG.normal(size=(BATCH, 3, 5))
MASK = RNG.random((BATCH, 3)) < 0.6
MASK[-4:] = False  # the last micro-batch, of two examples or more, is padding
TARGETS = {"values": 3 * RNG.normal(size=(BATCH, 3, 4)), "mask": MASK}


@jax.custom_vjp
def clipped(x):
    """In the backward pass neither linear nor without a term of its own."""
    return x


clipped.defvjp(lambda x: (x, x), lambda x, ct: (jnp.clip(ct, -0.05, 0.05) + 1e-2 * x,))
LAYERS = [ref.dense(6, jnp.float64), clipped, jnp.tanh, ref.dense(4, jnp.float64)]


def errors(y, t):
    return jnp.mean((y - t["values"]) ** 2, axis=-1)


def mean(y, t):
    return jnp.mean(errors(y, t))


def mean_of_parts(y, t):
    """Of five micro-batches of four and of three examples."""
    parts = jnp.split(errors(y, t), [4, 8, 12, 15])
    return sum(part.mean() for part in parts) / 5


def total(y, t):
    return jnp.sum(jnp.where(t["mask"], errors(y, t), 0.0))


def masked(y, t):
    return total(y, t), jnp.sum(t["mask"])


def counted(y, t):
    """Its weight reads outputs."""
    return total(y, t), jnp.sum(t["mask"] & (y[..., 0] < 1))


def quotient(loss_fn):
    def whole(y, t):
        total, weight = loss_fn(y, t)
        return total / weight

    return whole


def on_one_device(loss_fn):
    return ref.gradient(LAYERS, loss_fn)


def by_microbatch(num_parts):
    """A weight that reads outputs: gradients of totals are divided by the sum."""

    @jax.jit
    def part(params, x, t):
        one, weight = counted(ref.compose(LAYERS, params, x), t)
        grads = jax.grad(lambda p: total(ref.compose(LAYERS, p, x), t))(params)
        return one, weight, grads

    def expected(params, x, targets):
        rows = np.array_split(np.arange(BATCH), num_parts)
        batches = [jax.tree.map(lambda leaf: leaf[own], (x, targets)) for own in rows]  # noqa: B023
        parts = [part(params, *batch) for batch in batches]
        total, weights, grads = jax.tree.map(lambda *leaves: sum(leaves), *parts)
        return total / weights, jax.tree.map(lambda g: g / weights, grads)

    return expected


WHOLE = on_one_device(quotient(masked))
CASES = {
    "mean": (mean, "mean", 5, on_one_device(mean)),
    "microbatch_mean": (mean, "microbatch_mean", 5, on_one_device(mean_of_parts)),
    "weighted": (masked, "weighted", 5, WHOLE),
    # More of them than one call adds, which are sixteen.
    "weighted, one example each": (masked, "weighted", BATCH, WHOLE),
    "weight of outputs": (counted, "weighted", 4, by_microbatch(4)),
}


def compare(pipe, loss_fn, reduction, expected):
    variables = pipe.init(jax.random.key(0), X)
    found = pipe.value_and_grad(loss_fn, reduction=reduction)(variables, X, TARGETS)
    params = ref.params_of(variables)
    ref.assert_close(found, expected(params, X, TARGETS), ref.FLOAT64)


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_those_of_the_whole_batch(double, case):
    loss_fn, reduction, num_microbatches, expected = CASES[case]
    pipe = jpipe.pipeline(LAYERS, num_microbatches, balance=[2, 2])
    compare(pipe, loss_fn, reduction, expected)


SPLIT = {"schedule": "zb_h1"}
REPLICAS = {"replicas": [1, 2]}
MESH = {"mesh": mesh(2, 2, names=("stage", "data"))}


@pytest.mark.parametrize(
    ("options", "loss_fn"),
    [
        (SPLIT, counted),
        (REPLICAS, counted),
        (MESH, masked),
        slow(SPLIT, masked),
        slow(REPLICAS, masked),
        slow(MESH, counted),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value.__name__,
)
def test_loss_weights_with_a_split_backward_and_on_several_devices(
    double, options, loss_fn
):
    """A sum of weights goes to all of them, before the first backward."""
    pipe = jpipe.pipeline(LAYERS, 5, balance=[2, 2], **options)
    num_parts = 5 * (1 + ("mesh" in options))
    expected = WHOLE if loss_fn is masked else by_microbatch(num_parts)
    compare(pipe, loss_fn, "weighted", expected)


class Gaussian(nn.Module):
    """A mean for each example, and one scale for all."""

    @nn.compact
    def __call__(self, x):
        log_scale = self.param("log_scale", nn.initializers.constant(0.3), ())
        return {"mean": ref.dense(4, jnp.float64)(x), "log_scale": log_scale}


def log_likelihood(y, t):
    squares = jnp.sum((y["mean"] - t) ** 2) * jnp.exp(-2 * y["log_scale"])
    return squares / 2 + t.size * y["log_scale"]  # the last reads no example


@pytest.mark.parametrize("is_list", [True, False])
@pytest.mark.parametrize("reduction", ["sum", "weighted"])
def test_a_summand_that_reads_no_example_counts_in_each_micro_batch(
    double, reduction, is_list
):
    def loss_fn(y, t):
        total = log_likelihood(y, t)
        return total if reduction == "sum" else (total, t.size)

    model, number = ([Gaussian()], None) if is_list else (Gaussian(), 1)
    axes = {"mean": 0, "log_scale": None}
    pipe = jpipe.pipeline(model, 5, num_stages=number, out_axes=axes)
    variables, targets = pipe.init(jax.random.key(0), X), TARGETS["values"]

    def expected(params):
        own = {"params": params[0]} if is_list else {"params": params}
        total = log_likelihood(Gaussian().apply(own, X), targets)
        return total if reduction == "sum" else total / targets.size

    params = ref.params_of(variables) if is_list else variables["params"]
    value_and_grad = pipe.value_and_grad(loss_fn, reduction=reduction)
    found = value_and_grad(variables, X, targets)
    ref.assert_close(found, jax.value_and_grad(expected)(params), ref.FLOAT64)


@pytest.mark.parametrize("selects", [False, True])
def test_a_batch_without_weight_has_the_gradients_of_one_device(double, selects):
    """None that is finite where a mask multiplies; zeros by zero where it selects."""

    def multiplied(y, t):
        return jnp.sum(t["mask"] * errors(y, t)), jnp.sum(t["mask"])

    loss_fn = masked if selects else multiplied
    pipe = jpipe.sequential(LAYERS, 2)
    x, targets = jax.tree.map(lambda leaf: leaf[-4:], (X, TARGETS))
    variables = pipe.init(jax.random.key(0), x)
    found = pipe.value_and_grad(loss_fn, reduction="weighted")(variables, x, targets)
    params = ref.params_of(variables)
    expected = on_one_device(quotient(loss_fn))(params, x, targets)
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)
    assert np.isnan(found[0])


def test_a_weight_with_a_gradient_is_refused_unless_it_is_stopped():
    pipe = jpipe.sequential([ref.dense(4)], 2)
    x, targets = ref.regression(4)
    variables = pipe.init(jax.random.key(0), x)

    def dice(y, t):
        return -2 * jnp.sum(y * t), jnp.sum(jnp.tanh(y) ** 2) + jnp.sum(t**2)

    def stopped(y, t):
        total, weight = dice(y, t)
        return total, jax.lax.stop_gradient(weight)

    with pytest.raises(TypeError, match=r"a gradient.*jax\.lax\.stop_gradient"):
        pipe.value_and_grad(dice, reduction="weighted")(variables, x, targets)
    found = pipe.value_and_grad(stopped, reduction="weighted")
    expected = ref.gradient([ref.dense(4)], quotient(stopped))
    params = ref.params_of(variables)
    actual = found(variables, x, targets)
    ref.assert_close(actual, expected(params, x, targets), ref.FLOAT32)


def test_gradients_in_bfloat16_are_summed_in_single_precision():
    """A thousand equal terms: half of them would be lost."""
    pipes = [jpipe.pipeline([ref.dense(1, jnp.bfloat16)], m) for m in (1, 512)]
    x, targets = jnp.ones((512, 3), jnp.bfloat16), jnp.full((512, 1), 3.0)
    variables = pipes[0].init(jax.random.key(0), x)

    def loss_fn(y, t):
        return jnp.mean((y.astype(jnp.float32) - t) ** 2)

    whole, parts = (
        pipe.value_and_grad(loss_fn)(variables, x, targets)[1] for pipe in pipes
    )
    assert parts[0]["bias"].dtype == jnp.bfloat16
    ref.assert_close(parts, whole, 2**-4)  # XLA sums the batch in bfloat16 too
