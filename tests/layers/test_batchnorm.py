"""Running statistics: those of the whole mini-batch, however it is cut."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from flax.core import FrozenDict

import jpipe

from .. import reference as ref
from .normed import Normed, committed

# Flax keeps running statistics in single precision: an ulp is 1.2e-7. The merged
# ones are rounded once per micro-batch, the reference once.
ULPS = 1e-6


def test_statistics_far_from_zero_are_those_of_the_whole_batch():
    x, targets = ref.regression(14)
    x = x * 5 + 1000  # E[x^2] - E[x]^2 would lose it all here
    pipe = jpipe.pipeline([nn.BatchNorm(momentum=0.5), ref.dense(4)], 4)
    stats = committed(pipe, x, targets, steps=2).model_state[0]["batch_stats"]
    whole = np.asarray(x, np.float64)
    np.testing.assert_allclose(stats["mean"], 0.75 * whole.mean(0), rtol=ULPS)
    # Flax itself takes E[x^2] - E[x]^2 of each micro-batch: at 1000 with a spread of
    # 5 that leaves three digits of the variance within a micro-batch.
    expected = 0.25 + 0.75 * whole.var(0)
    np.testing.assert_allclose(stats["var"], expected, rtol=2e-2)


@pytest.mark.parametrize("shape", [(14, 5), (14, 3, 3, 2)])
@pytest.mark.parametrize("microbatches", [1, 4, 5])
def test_statistics_equal_one_full_batch_step_of_flax(shape, microbatches):
    """Of images too, whose positions count as examples."""
    x = jax.random.normal(jax.random.key(3), shape)
    norm = nn.BatchNorm(momentum=0.9)
    variables = norm.init(jax.random.key(0), x, use_running_average=False)
    _, expected = norm.apply(
        variables, x, use_running_average=False, mutable=["batch_stats"]
    )
    pipe = jpipe.pipeline([norm, lambda x: x.reshape(len(x), -1)], microbatches)
    state = committed(pipe, x, jnp.zeros((14, 1)))
    actual = state.model_state[0]["batch_stats"]
    ref.assert_close(actual, expected["batch_stats"], ULPS)


def test_statistics_of_single_precision_keep_it(double):
    x, targets = ref.regression(8)
    norm = nnx.BatchNorm(5, momentum=0.5, rngs=nnx.Rngs(0))
    for layer in (norm, nn.BatchNorm(momentum=0.5)):
        state = committed(jpipe.pipeline([layer, ref.dense(4)], 2), x, targets)
        mean = state.model_state[0]["batch_stats"]["mean"]
        assert mean.dtype == jnp.float32
        np.testing.assert_allclose(mean, 0.5 * x.mean(0), rtol=1e-5, atol=1e-6)


# What becomes of the statistics is not its subject.
@pytest.mark.filterwarnings("ignore:value_and_grad leaves:UserWarning")
def test_statistics_may_be_in_a_frozen_dictionary():
    x, targets = ref.regression(8)
    pipe = jpipe.sequential([Normed(), ref.dense(4)], 2)
    variables = pipe.init(jax.random.key(0), x)
    frozen = tuple(FrozenDict(entry) for entry in variables)
    expected = pipe.value_and_grad(ref.mse)(variables, x, targets)
    found = pipe.value_and_grad(ref.mse)(frozen, x, targets)
    ref.assert_equal(*(jax.tree.leaves(ref.on_host(v)) for v in (found, expected)))
