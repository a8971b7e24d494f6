"""What a call of an nnx module may change, and what users may change of it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jpipe

from .. import reference as ref

KEY, WIDTH = jax.random.key(0), 3
X = np.random.default_rng(0).normal(size=(4, WIDTH))


def linear(seed=0):
    return nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(seed), param_dtype=float)


class Around(nnx.Module):
    """Calls another module."""

    def __init__(self, inner):
        self.inner = inner

    def __call__(self, x):
        return self.inner(x)


class Remat(Around):
    @nnx.remat
    def __call__(self, x):
        return self.inner(x)


def step(layer, microbatches=2):
    tx = optax.sgd(0.1)
    pipe = jpipe.pipeline([layer], microbatches)
    state = pipe.init_train_state(KEY, X, tx)
    return pipe.train_step(ref.mse, tx)(state, X, jnp.ones_like(X))


class MaxNorm(nnx.Module):
    """Normalizes its weight in place."""

    def __init__(self):
        self.w = nnx.Param(jnp.full((WIDTH, WIDTH), 2.0))

    def __call__(self, x):
        self.w[...] = self.w[...] / jnp.linalg.norm(self.w[...])
        return x @ self.w[...]


@pytest.mark.parametrize("wrap", [Around, Remat])
def test_call_that_writes_a_parameter_raises(wrap):
    match = (
        rf"(?s)changed by the optimizer alone.*{wrap.__name__}. writes params/inner/w"
    )
    with pytest.raises(ValueError, match=match):
        step(wrap(MaxNorm()))


class ActNorm(nnx.Module):
    """Makes its parameters of the first data that it sees."""

    def __init__(self):
        self.shift = nnx.BatchStat(jnp.zeros(WIDTH))
        self.initialized = False

    def __call__(self, x):
        if not self.initialized:
            self.shift[...] = -x.mean(0)
            self.initialized = True
        return x + self.shift[...]


@pytest.mark.parametrize("wrap", [lambda layer: layer, Remat])
def test_call_that_changes_attributes_raises(wrap):
    with pytest.raises(
        ValueError, match="changes its structure or attributes in training"
    ):
        step(wrap(ActNorm()))


class SplitsKey(nnx.Module):
    def __init__(self):
        self.key = nnx.Variable(jax.random.key(0))

    def __call__(self, x):
        self.key[...], own = jax.random.split(self.key[...])
        return x + jax.random.normal(own, x.shape)


def test_call_that_splits_a_key_of_its_own_raises():
    with pytest.raises(ValueError, match="random key that is no random stream"):
        step(SplitsKey())


# ------------------------------------------------- what users change between builds


class Scaled(nnx.Module):
    def __init__(self):
        self.norm = nnx.BatchNorm(WIDTH, rngs=nnx.Rngs(0))
        self.drop = nnx.Dropout(0.0, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.drop(self.norm(x))


def replace(module):
    module.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("change", [lambda module: module.norm.eval(), replace])
def test_module_changed_after_the_pipeline_was_made_raises_at_the_next_build(change):
    module, tx = Scaled(), optax.sgd(0.1)
    pipe = jpipe.pipeline([module, linear()], 2)
    state = pipe.init_train_state(KEY, X, tx)
    state, _ = pipe.train_step(ref.mse, tx)(state, X, jnp.ones_like(X))
    change(module)
    builds = (
        lambda: pipe.init(KEY, X),
        lambda: pipe.train_step(ref.mse, tx)(state, X, jnp.ones_like(X)),
        lambda: pipe.value_and_grad(ref.mse),
        lambda: pipe.modules(state.variables),
    )
    for build in builds:
        with pytest.raises(ValueError, match=r"layer 0 .Scaled. was changed after"):
            build()
