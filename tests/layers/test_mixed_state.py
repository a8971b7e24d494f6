"""Layers that write what is no mean over the examples are told, and no others."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn

import jpipe

from .. import reference as ref
from .test_mixed import KEY, PARTS, SAID, WIDTH, batch, mse_of, trained


class OwnNorm(nn.Module):
    """A batch norm that somebody wrote."""

    @nn.compact
    def __call__(self, x, train):
        mean = self.variable("batch_stats", "mean", jnp.zeros, x.shape[-1])
        var = self.variable("batch_stats", "var", jnp.ones, x.shape[-1])
        if not train:
            return (x - mean.value) / jnp.sqrt(var.value + 1e-5)
        new = x.mean((0, 1)), x.var((0, 1))
        if not self.is_initializing():
            mean.value = 0.9 * mean.value + 0.1 * new[0]
            var.value = 0.9 * var.value + 0.1 * new[1]
        return (x - new[0]) / jnp.sqrt(new[1] + 1e-5)


def test_an_own_batch_norm_is_told_in_training_with_what_it_writes():
    with pytest.warns(UserWarning, match=SAID) as caught:
        trained(mse_of(OwnNorm()))
    message = str(caught[0].message)
    assert "layer 1 (OwnNorm)" in message
    assert "writes batch_stats/var, which" in message
    assert "batch_stats/mean" not in message
    x = batch()
    pipe = jpipe.sequential(mse_of(OwnNorm()), PARTS)
    variables = pipe.init(KEY, x)
    pipe.value_and_grad(ref.mse)(variables, x, x, train=False)


class Codebook(nn.Module):
    """Counts how often each code is chosen."""

    as_mean: bool

    @nn.compact
    def __call__(self, x, train):
        counts = self.variable("codes", "counts", jnp.ones, WIDTH)
        chosen = jax.nn.one_hot(jnp.argmax(x, -1), WIDTH)
        if train and not self.is_initializing():
            new = chosen.mean((0, 1)) if self.as_mean else chosen.sum((0, 1))
            counts.value = 0.9 * counts.value + 0.1 * new
        return x


def test_a_running_sum_is_told_and_a_running_mean_is_not():
    with pytest.warns(UserWarning, match=r"writes codes/counts, which adds what grows"):
        trained(mse_of(Codebook(False)))
    trained(mse_of(Codebook(True)))


class Redrawn(nn.Module):
    """Random features, drawn anew in each step."""

    @nn.compact
    def __call__(self, x, train):
        features = self.variable("drawn", "features", jnp.ones, (WIDTH, WIDTH))
        if train and not self.is_initializing():
            features.value = jax.random.normal(
                self.make_rng("features"), (WIDTH, WIDTH)
            )
        return jnp.cos(x @ features.value)


def test_what_each_micro_batch_draws_to_keep_is_told():
    """The mean of several draws is no such draw."""
    says = r"writes drawn/features, which is drawn anew for each micro-batch, and kept"
    x, tx = batch(), optax.sgd(0.1)
    pipe = jpipe.sequential(mse_of(Redrawn()), PARTS)
    with pytest.warns(UserWarning, match=says):
        pipe.train_step(ref.mse, tx)(pipe.init_train_state(KEY, x, tx), x, x)


class Range(nn.Module):
    """How large its input may be, as a quantized layer knows."""

    @nn.compact
    def __call__(self, x, train):
        most = self.variable("range", "most", jnp.ones, ())
        if train and not self.is_initializing():
            most.value = jnp.maximum(0.9 * most.value, jnp.abs(x).max())
        return x


def test_a_largest_value_that_is_kept_is_told():
    with pytest.warns(UserWarning, match=r"writes range/most, which takes the largest"):
        trained(mse_of(Range()))


@pytest.mark.parametrize(
    "update",
    [
        lambda before, x: before + 0.1 * jnp.sign(x.mean(0)),
        lambda before, x: jnp.where((x > 1).any(0), 0, before + 1),
        lambda before, x: before.at[jnp.argmax(x.mean(0))].add(1),
        lambda before, x: jax.lax.cond(
            x.mean() > 0, lambda: before + 1, lambda: before
        ),
    ],
)
def test_a_step_that_is_taken_by_all_examples_is_told(update):
    class Steps(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            steps = self.variable("steps", "count", jnp.zeros, x.shape[1:])
            if train and not self.is_initializing():
                steps.value = update(steps.value, x)
            return x

    x = jax.random.normal(KEY, (8, 4))
    tx = optax.sgd(0.1)
    pipe = jpipe.sequential([nn.Dense(4), Steps()], 2)
    state = pipe.init_train_state(KEY, x, tx)
    with pytest.warns(UserWarning, match=r"layer 1 \(Steps\) writes steps/count, wh"):
        pipe.train_step(ref.mse, tx)(state, x, x)
