"""Changes of nnx modules: by a call, and by users."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jpipe

from .. import reference as ref
from ..errors.model import rows

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


def step(layer):
    tx = optax.sgd(0.1)
    pipe = jpipe.pipeline([layer], 2)
    state = pipe.init_train_state(KEY, X, tx)
    return pipe.train_step(ref.mse, tx)(state, X, jnp.ones_like(X))


class MaxNorm(nnx.Module):
    """Normalizes its weight in place."""

    def __init__(self):
        self.w = nnx.Param(jnp.full((WIDTH, WIDTH), 2.0))

    def __call__(self, x):
        self.w[...] = self.w[...] / jnp.linalg.norm(self.w[...])
        return x @ self.w[...]


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


class SplitsKey(nnx.Module):
    def __init__(self):
        self.key = nnx.Variable(jax.random.key(0))

    def __call__(self, x):
        self.key[...], subkey = jax.random.split(self.key[...])
        return x + jax.random.normal(subkey, x.shape)


class Grows(nnx.Module):
    def __init__(self):
        self.cache = nnx.Cache(jnp.zeros((1, WIDTH)))

    def __call__(self, x):
        self.cache.set_value(jnp.concatenate([self.cache[...], x]))
        return x


class Late(nnx.Module):
    def __call__(self, x):
        self.late = nnx.Param(jnp.ones(3))
        return x


WRITES = "changed by the optimizer alone ... ({}) writes params/inner/w"
CHANGES = {
    ValueError: {
        WRITES.format("Around"): Around(MaxNorm()),
        WRITES.format("Remat"): Remat(MaxNorm()),
        "changes its structure or attributes in training": ActNorm(),
        "its structure or attributes in training": Remat(ActNorm()),
        "random key that is no random stream": SplitsKey(),
        "changes which variables there are, or their shapes ... cache/cache was (1, 3) "
        "and became (3, 3)": Grows(),
        "this Late changes its structure or attributes in training": Late(),
    }
}


@pytest.mark.filterwarnings("ignore:nothing here has parameters")
@pytest.mark.parametrize(("layer", "error", "match"), rows(CHANGES))
def test_call_that_changes_what_it_may_not_raises(layer, error, match):
    with pytest.raises(error, match=match):
        step(layer)


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
