"""Flax nnx modules as layers: every leaf, against plain nnx on one device."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jpipe

from .. import reference as ref
from .nnx_modules import KEY, Noisy, batch_norm


class Scale(nnx.Variable):
    """A variable type of the user's own, of two words."""


class CallCount(nnx.Variable):
    """Another, with integers."""


class Block(nnx.Module):
    """Parameters in lists and dicts, one shared inside, and other collections."""

    def __init__(self, width, rngs):
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.linear = nnx.Linear(width, width, rngs=rngs)
        self.again = self.linear
        self.no_bias = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        gains = jax.random.normal(rngs.params(), (2, width))
        self.gains = nnx.List([nnx.Param(gains[0]), nnx.Param(gains[1])])
        self.shifts = nnx.Dict({"a": nnx.Param(gains[0] / 2)})
        self.scale = Scale(jnp.full(width, 0.5))
        self.table = jnp.arange(width) / width

    def __call__(self, x):
        h = self.again(jnp.tanh(self.linear(self.norm(x))))
        for gain in self.gains:
            h = h * gain[...]
        h = self.no_bias(h + self.shifts["a"][...]) * self.scale[...]
        return x + h + self.table


class Mixed(nnx.Module):
    """A parameter of integers, and counts of calls."""

    def __init__(self, width, dtype):
        self.order = nnx.Param(jnp.arange(width)[::-1])
        self.weight = nnx.Param(jnp.linspace(0.5, 2, width, dtype=dtype))
        self.calls = CallCount(jnp.int32(0))
        self.mean_square = Scale(jnp.zeros((), dtype))

    def __call__(self, x):
        self.calls[...] += 1
        self.mean_square[...] = jnp.mean(x**2)
        return x[:, self.order[...]] * self.weight[...]


def snapshot(modules):
    """All that a module holds, on the host, with its static attributes."""
    return [
        (str(nnx.graphdef(m)), ref.on_host(nnx.to_pure_dict(nnx.state(m))))
        for m in modules
    ]


def assert_untouched(modules, before):
    for (graph, values), (old_graph, old) in zip(
        snapshot(modules), before, strict=True
    ):
        assert graph == old_graph
        ref.assert_equal(values, old)


def test_variables_are_grouped_by_type():
    class Special(nnx.Param):
        pass

    class HTTPCache(nnx.Variable):
        pass

    class Everything(nnx.Module):
        def __init__(self, rngs):
            self.special = Special(jnp.ones(2))
            self.http = HTTPCache({"a": jnp.ones(3), "b": (jnp.zeros(1, bool),)})
            self.norm = nnx.BatchNorm(2, rngs=rngs)
            self.number = nnx.Param(1.0)
            self.cache = nnx.Cache(jnp.zeros(2, jnp.int32))
            self.rngs = rngs
            self.block = Block(2, rngs)
            self.old = nnx.Intermediate(jnp.ones(7))

        def __call__(self, x):
            return x

    pipe = jpipe.pipeline([Everything(nnx.Rngs(0))], 1)
    (variables,) = pipe.init(KEY, jnp.ones((1, 2)))
    linear = {"kernel": (2, 2)}
    affine = {"bias": (2,), "scale": (2,)}
    assert jax.tree.map(jnp.shape, variables) == {
        "params": {
            "special": (2,),
            "norm": affine,
            "number": (),
            "block": {
                # What is held twice is there once, under the first of its names.
                "again": linear | {"bias": (2,)},
                "no_bias": linear,
                "norm": affine,
                "gains": {0: (2,), 1: (2,)},
                "shifts": {"a": (2,)},
            },
        },
        "batch_stats": {"norm": {"mean": (2,), "var": (2,)}},
        "http_cache": {"http": {"a": (3,), "b": ((1,),)}},
        "cache": {"cache": (2,)},
        "scale": {"block": {"scale": (2,)}},
        "arrays": {"block": {"table": (2,)}},
    }
    assert variables["cache"]["cache"].dtype == jnp.int32
    assert not variables["params"]["number"].weak_type


def test_init_gives_the_values_that_the_module_has_now():
    layer = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    pipe = jpipe.pipeline([nn.Dense(3), layer], 2)
    x = jnp.ones((4, 3))
    for value in (1.0, 2.0):
        layer.bias[...] = jnp.full(2, value)
        variables = pipe.init(KEY, x)
        ref.assert_equal(variables[1]["params"], nnx.to_pure_dict(nnx.state(layer)))
        assert variables[1]["params"]["bias"].device == pipe.devices[1]
    # Another pipe of the same module, and another key: its own values all the same.
    other = jpipe.pipeline([nn.Dense(3), layer], 1, balance=[2])
    ref.assert_equal(other.init(jax.random.key(8), x)[1], variables[1])


def test_a_key_is_not_needed_where_all_layers_hold_their_values():
    layers = [nnx.Linear(3, 2, rngs=nnx.Rngs(0)), nn.relu, Block(2, nnx.Rngs(1))]
    pipe, x = jpipe.pipeline(layers, 2, balance=[2, 1]), jnp.ones((4, 3))
    variables = pipe.init(None, x)
    ref.assert_equal(variables, pipe.init(KEY, x))
    pipe.init_train_state(KEY, x, optax.sgd(0.1), variables=variables)
    # A state keeps a key, and linen makes its values by one.
    with pytest.raises(TypeError, match="key is None; needs a random key"):
        pipe.init_train_state(None, x, optax.sgd(0.1))
    with pytest.raises(TypeError, match="key is None; needs a random key"):
        jpipe.pipeline([*layers, nn.Dense(2)], 2).init(None, x)


def test_training_changes_the_other_collections_once_per_step(double):
    layers = [batch_norm(5, jnp.float64), Mixed(5, jnp.float64), lambda x: x]
    before = snapshot(layers[:2])
    x, _ = ref.regression(8, jnp.float64)
    tx = optax.sgd(0.0)
    pipe = jpipe.pipeline(layers, 4)
    state = pipe.init_train_state(KEY, x, tx)
    old = ref.on_host(state.model_state)
    state, _ = pipe.train_step(ref.mse, tx)(state, x, x)
    new = ref.on_host(state.model_state)
    assert jax.tree.structure(old) == jax.tree.structure(new)
    np.testing.assert_allclose(
        new[0]["batch_stats"]["mean"], 0.01 * np.mean(x, axis=0), rtol=1e-10
    )
    assert new[1]["call_count"]["calls"] == 1  # of the last micro-batch, from 0
    parts = [nnx.clone(layers[0])(part) for part in np.split(x, 4)]
    mean_square = np.mean([jnp.mean(part**2) for part in parts])
    np.testing.assert_allclose(
        new[1]["scale"]["mean_square"], mean_square, rtol=ref.FLOAT64
    )
    assert_untouched(layers[:2], before)


def test_update_modules_copies_variables_back_into_nnx_modules():
    x, targets = ref.regression(8)
    targets = jnp.stack([targets] * 2, axis=1)
    identity = jpipe.Layer(lambda key, x: {}, lambda variables, x: x)
    layers = [Block(5, nnx.Rngs(1)), jnp.tanh, ref.dense(4), identity]
    layers += [nnx.BatchNorm(4, rngs=nnx.Rngs(4)), Noisy(nnx.Rngs(5))]
    held = [layers[i] for i in (0, 4, 5)]
    before = snapshot(held)
    tx = optax.sgd(0.1)
    pipe = jpipe.pipeline(layers, 2, balance=[len(layers)])
    state = pipe.init_train_state(KEY, x, tx)
    state, _ = pipe.train_step(ref.mse, tx)(state, x, targets)
    expected = pipe.apply(state.variables, x)

    modules = pipe.modules(state.variables)
    assert modules[1] is jnp.tanh
    assert modules[3] is identity
    y = x
    for listed, module in zip(layers, modules, strict=True):
        assert type(module) is type(listed)
        if isinstance(module, nnx.Module):
            assert module is not listed
            module.eval()
        y = y if module is identity else module(y)
    ref.assert_close(y, expected, ref.FLOAT32)
    stats = nnx.to_pure_dict(nnx.state(modules[4], nnx.BatchStat))
    ref.assert_equal(stats, state.variables[4]["batch_stats"])
    # Random streams are those of the module; drawing from them leaves it alone.
    modules[5].train()
    twin, ones = nnx.clone(layers[5]), jnp.ones((3, 4))
    np.testing.assert_array_equal(modules[5](ones), twin(ones))
    assert_untouched(held, before)


def test_a_module_listed_twice_is_one_module_again(double):
    def attend(module, x):
        return x @ module.kernel.T

    tied = nnx.Linear(5, 5, use_bias=False, rngs=nnx.Rngs(0), param_dtype=float)
    x = ref.regression(8, jnp.float64)[0]
    tx = optax.sgd(0.1)

    def train(module):
        layers = [module, jnp.tanh, jpipe.layer(module, attend)]
        pipe = jpipe.pipeline(layers, 2)
        state = pipe.init_train_state(KEY, x, tx)
        state, _ = pipe.train_step(ref.mse, tx)(state, x, x)
        return pipe.modules(state.variables)

    first, _, second = train(tied)
    assert first is second
    again, *_ = train(first)

    unpipelined = nnx.clone(tied)
    for _ in range(2):
        grads = nnx.grad(lambda m: ref.mse(attend(m, jnp.tanh(m(x))), x))(unpipelined)
        nnx.update(
            unpipelined,
            jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(unpipelined), grads),
        )
    ref.assert_close(again.kernel[...], unpipelined.kernel[...], ref.FLOAT64)


def test_init_copies_the_values_of_a_module_once():
    def live():
        gc.collect()
        return sum(array.nbytes for array in jax.live_arrays())

    layers = [nnx.Linear(64, 64, rngs=nnx.Rngs(i)) for i in range(2)]
    pipe, x, before = jpipe.pipeline(layers, 2), jnp.ones((4, 64)), live()
    variables = pipe.init(None, x)
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(variables))
    assert live() - before < 1.5 * num_bytes
