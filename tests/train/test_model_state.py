"""Collections beside the parameters: what a step makes of them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import jpipe

from .. import reference as ref


class Previous(nn.Module):
    """Keeps in one variable what another was."""

    @nn.compact
    def __call__(self, x):
        now = self.variable("memory", "now", lambda: jnp.float32(0))
        before = self.variable("memory", "before", lambda: jnp.float32(-5))
        if self.is_mutable_collection("memory"):
            before.value = now.value
            now.value = now.value + 1
        return ref.dense(4)(x)


def test_a_variable_may_take_the_value_of_another():
    pipe = jpipe.pipeline([Previous(), jnp.tanh], 2)
    x, targets = ref.regression(4)
    tx = optax.sgd(0.0)
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    made = ref.on_host(state.model_state[0]["memory"])
    state, _ = pipe.train_step(ref.mse, tx)(state, x, targets)
    memory = ref.on_host(state.model_state[0]["memory"])
    assert memory["before"] == made["now"]
    assert memory["now"] == made["now"] + 1


class Last(nn.Module):
    """Keeps the first number of the micro-batch that it saw last, as an integer."""

    @nn.compact
    def __call__(self, x):
        seen = self.variable("memory", "seen", lambda: jnp.int32(-1))
        if self.is_mutable_collection("memory") and not self.is_initializing():
            seen.value = x[0, 0].astype(jnp.int32)
        return nn.Dense(1)(x)


@pytest.mark.parametrize("remat", ["full", "none", "except_last"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_an_integer_is_what_the_last_microbatch_makes_of_it(schedule, remat):
    x, tx = jnp.arange(4.0)[:, None], optax.sgd(0.0)
    layers = [jnp.positive, Last()]
    pipe = jpipe.pipeline(layers, 4, schedule=schedule, remat=remat)
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    state, metrics = pipe.train_step(ref.mse, tx)(state, x, x)
    assert state.model_state[1]["memory"]["seen"] == 3
    twin = jpipe.sequential(layers)
    other = twin.init_train_state(jax.random.key(0), x, tx)
    _, expected = twin.train_step(ref.mse, tx)(other, x, x)
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-6)
