"""Steps of a model as it is: what they return beside the loss."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import jpipe

from .. import reference as ref

RNG = np.random.default_rng(2)
X, TARGETS = RNG.normal(size=(8, 6)), RNG.normal(size=(8, 3))


class Normed(nn.Module):
    """It writes statistics, and holds a number that is no parameter to train."""

    @nn.compact
    def __call__(self, x, train: bool):
        kind = {"dtype": jnp.float64, "param_dtype": jnp.float64}
        shift = self.param("shift", lambda key: jnp.int32(2))
        x = nn.Dense(8, **kind)(x) + shift
        x = nn.BatchNorm(use_running_average=not train, **kind)(x)
        return nn.Dense(3, **kind)(nn.tanh(x))


def squares(y, targets):
    return jnp.mean((y - targets) ** 2), {"most": jnp.max(jnp.abs(y)), "sum": y.sum()}


def test_a_step_returns_aux_of_a_model_that_writes(double):
    pipe = jpipe.pipeline(Normed(), 1, num_stages=2)
    state = pipe.init_train_state(jax.random.key(0), X, optax.sgd(0.1))
    before = ref.on_host(state.variables)
    y, _ = Normed().apply(before, X, train=True, mutable=["batch_stats"])
    step = pipe.train_step(squares, optax.sgd(0.1), has_aux=True)
    state, metrics = step(state, X, TARGETS)
    loss, aux = squares(y, TARGETS)
    stacked = {name: jnp.stack([value]) for name, value in aux.items()}
    ref.assert_close(metrics, {"loss": loss, "aux": stacked}, ref.FLOAT64)
    assert int(state.step) == 1


def test_integers_have_the_gradient_of_jax_grad(double):
    pipe = jpipe.pipeline(Normed(), 2, num_stages=2)
    variables = pipe.init(jax.random.key(0), X)
    find = pipe.value_and_grad(lambda *given: squares(*given)[0], has_state=True)
    _, grads = find(variables, X, TARGETS)
    assert grads["shift"].dtype == jax.dtypes.float0
    assert jax.tree.structure(grads) == jax.tree.structure(variables["params"])
