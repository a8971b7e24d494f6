"""Variables in boxes, as `flax.linen.with_partitioning` makes them, and out of them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import jpipe

from .. import reference as ref

# What becomes of the statistics is not its subject.
pytestmark = pytest.mark.filterwarnings("ignore:value_and_grad leaves:UserWarning")

X, TARGETS = np.ones((4, 3), np.float32), np.ones((4, 2), np.float32)
KEY = jax.random.key(0)
TX = optax.adam(0.1)
in_a_box = nn.with_partitioning(nn.initializers.lecun_normal(), ("rows", "columns"))


class Counted(nn.Module):
    """A statistic, in a box or not."""

    boxed: bool

    @nn.compact
    def __call__(self, x, train: bool = False):
        zeros = nn.with_partitioning(jnp.zeros, ("rows",)) if self.boxed else jnp.zeros
        mean = self.variable("batch_stats", "mean", zeros, (x.shape[-1],))
        before = mean.value
        if train:
            mean.value = 0.5 * before + x.mean(0)
        return x - before


def pipeline_of(boxed):
    options = {"kernel_init": in_a_box} if boxed else {}
    return jpipe.pipeline([nn.Dense(4, **options), Counted(boxed), nn.Dense(2)], 2)


def results(pipe, variables):
    """What comes out of a pipeline, and what keeps the structure of variables."""
    loss, grads = pipe.value_and_grad(ref.mse)(variables, X, TARGETS)
    state = pipe.init_train_state(KEY, X, TX, variables=variables)
    step = pipe.train_step(ref.mse, TX)
    for _ in range(2):
        state, metrics = step(pipe.place(state), X, TARGETS)
    return (loss, metrics, state.opt_state), grads, state.variables


@pytest.fixture(scope="module")
def plain():
    pipe = pipeline_of(False)
    return pipe, results(pipe, pipe.init(KEY, X))


@pytest.mark.parametrize("model_is_boxed", [False, True])
def test_boxed_variables_give_the_same_bits_and_stay_boxed(plain, model_is_boxed):
    without, expected = plain
    boxed = pipeline_of(True)
    variables = boxed.init(KEY, X)
    assert isinstance(variables[0]["params"]["kernel"], nn.Partitioned)
    actual = results(boxed if model_is_boxed else without, variables)
    assert jax.tree.structure(actual[2]) == jax.tree.structure(variables)
    params = tuple(entry.get("params", {}) for entry in variables)
    assert jax.tree.structure(actual[1]) == jax.tree.structure(params)
    ref.assert_equal(jax.tree.leaves(actual), jax.tree.leaves(expected))
