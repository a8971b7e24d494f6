"""Variables of nnx that are neither parameters nor what a mean can be taken of."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jpipe

from .. import reference as ref

TX = optax.sgd(0.1)
X, TARGETS = ref.regression(8)


class Prompt(nnx.Variable):
    """A type of the user's own."""


class Prompted(nnx.Module):
    def __init__(self, prompt=Prompt):
        self.linear = nnx.Linear(5, 4, rngs=nnx.Rngs(0))
        self.prompt = prompt(jnp.full(5, 0.3))

    def __call__(self, x):
        return self.linear(x + self.prompt)


@pytest.mark.parametrize("chosen", [nnx.Any(nnx.Param, Prompt), ...])
def test_filter_that_selects_other_variables_is_refused(chosen):
    pipe = jpipe.pipeline([Prompted()], 2)
    with pytest.raises(ValueError, match=r"selects \(0, 'prompt'\), a Prompt") as said:
        pipe.init_train_state(jax.random.key(0), X, TX, trainable=chosen)
    assert "derive the type from it" in str(said.value)


class OwnParam(nnx.Param):
    """A Variable type that derives from nnx.Param is trained."""


def test_filter_of_derived_parameters_trains_them():
    chosen = nnx.Any(nnx.Param, Prompt)
    pipe = jpipe.pipeline([Prompted(OwnParam)], 2)
    state = pipe.init_train_state(jax.random.key(0), X, TX, trainable=chosen)
    state, _ = pipe.train_step(ref.mse, TX, trainable=chosen)(state, X, TARGETS)
    assert np.all(state.params[0]["prompt"] != 0.3)


class Measured(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(5, 4, rngs=nnx.Rngs(0))
        self.average = nnx.metrics.Average("values")

    def __call__(self, x):
        self.average.update(values=jnp.ones(len(x)))
        return self.linear(x)


def test_metrics_are_refused_with_several_micro_batches():
    def trained(num_microbatches):
        pipe = jpipe.pipeline([Measured()], num_microbatches)
        state = pipe.init_train_state(jax.random.key(0), X, TX)
        state, _ = pipe.train_step(ref.mse, TX)(state, X, TARGETS)
        return pipe.modules(state.variables)[0]

    assert float(trained(1).average.compute()) == 1.0
    says = r"updates a metric, .*has_aux=True(.|\n)*metric_state/average/count"
    with pytest.raises(ValueError, match=says):
        trained(2)


def test_variables_that_evaluation_writes_are_named():
    """A cache of keys, from which a call of nnx goes on."""
    attention = nnx.MultiHeadAttention(2, 4, 4, rngs=nnx.Rngs(0), decode=True)
    attention.init_cache((2, 5, 4))
    x = jax.random.normal(jax.random.key(0), (2, 1, 4))
    pipe = jpipe.pipeline([attention], 1)
    variables = pipe.init(jax.random.key(0), x)
    with pytest.warns(UserWarning, match=r"leaves the variables .*") as said:
        y = pipe.apply(variables, x)
    assert "layer 0 (MultiHeadAttention) writes cache/cache_index" in str(said[0])
    (decoding,) = pipe.modules(variables)
    decoding.eval()
    np.testing.assert_allclose(decoding(x), y, rtol=1e-5)
    ahead = nnx.clone(attention)
    ahead(x)
    np.testing.assert_allclose(decoding(2 * x), ahead(2 * x), rtol=1e-5)
