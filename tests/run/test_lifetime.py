"""What keeps a pipeline alive: who holds it, and nothing else."""

import gc
import weakref

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jpipe

from .. import reference as ref


def layers():
    norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
    return [nn.Dense(4), nn.LayerNorm(), nnx.Linear(4, 4, rngs=nnx.Rngs(0)), norm]


def used():
    """Makes a pipeline, does with it all that there is, and drops it."""
    pipe, tx, x = jpipe.pipeline(layers(), 2), optax.adam(0.1), jnp.ones((4, 4))
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    step = pipe.train_step(ref.mse, tx)
    for _ in range(2):
        state, _ = step(state, x, x)
    pipe.value_and_grad(ref.mse)(state.variables, x, x)
    pipe.apply(state.variables, x)
    pipe.optimizer(tx).init(state.params)
    pipe.jit(lambda params: jax.tree.map(jnp.sin, params))(state.params)
    str(pipe)
    leaf = jax.tree.leaves(state.params)[0]
    held = {"pipe": pipe, "step": step, "leaf": leaf}
    return {name: weakref.ref(value) for name, value in held.items()}


# What becomes of the statistics is not its subject.
@pytest.mark.filterwarnings("ignore:value_and_grad leaves:UserWarning")
def test_a_pipeline_that_is_dropped_is_gone_at_once():
    gc.collect()
    gc.disable()
    try:
        found = used()
        assert [name for name, held in found.items() if held() is not None] == []
    finally:
        gc.enable()
