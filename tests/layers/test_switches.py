"""Switches and keys that a layer asks for."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jpipe

from .. import reference as ref


def test_what_partial_has_set_stays_set():
    def scaled(x, train=False):
        return 2 * x if train else x

    pipe = jpipe.pipeline([functools.partial(scaled, train=True)], 1)
    np.testing.assert_array_equal(pipe.apply(({},), jnp.ones(2)), [2, 2])
    pipe = jpipe.pipeline([scaled], 1)
    np.testing.assert_array_equal(pipe.apply(({},), jnp.ones(2)), [1, 1])
    np.testing.assert_array_equal(pipe.apply(({},), jnp.ones(2), train=True), [2, 2])


class Told(nn.Module):
    """Takes the switch by a name that it is not given by."""

    def head(self, x, is_training=False):
        return x

    @nn.compact
    def __call__(self, x, training=False):
        return nn.Dropout(0.5)(x, deterministic=not training)


class Chosen(nn.Module):
    """Its maker may choose."""

    training: bool | None = None

    def __call__(self, x, training=None):
        return x if nn.merge_param("training", self.training, training) else -x


class ToldNnx(nnx.Module):
    def __call__(self, x, training=False):
        return x


def test_a_function_that_asks_for_keys_by_another_name_is_refused():
    def drop(x, rng=None):
        return x if rng is None else x * jax.random.bernoulli(rng, 0.5, x.shape)

    with pytest.raises(
        ValueError, match=r"(?s)one named rngs, as .*layer 1: drop takes rng"
    ):
        jpipe.pipeline([jnp.tanh, drop], 2)
    jpipe.pipeline([jnp.tanh, functools.partial(drop, rng=jax.random.key(0))], 2)


def test_a_switch_by_another_name_is_refused():
    def function(x, is_train=False, training=False):
        return x

    stage = jpipe.Stage(lambda key, x: {}, lambda variables, x, is_eval=True: x)
    layers = [
        *(Told(), jpipe.layer(Told(), method="head"), ToldNnx()),
        *(function, stage, jpipe.isolate(Told(), "a")),
        # These are told, or ask for something else.
        functools.partial(function, is_train=True, training=True),
        jax.jit(functools.partial(function, is_train=True, training=True)),
        lambda x, training=False, train=False: x,
        lambda training: training,
        Chosen(training=False),
    ]
    with pytest.raises(ValueError, match="by a parameter train, deterministic") as no:
        jpipe.pipeline(layers, 2, balance=[len(layers)])
    _, *faults = str(no.value).split("\n")
    line = "list jpipe.layer(module, lambda module, x, train: module"
    assert faults == [
        f"  * layer 0: Told takes training; {line}(x, training=train))",
        f"  * layer 1: Told takes is_training; {line}.head(x, is_training=train))",
        f"  * layer 2: ToldNnx takes training; {line}(x, training=train))",
        "  * layer 3: function takes is_train and training",
        "  * layer 4: Stage takes is_eval",
        f"  * layer 5: Told takes training; {line}(x, training=train))",
    ]


def test_a_module_that_is_told_by_another_name():
    typed = jpipe.layer(Told(), lambda module, x, train: module(x, training=train))
    pipe = jpipe.sequential([typed], 2)
    y = pipe.apply(({},), jnp.ones((4, 8)), rngs=jax.random.key(0), train=True)
    assert set(np.unique(y)) == {0, 2}
    np.testing.assert_array_equal(pipe.apply(({},), jnp.ones((4, 8))), 1)


class Switched(nn.Module):
    """A block with a switch that stands by position."""

    @nn.compact
    def __call__(self, x, train):
        return nn.Dropout(0.5)(ref.dense(4)(x), deterministic=not train)


def test_a_rematerialized_block_has_static_switches():
    layer = nn.remat(Switched, static_argnums=(2,))()
    pipe = jpipe.pipeline([layer, ref.dense(4)], 2)
    x, targets = ref.regression(4)
    variables = pipe.init(jax.random.key(0), x)
    pipe.apply(variables, x)
    rngs = {"dropout": jax.random.key(1)}
    plain = jpipe.pipeline([Switched(), ref.dense(4)], 2)
    params = [{"params": p} for p in ref.params_of(variables)]
    # The same parameters under the name that flax gives the plain block's layers.
    expected = plain.value_and_grad(ref.mse)(plain.place(params), x, targets, rngs=rngs)
    actual = pipe.value_and_grad(ref.mse)(variables, x, targets, rngs=rngs)
    ref.assert_close(actual, expected, ref.FLOAT32)


def test_streams_of_one_key_draw_different_numbers():
    class Two(nn.Module):
        @nn.compact
        def __call__(self, x):
            keys = self.make_rng("noise"), self.make_rng("dropout")
            noise, dropout = (jax.random.uniform(key, x.shape) for key in keys)
            return noise - dropout

    pipe = jpipe.sequential([Two()], 2)
    y = pipe.apply(({},), jnp.ones((4, 3)), rngs=jax.random.key(0), train=True)
    assert np.all(np.asarray(y) != 0)
