"""Benchmarks of what jpipe costs: all sides do the same work; the tables are whole."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn

import jpipe
from benchmarks.experiment import mean_cross_entropy
from benchmarks.overhead import by_hand

from .. import reference as ref


@pytest.mark.slow
@pytest.mark.parametrize("name", by_hand.STEPS)
def test_steps_by_hand_do_what_jpipe_does(name):
    layers = [nn.Dense(16), nn.relu, nn.Dense(10)]
    x, targets = jax.random.normal(jax.random.key(1), (16, 8)), jnp.arange(16) % 10
    tx = optax.sgd(0.1, momentum=0.9)
    pipe = jpipe.sequential(layers, 8)
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    step = pipe.train_step(mean_cross_entropy, tx)
    params = jax.tree.map(jnp.array, state.params)
    opt_state = tx.init(params)
    run = by_hand.STEPS[name](layers, tx, 8)
    for _ in range(2):
        state, metrics = step(state, x, targets)
        params, opt_state, loss = run(params, opt_state, x, targets)
        ref.assert_close(loss, metrics["loss"], 1e-5)
    ref.assert_close(params, state.params, 1e-5)
