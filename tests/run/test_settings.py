"""What `jax.jit` tells apart beside its arguments, a pipeline tells apart.

`_compat` is imported to see that its two ways to read settings are one.
"""

import importlib

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn

import jpipe
from jpipe import _compat

from .. import reference as ref

OTHER = {
    "x64": lambda: jax.enable_x64(True),
    "matmul precision": lambda: jax.default_matmul_precision("BF16_BF16_F32"),
    "disable_jit": jax.disable_jit,
}


class Traced:
    """Two layers, the second of which counts how often it is traced."""

    def __init__(self):
        self.count = 0
        self.pipe = jpipe.pipeline([ref.dense(4), self.layer], 2)
        self.x, self.targets = ref.regression(4)
        tx = optax.sgd(1e-2)
        self.state = self.pipe.init_train_state(jax.random.key(0), self.x, tx)
        step = self.pipe.train_step(ref.mse, tx, donate=False)
        gradient = self.pipe.value_and_grad(ref.mse)
        variables = self.state.variables
        self.calls = {
            "apply": lambda: self.pipe.apply(variables, self.x),
            "gradient": lambda: gradient(variables, self.x, self.targets),
            "step": lambda: step(self.state, self.x, self.targets),
        }

    def layer(self, x):
        self.count += 1
        return jnp.tanh(x)

    def during(self, call):
        before = self.count
        self.calls[call]()
        return self.count - before


@pytest.fixture(scope="module")
def traced():
    return Traced()


@pytest.mark.parametrize("call", ["apply", "gradient", "step"])
@pytest.mark.parametrize("name", OTHER)
def test_a_program_is_found_by_the_settings_that_it_was_traced_with(name, call, traced):
    traced.calls[call]()
    with OTHER[name]():
        assert traced.during(call)
        assert not traced.during(call)
    assert not traced.during(call)


@pytest.mark.parametrize("name", OTHER)
def test_without_private_names_the_same_settings_are_told_apart(name, monkeypatch):
    config = importlib.import_module("jax._src.config")
    assert _compat.settings_reader() is config.trace_context
    monkeypatch.delattr(config, "trace_context")
    read = _compat.settings_reader()
    before = read()
    with OTHER[name]():
        assert read() == read() != before
    assert read() == before


def scanned(x):
    total, parts = jax.lax.scan(lambda c, row: (c + row, jnp.sin(row)), x[0], x)
    return parts + jax.lax.cond(jnp.isfinite(total.sum()), lambda: 1.0, lambda: 2.0)


def test_without_jit_the_numbers_are_the_same(double):
    def trained():
        layers = [ref.dense(4, jnp.float64), nn.Dropout(0.5), scanned]
        pipe = jpipe.pipeline(layers, 2, schedule="zb_h1", remat="none")
        x = jax.random.normal(jax.random.key(1), (5, 4))
        tx = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1, momentum=0.9))
        state = pipe.init_train_state(jax.random.key(0), x, tx)
        step = pipe.train_step(ref.mse, tx)
        y = pipe.apply(state.variables, x)
        for _ in range(2):
            state, metrics = step(state, x, x)
        return y, state.params, state.opt_state, metrics

    expected = trained()
    with jax.disable_jit():
        found = trained()
    places = [[leaf.device for leaf in jax.tree.leaves(t)] for t in (found, expected)]
    assert places[0] == places[1]
    ref.assert_close(found, expected, ref.FLOAT64)
