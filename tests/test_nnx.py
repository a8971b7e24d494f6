"""Flax nnx modules as layers: every leaf, against plain nnx on one device."""

import functools
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jpipe
from jpipe._layers import _layer

from . import reference as ref

KEY = jax.random.key(0)


class Scale(nnx.Variable):
    """A variable type of the user's own, of two words."""


class CallCount(nnx.Variable):
    """Another, with integers."""


class Block(nnx.Module):
    """Parameters in lists and dicts, one shared inside, and other collections."""

    def __init__(self, width: int, rngs: nnx.Rngs, dtype: Any = jnp.float32):
        options = {"rngs": rngs, "dtype": dtype, "param_dtype": dtype}
        self.norm = nnx.LayerNorm(width, **options)
        self.linear = nnx.Linear(width, width, **options)
        self.again = self.linear
        self.no_bias = nnx.Linear(width, width, use_bias=False, **options)
        gains = jax.random.normal(rngs.params(), (2, width), dtype)
        self.gains = nnx.List([nnx.Param(gains[0]), nnx.Param(gains[1])])
        self.shifts = nnx.Dict({"a": nnx.Param(gains[0] / 2)})
        self.scale = Scale(jnp.full((width,), 0.5, dtype))
        self.table = jnp.arange(width, dtype=dtype) / width

    def __call__(self, x):
        h = self.again(jnp.tanh(self.linear(self.norm(x))))
        for gain in self.gains:
            h = h * gain[...]
        h = self.no_bias(h + self.shifts["a"][...]) * self.scale[...]
        return x + h + self.table


class Mixed(nnx.Module):
    """A parameter of integers, and counts of calls."""

    def __init__(self, width: int, dtype: Any = jnp.float32):
        self.order = nnx.Param(jnp.arange(width)[::-1])
        self.weight = nnx.Param(jnp.linspace(0.5, 2, width, dtype=dtype))
        self.calls = CallCount(jnp.int32(0))
        self.mean_square = Scale(jnp.zeros((), dtype))

    def __call__(self, x):
        self.calls[...] += 1
        self.mean_square[...] = jnp.mean(x**2)
        return x[:, self.order[...]] * self.weight[...]


class Rematerialized(nnx.Module):
    """A block inside of nnx.remat, which is given a static argument."""

    def __init__(self, width: int, rngs: nnx.Rngs, dtype: Any = jnp.float32):
        self.block = Block(width, rngs, dtype)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    @nnx.remat(static_argnums=(2, 3))
    def __call__(self, x, twice=True, train=False):
        assert isinstance(train, bool)
        x = self.block(x)
        return self.dropout(x, deterministic=not train) * (2 if twice else 1)


class Noisy(nnx.Module):
    """Draws twice from streams that it holds."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Dropout(0.5, rngs=rngs)
        self.second = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return jnp.stack([self.first(x), self.second(x)], axis=1)


def mlp(dtype: Any = jnp.float32) -> list[Any]:
    """Six layers: nnx modules, linen modules and functions, of widths 5 to 4."""
    options = {"dtype": dtype, "param_dtype": dtype}
    return [
        nnx.Linear(5, 6, rngs=nnx.Rngs(0), **options),
        jnp.tanh,
        Block(6, nnx.Rngs(1), dtype),
        ref.dense(6, dtype),
        Rematerialized(6, nnx.Rngs(2), dtype),
        nnx.Sequential(
            Mixed(6, dtype), nnx.relu, nnx.Linear(6, 4, rngs=nnx.Rngs(3), **options)
        ),
    ]


def batch_norm(width: int, dtype: Any = jnp.float32) -> nnx.BatchNorm:
    """One whose statistics have its dtype: nnx makes them in single precision."""
    module = nnx.BatchNorm(width, rngs=nnx.Rngs(0), param_dtype=dtype)
    module.mean = nnx.BatchStat(jnp.zeros(width, dtype))
    module.var = nnx.BatchStat(jnp.ones(width, dtype))
    return module


def is_nnx(layer: Any) -> bool:
    return isinstance(layer, nnx.Module)


def reference_params(layers, linen):
    """The parameters as a caller of plain nnx would take them."""
    return tuple(
        nnx.to_pure_dict(nnx.state(layer, nnx.Param)) if is_nnx(layer) else own
        for layer, own in zip(layers, linen, strict=True)
    )


def compose(layers, params, x, train=False):
    """The layers one after the other: nnx modules cloned and updated, by plain nnx."""
    for layer, own in zip(layers, params, strict=True):
        if is_nnx(layer):
            module = nnx.clone(layer)
            nnx.update(module, nnx.State(own))
            module.train() if train else module.eval()
            x = module(x)
        elif isinstance(layer, nn.Module):
            x = layer.apply({"params": own}, x)
        else:
            x = layer(x)
    return x


def value_and_grad(layers, params, x, targets):
    def loss(params):
        return ref.mse(compose(layers, params, x), targets)

    return jax.jit(jax.value_and_grad(loss, allow_int=True))(params)


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


# ------------------------------------------------------------------- the numbers


MATRIX = list(
    zip(
        itertools.cycle([[6], [2, 4], [1, 2, 2, 1]]),
        itertools.product(["1f1b", "zb_h1"], ["full", "none"]),
        [1, 3, 2, 4],
        strict=False,
    )
)


@pytest.mark.parametrize(("balance", "how", "microbatches"), MATRIX)
def test_gradients_equal_one_device(double, balance, how, microbatches):
    layers = mlp(jnp.float64)
    before = snapshot(filter(is_nnx, layers))
    x, targets = ref.regression(8, jnp.float64)
    pipe = jpipe.pipeline(
        layers, microbatches, balance=balance, schedule=how[0], remat=how[1]
    )
    variables = pipe.init(KEY, x)
    params = reference_params(layers, ref.params_of(variables))
    ref.assert_equal(ref.params_of(variables), params)
    loss, grads = pipe.value_and_grad(ref.mse)(variables, x, targets, train=False)
    expected = value_and_grad(layers, params, x, targets)
    ref.assert_close((loss, grads), expected, ref.FLOAT64)
    y = pipe.apply(variables, x)
    ref.assert_close(y, compose(layers, params, x), ref.FLOAT64)
    assert_untouched(filter(is_nnx, layers), before)


def test_steps_equal_optax(double):
    layers = [
        nnx.Linear(5, 6, rngs=nnx.Rngs(0), param_dtype=jnp.float64),
        nnx.relu,
        Block(6, nnx.Rngs(1), jnp.float64),
        nnx.Linear(6, 4, rngs=nnx.Rngs(2), param_dtype=jnp.float64),
    ]
    before = snapshot(filter(is_nnx, layers))
    x, targets = ref.regression(8, jnp.float64)
    tx = optax.adamw(1e-2)
    pipe = jpipe.pipeline(layers, 4, balance=[1, 2, 1])
    state = pipe.init_train_state(KEY, x, tx)
    params = reference_params(layers, ref.params_of(state.variables))
    step = pipe.train_step(ref.mse, tx)
    opt_state = tx.init(params)
    for _ in range(3):
        state, metrics = step(state, x, targets)
        loss, grads = value_and_grad(layers, params, x, targets)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        ref.assert_close(metrics["loss"], loss, ref.FLOAT64)
    ref.assert_close(state.params, params, ref.FLOAT64)
    # A step overwrites its state: not what the modules hold, on whatever device.
    assert_untouched(filter(is_nnx, layers), before)


def test_a_module_of_one_device_trains_without_losing_its_arrays():
    layer = nnx.Linear(5, 4, rngs=nnx.Rngs(0))
    before = snapshot([layer])
    x, targets = ref.regression(8)
    pipe = jpipe.sequential([layer], 2)
    step = pipe.train_step(ref.mse, optax.sgd(0.1))
    step(pipe.init_train_state(KEY, x, optax.sgd(0.1)), x, targets)
    assert_untouched([layer], before)


# ------------------------------------------------------------------- what it holds


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


# ---------------------------------------------------------- what training changes


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


# ---------------------------------------------------------------------- randomness


def test_dropout_depends_on_step_micro_batch_and_layer_only():
    x = jnp.ones((8, 16))

    def run(balance, remat="full", key=9, schedule="1f1b", rngs=None):
        layers = [Noisy(nnx.Rngs(0)), Noisy(nnx.Rngs(0)), jnp.sin]
        pipe = jpipe.pipeline(layers, 4, balance=balance, remat=remat)
        rngs = jax.random.key(key) if rngs is None else rngs
        return np.asarray(pipe.apply((({},) * 3), x, rngs=rngs, train=True))

    first = run([3])
    for balance in ([1, 2], [1, 1, 1]):
        np.testing.assert_array_equal(first, run(balance))
    assert (first != run([3], key=10)).any()
    # One key given for dropout serves the stream that nnx.Rngs(0) makes.
    np.testing.assert_array_equal(first, run([3], rngs={"dropout": jax.random.key(9)}))

    def masks(layers):
        pipe = jpipe.pipeline(layers, 4, balance=[len(layers)])
        rngs = jax.random.key(9)
        return np.asarray(pipe.apply(({},) * len(layers), x, rngs=rngs, train=True))

    one = masks([Noisy(nnx.Rngs(0))])
    # The two streams of a module, the micro-batches, and the layers.
    assert (one[:, 0] != one[:, 1]).any()
    assert (one[:2] != one[2:4]).any()
    assert (one != masks([jnp.abs, Noisy(nnx.Rngs(0))])).any()
    assert set(np.unique(one)) == {0.0, 2.0}
    # The seed of the module is for its initialization.
    np.testing.assert_array_equal(one, masks([Noisy(nnx.Rngs(5))]))


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_gradients_with_dropout_equal_those_of_its_masks(double, schedule):
    """The masks are read off once; then dropout is a product with them."""
    width, rngs = 5, jax.random.key(3)
    x, targets = ref.regression(8, jnp.float64)
    targets = jnp.concatenate([targets, targets[:, :1]], axis=1)
    options = {"dtype": jnp.float64, "param_dtype": jnp.float64}
    dense = nnx.Linear(width, width, rngs=nnx.Rngs(0), **options)
    dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(1))
    ones = jpipe.sequential([jnp.ones_like, dropout], 4)
    masks = ones.apply(({}, {}), x, rngs=rngs, train=True)

    def loss(own):
        module = nnx.clone(dense)
        nnx.update(module, nnx.State(own))
        return ref.mse(jnp.sin(module(x) * masks), targets)

    params = nnx.to_pure_dict(nnx.state(dense, nnx.Param))
    expected = jax.value_and_grad(loss)(params)
    for balance, remat in itertools.product([[3], [1, 2], [2, 1]], ["full", "none"]):
        pipe = jpipe.pipeline(
            [dense, dropout, jnp.sin],
            4,
            balance=balance,
            remat=remat,
            schedule=schedule,
        )
        value, grads = pipe.value_and_grad(ref.mse)(
            pipe.init(KEY, x), x, targets, rngs=rngs
        )
        ref.assert_close((value, grads[0]), expected, ref.FLOAT64)


def test_each_step_draws_anew():
    x = jnp.ones((4, 8))
    layers = [nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1))]
    tx = optax.sgd(0.0)

    def losses():
        pipe = jpipe.pipeline(layers, 2)
        state = pipe.init_train_state(KEY, x, tx)
        step = pipe.train_step(ref.mse, tx)
        found = []
        for _ in range(3):
            state, metrics = step(state, x, x)
            found.append(float(metrics["loss"]))
        return found

    first = losses()
    assert len(set(first)) == 3
    assert first == losses()


def test_a_call_that_names_rngs_is_given_them():
    seen = []

    class Asks(nnx.Module):
        def __call__(self, x, use_running_average, *, rngs=None, deterministic):
            seen.append((use_running_average, deterministic, rngs is None))
            return x + jax.random.normal(rngs.noise(), x.shape) if rngs else x

    class Both(nnx.Module):
        def __init__(self):
            self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

        def __call__(self, x, rngs):
            given = nnx.Dropout(0.5)(x, rngs=rngs)
            return jnp.stack([self.dropout(x), given], axis=1)

    x = jnp.ones((2, 40))
    pipe = jpipe.pipeline([Asks()], 1)
    np.testing.assert_array_equal(pipe.apply(({},), x), x)
    noise = pipe.apply(({},), x, rngs={"noise": KEY}, train=True)
    assert (noise != x).all()
    other = pipe.apply(({},), x, rngs=jax.random.key(1), train=True)
    assert (noise != other).all()
    assert (True, True, True) in seen
    assert (False, False, False) in seen
    # A stream of the module and one of the same name that it is given differ.
    pipe = jpipe.pipeline([Both()], 1)
    y = pipe.apply(({},), x, rngs={"dropout": KEY}, train=True)
    assert (y[:, 0] != y[:, 1]).any()


def test_streams_of_several_keys_and_old_keys():
    class Split(nnx.Module):
        def __init__(self):
            self.streams = nnx.Rngs(dropout=0).dropout.split(3)

        def __call__(self, x):
            keys = jax.vmap(jax.random.fold_in)(
                self.streams.key[...], self.streams.count[...]
            )
            return x + jax.vmap(lambda key: jax.random.normal(key))(keys)

    x = jnp.zeros((2, 3))
    pipe = jpipe.pipeline([Split()], 1)
    y = pipe.apply(({},), x, rngs={"dropout": jax.random.key(4)}, train=True)
    assert len(np.unique(y)) == 3
    old = pipe.apply(({},), x, rngs={"dropout": jax.random.PRNGKey(4)}, train=True)
    np.testing.assert_array_equal(y, old)


def test_dropout_inside_of_remat(double):
    layer = Rematerialized(5, nnx.Rngs(0), jnp.float64)
    x, _ = ref.regression(8, jnp.float64)
    pipe = jpipe.pipeline([layer], 2)
    variables = pipe.init(KEY, x)
    y = pipe.apply(variables, x, rngs=KEY, train=True)
    full = 2 * pipe.apply(variables, x)
    kept = np.asarray(y) != 0
    assert 0.2 < kept.mean() < 0.8
    np.testing.assert_allclose(y[kept], full[kept], rtol=1e-12)
    # In training too the collections keep their values: they are equal micro-batches.
    x, targets = ref.regression(4, jnp.float64)
    tx = optax.sgd(0.1)
    pipe = jpipe.pipeline([layer, nnx.Linear(5, 4, rngs=nnx.Rngs(0))], 2)
    state = pipe.init_train_state(KEY, x, tx)
    old = ref.on_host(state.model_state)
    state, _ = pipe.train_step(ref.mse, tx)(state, x, targets)
    ref.assert_close(state.model_state, old, ref.FLOAT64)


# --------------------------------------------------------------------- the way back


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
    for listed, own in zip(layers, state.variables, strict=True):
        (layer,) = _layer.as_layers([listed])
        module = _layer.as_module(layer, own)
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


# ------------------------------------------------------------------------- refusals


def says(*parts):
    return "(?s)" + ".*".join(map(re.escape, parts))


def test_a_missing_key_names_the_stream():
    class Inner(nnx.Module):
        def __init__(self, rngs):
            self.parts = nnx.List([Rematerialized(3, rngs)])

        def __call__(self, x, train):
            return self.parts[0](x, True, train)

    x = jnp.ones((4, 3))
    pipe = jpipe.pipeline([nnx.relu, Inner(nnx.Rngs(0, dropout=1))], 2)
    variables = pipe.init(KEY, x)
    grad = pipe.value_and_grad(ref.mse)
    for rngs in (None, {"noise": KEY}):
        match = says("parts.0.dropout.rngs", "stream 'dropout'", "rngs={'dropout': ")
        with pytest.raises(ValueError, match=match) as error:
            grad(variables, x, x, rngs=rngs)
        assert "raised by layer 1 (Inner) of stage 1" in error.value.__notes__[0]
    # Nothing is drawn in evaluation, or at a rate of zero.
    grad(variables, x, x, train=False)
    pipe = jpipe.pipeline([nnx.Dropout(0.0, rngs=nnx.Rngs(0))], 2)
    pipe.apply(({},), x, train=True)


def test_one_module_twice_is_no_fault():
    block = Block(3, nnx.Rngs(0))
    jpipe.pipeline([block, nnx.relu, block], 2)


def test_modules_that_share_a_variable():
    class Tied(nnx.Module):
        def __init__(self, embed):
            self.inner = embed

        def __call__(self, x):
            return self.inner.attend(x)

    embed = nnx.Embed(4, 3, rngs=nnx.Rngs(0))
    other = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    with pytest.raises(
        ValueError,
        match=says(
            "list one module object twice",
            "layers 0 (Embed) and 2 (Tied) share a Param",
            "embedding of the one is inner.embedding of the other",
        ),
    ):
        jpipe.pipeline([embed, other, Tied(embed)], 2)
    # Random streams are seeded anew for each layer: they may be shared.
    rngs = nnx.Rngs(0)
    shared = [Noisy(rngs), Noisy(rngs)]
    for layer in shared:
        layer.rngs = rngs
    jpipe.pipeline(shared, 2)


def test_modules_that_cannot_be_layers():
    class NoCall(nnx.Module):
        pass

    class Params(nnx.Variable):
        pass

    class Takes(nnx.Module):
        def __init__(self):
            self.params = Params(jnp.ones(2))

        def __call__(self, x):
            return x

    class Tree(nnx.Pytree):
        def __call__(self, x):
            return x

    class Reference(Takes):
        def __init__(self):
            self.value = nnx.Param(jnp.ones(2), ref=True)

    linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    listed = [NoCall(), linear, Takes(), Tree(), linear.__call__, Reference()]
    listed += [nnx.Linear, functools.partial(linear), functools.partial(nnx.relu)]
    with pytest.raises(TypeError) as error:
        jpipe.pipeline(listed, 2)
    lines = str(error.value).splitlines()[1:]
    expected = [
        "layer 0: NoCall is an nnx module without __call__",
        "layer 2: Takes: the Variable type Params takes the name of what is trained",
        "layer 3: Tree is an nnx.Pytree; derive it from nnx.Module",
        "layer 4: a function bound to an nnx Linear",
        "layer 5: Reference: a Param that is a reference",
        "layer 6: Linear is a class",
        "layer 7: a function bound to an nnx Linear",
    ]
    assert len(lines) == len(expected)
    for line, start in zip(lines, expected, strict=True):
        assert line.startswith(f"  * {start}")


def test_calls_that_change_what_variables_there_are():
    class Grows(nnx.Module):
        def __init__(self):
            self.cache = nnx.Cache(jnp.zeros((1, 3)))

        def __call__(self, x):
            self.cache.set_value(jnp.concatenate([self.cache[...], x]))
            self.late = nnx.Param(jnp.ones(3))
            return x

    pipe = jpipe.pipeline([Grows()], 2)
    match = says(
        "this Grows changes which variables",
        "make them in __init__",
        "cache/cache was (1, 3) and became (3, 3)",
        "it made the Param late",
    )
    with pytest.raises(ValueError, match=match):
        pipe.init(KEY, jnp.ones((2, 3)))


def test_variables_of_another_module():
    pipe = jpipe.pipeline([nnx.Linear(3, 2, rngs=nnx.Rngs(0))], 2)
    with pytest.raises(ValueError, match=r"missing: .*'params'.*'bias'"):
        pipe.apply(({"params": {"kernel": jnp.ones((3, 2))}},), jnp.ones((2, 3)))
    (layer,) = _layer.as_layers([nnx.Linear(3, 2, rngs=nnx.Rngs(0))])
    with pytest.raises(ValueError, match=r"not those of this Linear: .*params/bias"):
        _layer.as_module(layer, {"params": {"kernel": jnp.ones((3, 2))}})
