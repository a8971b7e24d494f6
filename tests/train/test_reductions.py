"""Means, sums and weighted means of a loss, and its aux."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import jpipe

from .. import reference as ref
from ..listing import gradient_of


class TestReductions:
    def grads(self, loss_fn, microbatches, reduction, **options):
        layers = ref.mlp(jnp.float64)
        x, targets = ref.regression(9, jnp.float64)
        pipe = jpipe.pipeline(layers, microbatches, balance=[3, 3], **options)
        variables = pipe.init(jax.random.key(0), x)
        value = pipe.value_and_grad(loss_fn, reduction=reduction)
        return (
            value(variables, x, targets),
            layers,
            ref.params_of(variables),
            x,
            targets,
        )

    @pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
    def test_sum(self, double, schedule):
        def total(y, t):
            return jnp.sum((y - t) ** 2)

        actual, *model = self.grads(total, 4, "sum", schedule=schedule)
        ref.assert_close(actual, ref.value_and_grad(*model, total), ref.FLOAT64)

    @pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
    def test_weighted_by_a_mask_that_empties_a_microbatch(self, double, schedule):
        def masked(y, t):
            mask = (t[:, :1] > 0.3).astype(y.dtype)
            return jnp.sum(mask * (y - t) ** 2), jnp.sum(mask)

        def whole(y, t):
            total, weight = masked(y, t)
            return total / weight

        # With nine micro-batches of one example some have no weight at all.
        actual, *model = self.grads(masked, 9, "weighted", schedule=schedule)
        ref.assert_close(actual, ref.value_and_grad(*model, whole), ref.FLOAT64)

    @pytest.mark.parametrize("remat", ["full", "none"])
    def test_a_weight_with_a_gradient_is_asked_about(self, double, remat):
        def dice(y, t):
            return -2 * jnp.sum(y * t), jnp.sum(jnp.tanh(y)) + jnp.sum(t)

        def counted(y, t):
            return jnp.sum(y * t), jnp.sum(y > 0) + jnp.sum(jnp.ones_like(y))

        def stopped(y, t):
            total, weight = dice(y, t)
            return total, jax.lax.stop_gradient(weight)

        with pytest.raises(TypeError, match=r"a gradient.*jax\.lax\.stop_gradient"):
            self.grads(dice, 2, "weighted", remat=remat)
        for loss in (counted, stopped):
            self.grads(loss, 2, "weighted", remat=remat)

    @pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
    @pytest.mark.parametrize("remat", ["full", "none"])
    def test_aux_is_stacked_over_microbatches(self, schedule, remat):
        x, targets = ref.regression(8)
        pipe = jpipe.pipeline(
            ref.mlp(), 4, balance=[3, 3], schedule=schedule, remat=remat
        )
        variables = pipe.init(jax.random.key(0), x)

        def with_aux(y, t):
            return ref.mse(y, t), {"y": y, "n": jnp.int32(y.shape[0])}

        value = pipe.value_and_grad(with_aux, has_aux=True)
        (loss, aux), grads = value(variables, x, targets)
        ref.assert_equal(
            (loss, grads), pipe.value_and_grad(ref.mse)(variables, x, targets)
        )
        assert aux["y"].shape == (4, 2, 4)
        np.testing.assert_array_equal(aux["n"], [2, 2, 2, 2])
        y = pipe.apply(variables, x)
        np.testing.assert_allclose(aux["y"].reshape(8, 4), y, rtol=1e-5, atol=1e-6)


def test_half_precision_is_summed_in_single_precision():
    """The gradient of a thousand equal micro-batches is that of one."""
    pipes = [jpipe.pipeline([ref.dense(1, jnp.bfloat16)], m) for m in (1, 512)]
    x = jnp.ones((512, 3), jnp.bfloat16)
    targets = jnp.full((512, 1), 3.0)
    variables = pipes[0].init(jax.random.key(0), x)

    def loss_fn(y, t):
        return jnp.mean((y.astype(jnp.float32) - t) ** 2)

    whole, parts = (
        pipe.value_and_grad(loss_fn)(variables, x, targets)[1] for pipe in pipes
    )
    assert parts[0]["bias"].dtype == jnp.bfloat16
    # XLA sums the batch in bfloat16 too; lost terms would halve the gradient.
    ref.assert_close(parts, whole, 2**-4)


def test_a_forward_alone_makes_no_sums_of_gradients():
    pipe = jpipe.pipeline([ref.dense(4), ref.dense(4)], 2)
    x, _ = ref.regression(4)
    variables = pipe.init(jax.random.key(0), x)
    program = pipe._cache.inference(variables, x, None, False).program
    names = [i.run.function.name for i in program.instructions if i.source is None]
    assert names == ["split", *["forward"] * 4, "join"]


@pytest.mark.parametrize("dtype", ["int32", "bfloat16"])
def test_a_mean_is_kept_in_no_dtype_in_which_it_has_no_place(dtype):
    class Mean(nn.Module):
        @nn.compact
        def __call__(self, x):
            kept = self.variable("stats", "m", lambda: jnp.array(0, dtype))
            if self.is_mutable_collection("stats") and not self.is_initializing():
                kept.value = x.mean()
            return nn.Dense(4)(x)

    pipe = jpipe.pipeline([ref.dense(4), Mean()], 2)
    x, targets = ref.regression(4)
    variables = pipe.init(jax.random.key(0), x)
    message = (
        rf"layer 1 \(Mean\) writes float32 to \['stats'\]\['m'\], which is {dtype}"
    )
    with pytest.raises(ValueError, match=message):
        pipe.value_and_grad(ref.mse)(variables, x, targets)


@pytest.mark.parametrize("reads_outputs", [False, True])
def test_sums_of_a_weighted_loss_are_divided_in_place(reads_outputs):
    pipe = jpipe.pipeline([ref.dense(4), ref.dense(4)], 2)
    x, targets = ref.regression(4)

    def loss(y, t):
        return jnp.sum((y - t) ** 2), jnp.sum((y if reads_outputs else t) < jnp.inf)

    program, leaves = gradient_of(pipe, x, targets, loss=loss, reduction="weighted")
    program.compile()
    given, calls = {}, []

    def observe(instruction, slots):
        if instruction.label == "finish":
            sums = [given[slot] for slot in instruction.donates]
            calls.append((len(sums), all(leaf.is_deleted() for leaf in sums)))
        given.update(
            (slot, slots[slot])
            for slot in instruction.writes
            if slots[slot] is not None
        )

    program(leaves, observe)
    # The loss; and the gradients of a kernel and a bias on each of two devices, unless
    # their backwards divided already, by a sum that the targets tell.
    assert sorted(calls) == [(1, True), *[(2, True)] * 2 * reads_outputs]
    names = [i.run.function.name for i in program.instructions if not i.is_move]
    assert names.count("weights") == (not reads_outputs)
