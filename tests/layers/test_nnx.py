"""Flax nnx modules as layers: every leaf, against plain nnx on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jpipe

from .. import reference as ref
from .nnx_modules import (
    KEY,
    Block,
    Mixed,
    Noisy,
    assert_untouched,
    batch_norm,
    compose,
    is_nnx,
    mlp,
    reference_params,
    snapshot,
    value_and_grad,
)


@pytest.mark.filterwarnings("ignore:evaluation gives outputs alone")
def test_gradients_equal_one_device(double):
    layers = mlp(jnp.float64)
    before = snapshot(filter(is_nnx, layers))
    x, targets = ref.regression(8, jnp.float64)
    pipe = jpipe.pipeline(layers, 3, balance=[1, 2, 2, 1], schedule="zb_h1")
    variables = pipe.init(KEY, x)
    params = reference_params(layers, ref.params_of(variables))
    ref.assert_equal(ref.params_of(variables), params)
    loss, grads = pipe.value_and_grad(ref.mse)(variables, x, targets, train=False)
    expected = value_and_grad(layers, params, x, targets)
    ref.assert_close((loss, grads), expected, ref.FLOAT64)
    y = pipe.apply(variables, x)
    ref.assert_close(y, compose(layers, params, x), ref.FLOAT64)
    assert_untouched(filter(is_nnx, layers), before)


def test_a_module_of_one_device_trains_without_losing_its_arrays():
    layer = nnx.Linear(5, 4, rngs=nnx.Rngs(0))
    before = snapshot([layer])
    x, targets = ref.regression(8)
    pipe = jpipe.sequential([layer], 2)
    step = pipe.train_step(ref.mse, optax.sgd(0.1))
    step(pipe.init_train_state(KEY, x, optax.sgd(0.1)), x, targets)
    assert_untouched([layer], before)


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


def test_a_compiled_pipe_uses_the_variables_that_it_is_given():
    layer = Block(3, nnx.Rngs(0))
    x = jnp.ones((4, 3))
    pipe = jpipe.pipeline([layer], 2)
    variables = pipe.init(KEY, x)
    pipe.apply(variables, x)
    doubled = jax.tree.map(lambda leaf: 2 * leaf, variables)
    layer.linear.kernel[...] = jnp.zeros((3, 3))
    twin = Block(3, nnx.Rngs(0))
    for leaf in (*twin.gains, twin.shifts["a"], twin.scale, twin.no_bias.kernel):
        leaf[...] = 2 * leaf[...]
    for leaf in (twin.linear.kernel, twin.linear.bias, twin.norm.scale):
        leaf[...] = 2 * leaf[...]
    twin.table = 2 * twin.table
    ref.assert_close(pipe.apply(doubled, x), twin(x), ref.FLOAT32)


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
    assert new[0].keys() == {"batch_stats"}
    for name, value in new[0]["batch_stats"].items():
        assert not np.allclose(value, old[0]["batch_stats"][name])
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


# What becomes of the statistics is not its subject.
@pytest.mark.filterwarnings("ignore:(value_and_grad|apply) leaves:UserWarning")
def test_batch_norm_normalizes_each_micro_batch_in_training_only(double):
    layer = nnx.Sequential(batch_norm(5, jnp.float64))
    x, _ = ref.regression(8, jnp.float64)
    pipe = jpipe.pipeline([layer], 4)
    variables = pipe.init(KEY, x)
    parts = [nnx.clone(layer)(part) for part in np.split(x, 4)]
    ref.assert_close(
        pipe.apply(variables, x, train=True), jnp.concatenate(parts), ref.FLOAT64
    )
    twin = nnx.clone(layer)
    twin.eval()
    ref.assert_close(pipe.apply(variables, x), twin(x), ref.FLOAT64)
    ref.assert_equal(variables, pipe.init(KEY, x))


@pytest.mark.filterwarnings("ignore:evaluation gives outputs alone")
def test_modules_with_the_values_of_a_pipe():
    x, targets = ref.regression(8)
    layers = [*mlp(), nnx.BatchNorm(4, rngs=nnx.Rngs(4)), Noisy(nnx.Rngs(5))]
    layers.append(lambda x: x[:, 0])
    stage = jpipe.Stage(lambda key, x: {}, lambda variables, x: x)
    layers.append(stage)
    before = snapshot(filter(is_nnx, layers))
    tx = optax.sgd(0.1)
    pipe = jpipe.pipeline(layers, 2, balance=[len(layers)])
    state = pipe.init_train_state(KEY, x, tx)
    state, _ = pipe.train_step(ref.mse, tx)(state, x, targets)
    expected = pipe.apply(state.variables, x)

    y = x
    modules = []
    found = pipe.modules(state.variables)
    for listed, module in zip(layers, found, strict=True):
        modules.append(module)
        assert type(module) is type(listed)
        if isinstance(module, jpipe.Stage):
            assert module is stage
            continue
        if is_nnx(module):
            assert module is not listed
            module.eval()
        y = module(y)
    ref.assert_close(y, expected, ref.FLOAT32)
    assert modules[1] is layers[1]
    ref.assert_equal(
        nnx.to_pure_dict(nnx.state(modules[6], nnx.BatchStat)),
        state.variables[6]["batch_stats"],
    )
    # Random streams are those of the module; drawing from them leaves it alone.
    modules[7].train()
    twin = nnx.clone(layers[7])
    ones = jnp.ones((3, 4))
    np.testing.assert_array_equal(modules[7](ones), twin(ones))
    assert_untouched(filter(is_nnx, layers), before)


def test_what_is_listed_twice_is_one_module_again(double):
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

    own = nnx.clone(tied)
    for _ in range(2):
        grads = nnx.grad(lambda m: ref.mse(attend(m, jnp.tanh(m(x))), x))(own)
        nnx.update(own, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(own), grads))
    ref.assert_close(again.kernel[...], own.kernel[...], ref.FLOAT64)


@pytest.mark.parametrize("frozen", [True, False])
def test_attributes_of_a_dropout_of_the_users_are_its_own(frozen):
    class Gate(nnx.Dropout):
        def __init__(self, frozen):
            super().__init__(0.0, rngs=nnx.Rngs(0))
            self.frozen, self.path = frozen, "residual"

        def __call__(self, x):
            y = super().__call__(x)
            y = x + y if self.path == "residual" else y
            return jax.lax.stop_gradient(y) if self.frozen else y

    linear, gate = nnx.Linear(3, 3, rngs=nnx.Rngs(0)), Gate(frozen)
    x = jax.random.normal(jax.random.key(0), (4, 3))
    pipe = jpipe.pipeline([linear, gate], 2)
    variables = pipe.init(jax.random.key(0), x)

    def loss(kernel):
        y = x @ kernel + linear.bias[...]
        return jnp.mean((0.0 if frozen else 1.0) * (2 * y - 1) ** 2)

    # Single precision, in sums of another order.
    ref.assert_close(pipe.apply(variables, x), gate(linear(x)), 1e-5)
    gradient = pipe.value_and_grad(lambda y, t: jnp.mean((y - t) ** 2))
    _, grads = gradient(variables, x, jnp.ones_like(x), rngs=jax.random.key(1))
    ref.assert_close(grads[0]["kernel"], jax.grad(loss)(linear.kernel[...]), 1e-5)


class Polynomial(nnx.Module):
    """Has a method that is called as one of Flax, and is none."""

    def __init__(self):
        self.factors = nnx.Param(jnp.arange(3.0))

    def eval(self, x):
        return sum(self.factors[i] * x**i for i in range(3))

    def __call__(self, x):
        return self.eval(x)


def test_a_method_eval_of_the_users_is_its_own():
    x = jnp.full((2, 3), 2.0)
    pipe = jpipe.sequential([Polynomial()])
    y = pipe.apply(pipe.init(jax.random.key(0), x), x)
    assert (y == 10).all()
