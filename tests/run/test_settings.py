"""What `jax.jit` tells apart beside its arguments, a pipeline tells apart."""

import contextlib
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import jpipe
from jpipe import _compat
from jpipe._run import _signature

from .. import reference as ref

CONTEXT = jax.make_user_context(1)

OTHER = {
    "x64": lambda: jax.enable_x64(True),
    "matmul precision": lambda: jax.default_matmul_precision("BF16_BF16_F32"),
    "dtype promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "rank promotion": lambda: jax.numpy_rank_promotion("warn"),
    "threefry": lambda: jax.threefry_partitionable(False),
    "user context": lambda: CONTEXT(2),
    "disable_jit": jax.disable_jit,
}
SAME = {
    "nothing": contextlib.nullcontext,
    "another default, the same value": lambda: jax.enable_x64(False),
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


@pytest.mark.parametrize("call", ["apply", "gradient", "step"])
@pytest.mark.parametrize("name", SAME)
def test_what_no_program_depends_on_traces_none(name, call, traced):
    traced.calls[call]()
    with SAME[name]():
        assert not traced.during(call)


@pytest.mark.parametrize("name", [*OTHER, *SAME])
def test_the_public_way_tells_the_same_settings_apart(name, monkeypatch):
    monkeypatch.delattr(importlib.import_module("jax._src.config"), "trace_context")
    read = _compat.settings_reader()
    assert read is not _signature._of_traces
    before = read()
    assert read() == before
    with {**OTHER, **SAME}[name]():
        assert (read() != before) == (name in OTHER)
        assert read() == read()
    assert read() == before


def test_a_private_name_that_tells_nothing_is_not_used(monkeypatch):
    config = importlib.import_module("jax._src.config")
    assert _compat.settings_reader() is config.trace_context
    monkeypatch.setattr(config, "trace_context", lambda: ())
    assert _compat.settings_reader()() != ()


def test_double_precision_is_that_of_the_call():
    """The same float32 arrays, and a layer that asks for the default float."""

    def default(x):
        return x + jnp.linspace(0.0, 1.0, 4).astype(float) / 3

    layers = [ref.dense(4), default]
    pipe = jpipe.pipeline(layers, 2)
    x, targets = ref.regression(4)
    tx = optax.sgd(0.1)
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    step = pipe.train_step(ref.mse, tx, donate=False)
    params = ref.params_of(state.variables)
    for wide in (False, True, False):
        with jax.enable_x64(wide):
            y = pipe.apply(state.variables, x)
            assert y.dtype == (jnp.float64 if wide else jnp.float32)
            _, metrics = step(state, x, targets)
            loss, _ = ref.value_and_grad(layers, params, x, targets)
            assert metrics["loss"].dtype == loss.dtype
            np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)


def test_strict_promotion_is_as_strict_in_a_second_call():
    class Mixed(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(4)(x) * jnp.ones(4, jnp.bfloat16)

    pipe = jpipe.pipeline([Mixed(), ref.dense(4)], 2)
    x, _ = ref.regression(4)
    variables = pipe.init(jax.random.key(0), x)
    pipe.apply(variables, x)
    strict = jax.numpy_dtype_promotion("strict")
    with strict, pytest.raises(Exception, match="no available implicit dtype"):
        pipe.apply(variables, x)
    pipe.apply(variables, x)


class Dropped(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dropout(0.5, deterministic=not train)(x)


def scanned(x):
    total, parts = jax.lax.scan(lambda c, row: (c + row, jnp.sin(row)), x[0], x)
    return parts + jax.lax.cond(jnp.isfinite(total.sum()), lambda: 1.0, lambda: 2.0)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_without_jit_the_numbers_are_the_same(double, schedule):
    def trained():
        layers = [ref.dense(4, jnp.float64), Dropped(), scanned]
        pipe = jpipe.pipeline(layers, 2, schedule=schedule, remat="none")
        x = jax.random.normal(jax.random.key(1), (5, 4))
        tx = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1, momentum=0.9))
        state = pipe.init_train_state(jax.random.key(0), x, tx)
        rngs = {"dropout": jax.random.key(2)}
        y = pipe.apply(state.variables, x)
        value = pipe.value_and_grad(ref.mse)(state.variables, x, x, rngs=rngs)
        step = pipe.train_step(ref.mse, tx)
        for _ in range(2):
            state, metrics = step(state, x, x)
        return y, value, state.params, state.model_state, state.opt_state, metrics

    expected = trained()
    with jax.disable_jit():
        found = trained()
    places = [[leaf.device for leaf in jax.tree.leaves(t)] for t in (found, expected)]
    assert places[0] == places[1]
    ref.assert_close(found, expected, ref.FLOAT64)


def test_a_profile_is_taken_under_any_setting(traced):
    batch = traced.x, traced.targets
    for setting in OTHER.values():
        with setting():
            assert traced.pipe.profile_step(traced.state, batch, ref.mse).makespan > 0
