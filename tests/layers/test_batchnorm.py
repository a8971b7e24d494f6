"""Running statistics: those of the whole mini-batch, however it is cut."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jpipe

from .. import reference as ref
from .normed import Normed, committed

# Flax keeps running statistics in single precision: an ulp is 1.2e-7. The merged
# ones are rounded once per micro-batch, the reference once.
ULPS = 1e-6


def layers():
    return [
        nn.BatchNorm(momentum=0.5),
        Normed(),
        jnp.tanh,
        Normed(0.99),
        ref.dense(4),
    ]


def by_hand(state, x, parts, steps):
    """Statistics in double precision; each micro-batch is normalized by itself."""
    params = ref.params_of(state.variables)
    stats = {}

    def normed(name, momentum, batches, width):
        whole = np.concatenate(batches)
        mean, var = np.zeros(width), np.ones(width)
        for _ in range(steps):
            mean = momentum * mean + (1 - momentum) * whole.mean(0)
            var = momentum * var + (1 - momentum) * whole.var(0)
        stats[name] = mean, var
        return [(b - b.mean(0)) / np.sqrt(b.var(0) + 1e-5) for b in batches]

    def scaled(p, batches):
        return [b * p["scale"] + p["bias"] for b in batches]

    def dense(p, batches):
        return [3 * (b @ p["kernel"] + p["bias"]) + 100 for b in batches]

    batches = [np.asarray(b, np.float64) for b in np.split(x, parts)]
    batches = scaled(params[0], normed(0, 0.5, batches, x.shape[1]))
    for number, momentum in ((1, 0.9), (3, 0.99)):
        batches = dense(params[number]["Dense_0"], batches)
        batches = normed(number, momentum, batches, 6)
        batches = [np.tanh(b) for b in scaled(params[number]["norm"], batches)]
    return stats


@pytest.mark.parametrize(
    ("schedule", "remat"), [("1f1b", "full"), ("gpipe", "none"), ("zb_h1", "min_cut")]
)
def test_statistics_are_those_of_the_whole_batch(schedule, remat):
    x, targets = ref.regression(14)
    x = x * 5 + 1000  # E[x^2] - E[x]^2 would lose it all here
    pipe = jpipe.pipeline(
        layers(), 4, balance=[2, 2, 1], schedule=schedule, remat=remat
    )
    state = committed(pipe, x, targets, steps=2)
    expected = by_hand(state, np.asarray(x), [4, 8, 11], steps=2)
    mean, var = (state.model_state[0]["batch_stats"][n] for n in ("mean", "var"))
    np.testing.assert_allclose(mean, expected[0][0], rtol=ULPS)
    # Flax itself takes E[x^2] - E[x]^2 of each micro-batch: at 1000 with a spread of
    # 5 that leaves three digits of the variance within a micro-batch.
    np.testing.assert_allclose(var, expected[0][1], rtol=2e-2)
    for number in (1, 3):
        own = state.model_state[number]["batch_stats"]["norm"]
        np.testing.assert_allclose(own["mean"], expected[number][0], rtol=1e-4)
        np.testing.assert_allclose(own["var"], expected[number][1], rtol=2e-2)


def test_statistics_equal_one_full_batch_step_of_flax():
    # The first layer sees the batch itself: Flax on the whole batch is the reference.
    x, targets = ref.regression(14)
    norm = nn.BatchNorm(momentum=0.9)
    variables = norm.init(jax.random.key(0), x, use_running_average=False)
    _, expected = norm.apply(
        variables, x, use_running_average=False, mutable=["batch_stats"]
    )
    for microbatches in (1, 4, 5):
        pipe = jpipe.pipeline([norm, ref.dense(4)], microbatches)
        state = committed(pipe, x, targets)
        actual = state.model_state[0]["batch_stats"]
        ref.assert_close(actual, expected["batch_stats"], ULPS)


def test_variance_between_micro_batches_counts():
    # Two micro-batches without any variance within, and all of it between them.
    x = jnp.concatenate([jnp.zeros((4, 3)), jnp.ones((4, 3))])
    pipe = jpipe.pipeline([nn.BatchNorm(momentum=0.0), ref.dense(4)], 2)
    state = committed(pipe, x, jnp.zeros((8, 4)))
    stats = state.model_state[0]["batch_stats"]
    np.testing.assert_allclose(stats["mean"], 0.5, rtol=ULPS)
    np.testing.assert_allclose(stats["var"], 0.25, rtol=ULPS)


def test_convolutions_count_positions_as_examples():
    x = jax.random.normal(jax.random.key(3), (6, 5, 5, 2))
    norm = nn.BatchNorm(momentum=0.8)
    variables = norm.init(jax.random.key(0), x, use_running_average=False)
    _, expected = norm.apply(
        variables, x, use_running_average=False, mutable=["batch_stats"]
    )
    pipe = jpipe.pipeline([norm, lambda x: x.mean((1, 2))], 4)
    state = committed(pipe, x, jnp.zeros((6, 2)))
    actual = state.model_state[0]["batch_stats"]
    ref.assert_close(actual, expected["batch_stats"], ULPS)


def test_evaluation_changes_no_statistics():
    x, targets = ref.regression(8)
    pipe = jpipe.pipeline(layers(), 2, balance=[2, 3])
    state = committed(pipe, x, targets)
    before = ref.on_host(state.model_state)
    first = pipe.apply(state.variables, x)
    np.testing.assert_array_equal(first, pipe.apply(state.variables, x))
    ref.assert_equal(state.model_state, before)


# What becomes of the statistics is not its subject.
@pytest.mark.filterwarnings("ignore:(value_and_grad|apply) leaves:UserWarning")
def test_gradients_are_those_of_norms_per_microbatch(double):
    class Double(nn.Module):
        @nn.compact
        def __call__(self, x, train: bool):
            return nn.BatchNorm(not train, dtype=jnp.float64, param_dtype=jnp.float64)(
                x
            )

    model = [Double(), ref.dense(4, jnp.float64)]
    x, targets = ref.regression(6, jnp.float64)
    pipe = jpipe.pipeline(model, 2)
    variables = pipe.init(jax.random.key(0), x)
    value = pipe.value_and_grad(ref.mse)(variables, x, targets)

    def loss(params):
        def one(x):
            mean, var = x.mean(0), x.var(0)
            own = params[0]["BatchNorm_0"]
            x = (x - mean) / jnp.sqrt(var + 1e-5) * own["scale"] + own["bias"]
            return x @ params[1]["kernel"] + params[1]["bias"]

        y = jnp.concatenate([one(part) for part in jnp.split(x, 2)])
        return ref.mse(y, targets)

    expected = jax.value_and_grad(loss)(ref.params_of(variables))
    ref.assert_close(value, expected, 1e-10)  # E[x^2] - E[x]^2 against the variance


def test_statistics_of_nnx_are_those_of_the_whole_batch():
    x, targets = ref.regression(14)
    norm = nnx.BatchNorm(5, momentum=0.9, rngs=nnx.Rngs(0))
    dense = nnx.Linear(5, 4, rngs=nnx.Rngs(1))
    pipe = jpipe.pipeline([norm, dense], 4)
    state = committed(pipe, x, targets)
    stats = state.model_state[0]["batch_stats"]
    np.testing.assert_allclose(stats["mean"], 0.1 * x.mean(0), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(stats["var"], 0.9 + 0.1 * x.var(0), rtol=ULPS)
    assert norm.momentum == 0.9
    (back, _) = pipe.modules(state.variables)
    assert back.momentum == 0.9
    np.testing.assert_array_equal(back.mean[...], stats["mean"])


def test_statistics_of_single_precision_keep_it(double):
    x, targets = ref.regression(8)
    norm = nnx.BatchNorm(5, momentum=0.5, rngs=nnx.Rngs(0))
    for layer in (norm, nn.BatchNorm(momentum=0.5)):
        state = committed(jpipe.pipeline([layer, ref.dense(4)], 2), x, targets)
        mean = state.model_state[0]["batch_stats"]["mean"]
        assert mean.dtype == jnp.float32
        np.testing.assert_allclose(mean, 0.5 * x.mean(0), rtol=1e-5, atol=1e-6)


def test_statistics_in_half_precision_are_refused():
    x, targets = ref.regression(8)
    tx = optax.sgd(0.1)
    pipe = jpipe.pipeline([Normed(), ref.dense(4)], 2)
    variables = pipe.init(jax.random.key(0), x)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), variables)
    state = pipe.init_train_state(jax.random.key(0), x, tx, variables=half)
    with pytest.raises(
        ValueError, match=r"writes float32 .* is bfloat16.*the parameters alone"
    ):
        pipe.train_step(ref.mse, tx)(state, x, targets)
