"""Modules that stand in several layers: one value, as in one parent."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn

import jpipe

from .. import reference as ref

WIDTH = 4


class Holder(nn.Module):
    """A module that is given another."""

    inner: Any

    @nn.compact
    def __call__(self, x):
        return jnp.tanh(self.inner(x))


class Named(nn.Module):
    """Another class, in which the module has another name."""

    before: Any
    part: Any

    @nn.compact
    def __call__(self, x):
        return self.part(self.before["norm"](x)) + ref.dense(WIDTH, x.dtype)(x)


class Ends(nn.Module):
    """An encoder and a decoder, with a scale that both use."""

    def setup(self):
        options = {"dtype": jnp.float64, "param_dtype": jnp.float64}
        self.encoder = nn.Dense(WIDTH, **options)
        self.decoder = nn.Dense(WIDTH, **options)
        self.scale = self.param("scale", nn.initializers.ones, WIDTH, jnp.float64)

    def encode(self, x):
        return self.encoder(x) * self.scale

    def decode(self, x):
        return self.decoder(x) * self.scale

    def __call__(self, x):
        return self.decode(jnp.tanh(self.encode(x)))


def ends():
    module = Ends()
    return [jpipe.layer(module, "encode"), jnp.tanh, jpipe.layer(module, "decode")]


def batch(size=6):
    x, t = jax.random.normal(jax.random.key(5), (2, size, WIDTH), jnp.float64)
    return x, t


class Whole(nn.Module):
    """Its part is listed beside it, or another that shares it."""

    def setup(self):
        self.dense = nn.Dense(WIDTH)
        self.first = Holder(self.dense)

    def __call__(self, x):
        return self.first(x)


DENSE, NORM = nn.Dense(WIDTH), nn.LayerNorm()
# Of each layer, the names of its parameters: the first that uses a module has them.
OWNED = {
    "attributes": (
        [Holder(DENSE), jnp.sin, nn.remat(Holder)(DENSE)],
        [["inner"], [], []],
    ),
    "below itself": ([DENSE, Holder(DENSE)], [["bias", "kernel"], []]),
    "itself below": ([Holder(DENSE), DENSE], [["inner"], []]),
    "in a dict": (
        [Named({"norm": NORM, 1: 2.0}, DENSE), Named({"norm": NORM}, DENSE)],
        [["Dense_0", "before_norm", "part"], ["Dense_0"]],
    ),
    "methods": (ends(), [["encoder", "scale"], [], ["decoder"]]),
    "beside an equal module": (
        [*ends(), jpipe.layer(Ends(), "decode")],
        [["encoder", "scale"], [], ["decoder"], ["decoder", "scale"]],
    ),
}


@pytest.mark.parametrize(("layers", "owned"), OWNED.values(), ids=OWNED)
def test_first_layer_that_uses_a_module_has_its_parameters(double, layers, owned):
    variables = jpipe.pipeline(layers, 3).init(jax.random.key(0), batch()[0])
    assert [sorted(entry) for entry in ref.params_of(variables)] == owned


def test_complete_variables_may_stand_in_any_one_of_the_entries(double):
    """As a checkpoint of the module has them: gradients come back in that entry."""
    x, t = batch()
    pipe = jpipe.pipeline(ends(), 3)
    whole = Ends().init(jax.random.key(3), x)

    def loss(params):
        y = Ends().apply({"params": params}, x)
        return ref.mse(y, t)

    expected = jax.jit(jax.value_and_grad(loss))(ref.on_host(whole["params"]))
    for index in (0, 2):
        entries = [{}, {}, {}]
        entries[index] = whole
        value, grads = pipe.value_and_grad(ref.mse)(pipe.place(entries), x, t)
        ref.assert_close((value, grads[index]), expected, ref.FLOAT64)
        assert [bool(entry) for entry in grads] == [i == index for i in range(3)]
    tx = optax.adam(1e-2)
    state = pipe.init_train_state(jax.random.key(0), x, tx, variables=entries)
    state, metrics = pipe.train_step(ref.mse, tx)(state, x, t)
    assert float(metrics["loss"]) == pytest.approx(float(expected[0]), rel=1e-12)
    # Training starts from what each layer needs, where it runs.
    assert [sorted(entry) for entry in state.params] == OWNED["methods"][1]
    module = pipe.modules(state.variables)[0]
    assert sorted(module.variables["params"]) == ["decoder", "encoder", "scale"]


def test_shared_variables_in_two_entries_are_refused(double):
    x, d = batch()[0], ref.dense(WIDTH, jnp.float64)
    pipe = jpipe.pipeline([Holder(d), jnp.sin, Holder(d), d, d], 3)
    entries = list(pipe.init(jax.random.key(0), x))
    entries[2] = {"params": {**entries[0]["params"], "more": jnp.ones(2)}}
    with pytest.raises(ValueError, match="not those of this model") as no:
        pipe.apply(entries, x)
    assert str(no.value).split("\n")[1:] == [
        "  * surplus: variables[2]['params']['inner']['bias'] (4,)",
        "  * surplus: variables[2]['params']['inner']['kernel'] (4, 4)",
        "  * surplus: variables[2]['params']['more'] (2,)",
    ]
    with pytest.raises(ValueError, match=r"missing: variables\[0\]\['params'\]\['inn"):
        pipe.apply([{}] * 5, x)
    pipe = jpipe.pipeline([d, jnp.sin, d], 3)
    entries = list(pipe.init(jax.random.key(0), x))
    entries[2] = {"params": {"bias": entries[0]["params"]["bias"]}}
    there = "variables[{}]['params']['bias']"
    with pytest.raises(ValueError, match="not those of this model") as no:
        pipe.apply(entries, x)
    assert str(no.value).split("\n")[1:] == [
        f"  * tied: {there.format(2)} is {there.format(0)}; give {{}} in its place"
    ]


def test_a_step_does_not_depend_on_what_the_pipeline_saw_last():
    d = nn.Dense(WIDTH)
    pipe = jpipe.pipeline([d, jpipe.layer(d, lambda d, x: d(x)), nn.Dense(2)], 2)
    tx = optax.sgd(0.1)
    x, t = jnp.ones((4, WIDTH)), jnp.ones((4, 2))
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    step = pipe.train_step(ref.mse, tx)
    state, _ = step(state, x, t)
    pipe.init(jax.random.key(0), jnp.ones((4, 3, WIDTH)))
    shared_params, _, last = jax.tree.map(jnp.copy, state.params)
    moved = ({}, {"params": shared_params}, {"params": last})
    pipe.apply(pipe.place(moved), x)  # the same values, in other entries
    state, metrics = step(state, x, t)
    assert jnp.isfinite(metrics["loss"])


@pytest.mark.parametrize("wrap", [lambda norm: norm, Holder], ids=["itself", "below"])
def test_statistics_are_shared_as_long_as_training_leaves_them(wrap):
    x = jax.random.normal(jax.random.key(0), (4, WIDTH))
    frozen = nn.BatchNorm(use_running_average=True)
    pipe = jpipe.pipeline([wrap(frozen), nn.Dense(WIDTH), wrap(frozen)], 2)
    variables = pipe.init(jax.random.key(1), x)
    assert variables[2] == {}
    inner = ("inner",) if wrap is Holder else ()
    for name in inner:
        variables[0]["batch_stats"][name]["mean"] += 0.5
    owner, dense = wrap(frozen), nn.Dense(WIDTH)

    def loss(params):
        owner_variables = {"batch_stats": stats, "params": params[0]}
        h = dense.apply({"params": params[1]}, owner.apply(owner_variables, x))
        return ref.mse(owner.apply(owner_variables, h), x)

    stats = ref.on_host(variables[0]["batch_stats"])
    expected = jax.jit(jax.value_and_grad(loss))(list(ref.params_of(variables[:2])))
    value, grads = pipe.value_and_grad(ref.mse)(variables, x, x)
    ref.assert_close((value, list(grads[:2])), expected, 1e-5)
    norm, where = nn.BatchNorm(use_running_average=False), "inner" if inner else "Batch"
    pipe = jpipe.pipeline([wrap(norm), wrap(norm)], 2)
    variables = pipe.init(jax.random.key(1), x)
    for run in (
        lambda: pipe.value_and_grad(ref.mse)(variables, x, x),
        lambda: pipe.apply(variables, x, train=True),
    ):
        with pytest.raises(ValueError, match=f"{where}.* is called twice"):
            run()


# ------------------------------------- what layers take from elsewhere, by no attribute

OUTSIDE = nn.Dense(WIDTH)


class Takes(nn.Module):
    """It takes a module from elsewhere."""

    def setup(self):
        self.part = OUTSIDE

    def __call__(self, x):
        return self.part(x)


class Given(nn.Module):
    """It puts a module in its own place."""

    part: Any

    def setup(self):
        nn.share_scope(self, self.part)

    def __call__(self, x):
        return self.part(x)


D, TAKES = nn.Dense(WIDTH), Takes()
# Of each layer the names of its parameters; all layers compute the same.
TAKEN = {
    "by two": ([Takes(), Takes()], [["part"], []]),
    "below": ([Takes(), jnp.copy, Holder(Takes())], [["part"], [], []]),
    "by one listed twice": ([TAKES, TAKES], [["part"], []]),
    "by a method": (
        [TAKES, jpipe.layer(TAKES, lambda module, x: module.part(x))],
        [["part"], []],
    ),
    "by share_scope": ([Given(D), jnp.copy], [["bias", "kernel"], []]),
    "listed and by share_scope": ([D, Given(D)], [["bias", "kernel"], []]),
}


@pytest.mark.parametrize(("layers", "owned"), TAKEN.values(), ids=TAKEN)
def test_module_that_several_layers_take_is_one_value(layers, owned):
    """As under one parent in Flax."""
    x, t = ref.regression(4)
    x = x[:, :WIDTH]
    t = jnp.zeros_like(x)
    pipe = jpipe.pipeline(layers, 2)
    variables = pipe.init(jax.random.key(0), x)
    assert [sorted(entry) for entry in ref.params_of(variables)] == owned
    (params,) = (p for p in ref.on_host(ref.params_of(variables)) if p)

    def loss(params):
        inner = params.get("part", params)
        h = x
        for layer in layers:
            if layer is not jnp.copy:
                h = OUTSIDE.apply({"params": inner}, h)
            h = jnp.tanh(h) if isinstance(layer, Holder) else h
        return ref.mse(h, t)

    value, grads = pipe.value_and_grad(ref.mse)(variables, x, t)
    expected = jax.jit(jax.value_and_grad(loss))(params)
    ref.assert_close((value, grads[0]), expected, 1e-5)


def test_bound_module_is_refused():
    module = Whole()
    bound = module.bind(module.init(jax.random.key(0), jnp.ones((1, WIDTH))))
    for listed in (bound.dense, jpipe.layer(bound.dense, lambda module, x: module(x))):
        with pytest.raises(TypeError, match=r"layer 0: a Dense that is bound"):
            jpipe.pipeline([listed, jnp.sin], 2)


def test_module_that_is_listed_and_taken_from_elsewhere_is_two_as_in_flax():
    class Parent(nn.Module):
        layers: Any

        def __call__(self, x):
            return self.layers[1](self.layers[0](x))

    x, layers = jnp.ones((4, WIDTH)), [OUTSIDE, Takes()]
    params = Parent(tuple(layers)).init(jax.random.key(0), x)["params"]
    variables = jpipe.pipeline(layers, 2).init(jax.random.key(0), x)
    for i, entry in enumerate(ref.params_of(variables)):
        assert jax.tree.structure(entry) == jax.tree.structure(params[f"layers_{i}"])
