"""Steps of a model as it is: what they return beside the loss."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import errors
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


class HeadsDropped(nn.Module):
    """Dropout lifted over heads, which sees the streams that it splits and no other."""

    @nn.compact
    def __call__(self, x, train: bool):
        kind = {"dtype": jnp.float64, "param_dtype": jnp.float64}
        heads = nn.Dense(8, **kind)(x).reshape(-1, 2, 4)
        axes = {"in_axes": 1, "out_axes": 1, "variable_axes": {}}
        lifted: Any = nn.vmap(nn.Dropout, split_rngs={"dropout": True}, **axes)
        heads = lifted(0.5, deterministic=not train)(heads)
        return nn.Dense(3, **kind)(heads.reshape(-1, 8))


def test_steps_draw_from_the_streams_that_a_state_was_given(double, tmp_path):
    pipe = jpipe.pipeline(HeadsDropped(), 2, num_stages=2)
    tx, key = optax.sgd(0.1), jax.random.key(7)
    rngs = {"dropout": key}
    state = pipe.init_train_state(jax.random.key(0), X, tx, rngs=rngs)
    step = pipe.train_step(ref.mse, tx)
    params: Any = ref.on_host(state.params)
    for number in range(3):

        def loss(params, number=number):
            drawn = jax.random.fold_in(key, number)
            parts = [
                HeadsDropped().apply(
                    {"params": params},
                    x,
                    train=True,
                    rngs={"dropout": jpipe.microbatch_key(drawn, m)},
                )
                for m, x in enumerate(np.split(X, 2))
            ]
            return ref.mse(jnp.concatenate(parts), TARGETS)

        expected, grads = jax.value_and_grad(loss)(params)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        if number == 2:  # also from a file, and in place again
            jpipe.checkpoint.save(tmp_path / "state", state)
            state = pipe.place(jpipe.checkpoint.restore(tmp_path / "state", state))
        state, metrics = step(state, X, TARGETS)
        ref.assert_close(metrics["loss"], expected, ref.FLOAT64)
    ref.assert_close(state.params, params, ref.FLOAT64)
    assert state.rng.keys() == {"dropout"}


def test_a_state_takes_keys_alone(double):
    pipe = jpipe.pipeline(HeadsDropped(), 2, num_stages=2)
    with pytest.raises(TypeError, match=r"rngs\['dropout'\] is 3; needs a random key"):
        pipe.init_train_state(jax.random.key(0), X, optax.sgd(0.1), rngs={"dropout": 3})
    step = pipe.train_step(ref.mse, optax.sgd(0.1))
    state = pipe.init_train_state(jax.random.key(0), X, optax.sgd(0.1))
    with pytest.raises(errors.InvalidRngError) as refusal:
        step(state, X, TARGETS)
    (note,) = (n for n in refusal.value.__notes__ if n.startswith("give a key for"))
    assert "pipe.init_train_state(key, x, tx, rngs=...)" in note
