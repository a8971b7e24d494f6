"""Benchmarks of what jpipe costs: all sides do the same work; the tables are whole."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn

import jpipe
from benchmarks.experiment import mean_cross_entropy
from benchmarks.overhead import actions, by_hand, first_step

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


@pytest.mark.slow
def test_the_actions_of_each_remat_mode_are_timed():
    layers = [nn.Dense(64), nn.gelu, nn.Dense(16), nn.Dense(16)]
    x = jnp.ones((8 * actions.MICROBATCHES, 16))
    model = actions.Model(layers, [3, 1], x, x, ref.mse)
    figures = actions.measure(model, rounds=1)
    assert list(figures) == list(actions.MODES)
    held = [figures[mode].held_bytes for mode in ("full", "min_cut", "none")]
    assert held == sorted(set(held))
    for own in figures.values():
        assert min(own.forward, own.backward, own.last) > 0
        # The last stage waits for the first forward, the first for the last backward.
        assert own.step >= own.forward + 8 * own.last + own.backward - 1e-9
    assert [row[1] for row in actions.rows("tiny", figures)] == [
        f"`{mode}`" for mode in actions.MODES
    ]


def test_a_first_step_says_what_xla_compiled():
    figures = first_step.first_step("mlp", "hand")
    # A forward, a backward, a last stage, two updates.
    assert figures["programs"] >= 5
    assert figures["compile_s"] > 0
