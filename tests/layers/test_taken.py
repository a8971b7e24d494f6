"""Modules that layers take from elsewhere, which no attribute tells, are not shared."""

import copy
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

import jpipe
from jpipe import _compat
from jpipe._layers._layer import as_layers
from jpipe._layers._sharing import Sharing

from .test_shared_modules import WIDTH, Holder, Named

OUTSIDE = nn.Dense(WIDTH)


class Takes(nn.Module):
    """It takes a module from elsewhere."""

    def setup(self):
        self.part = OUTSIDE

    def __call__(self, x):
        return self.part(x)


def test_a_module_that_two_layers_take_from_elsewhere_is_refused():
    x = jnp.ones((4, WIDTH))
    alone = jpipe.pipeline([Takes(), Holder(nn.Dense(WIDTH)), nn.Dense(2)], 2)
    assert sorted(alone.init(jax.random.key(0), x)[0]["params"]) == ["part"]
    for layers in ([Takes(), Takes()], [Takes(), nn.relu, Holder(Takes())]):
        with pytest.raises(ValueError, match=r"layers 0 .*Takes. and . .*take one mod"):
            jpipe.pipeline(layers, 2).init(jax.random.key(0), x)


class Given(nn.Module):
    part: Any

    def setup(self):
        nn.share_scope(self, self.part)

    def __call__(self, x):
        return self.part(x)


def test_what_is_taken_and_listed_or_put_in_place_is_refused():
    x, d = jnp.ones((4, WIDTH)), nn.Dense(WIDTH)
    with pytest.raises(ValueError, match=r"0 .Dense. and 1 .Takes. take one mod"):
        jpipe.pipeline([OUTSIDE, Takes()], 2).init(jax.random.key(0), x)
    with pytest.raises(ValueError, match="puts a module in its own place"):
        jpipe.pipeline([d, Given(d)], 2).init(jax.random.key(0), x)


def test_what_one_module_takes_is_one_value_wherever_it_is_listed():
    takes, x = Takes(), jnp.ones((4, WIDTH))
    for again in (takes, jpipe.layer(takes, lambda module, x: module.part(x))):
        variables = jpipe.pipeline([takes, again], 2).init(jax.random.key(0), x)
        assert [sorted(entry) for entry in variables] == [["params"], []]
    jpipe.pipeline([Given(nn.Dense(WIDTH)), takes], 2).init(jax.random.key(0), x)


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, dataclasses.replace, nn.Module.clone]
)
@pytest.mark.parametrize("made", [lambda d: d, Holder], ids=["itself", "inside"])
def test_a_copy_is_another_module_where_it_is_one_under_a_flax_parent(made, copied):
    """Of these `copy.copy` alone gives what Flax takes for the same module."""
    d, x = nn.Dense(WIDTH), jnp.ones((4, WIDTH))
    layers = [made(d), jnp.tanh, made(copied(d))]
    parent = nn.Sequential(layers).init(jax.random.key(0), x)
    pipe = jpipe.pipeline(layers, 2)
    variables = pipe.init(jax.random.key(0), x)
    leaves = jax.tree.leaves(variables)
    assert len(leaves) == len(jax.tree.leaves(parent))
    _, grads = pipe.value_and_grad(lambda y, _: y.mean())(variables, x, x)
    assert len(jax.tree.leaves(grads)) == len(leaves)


def test_attributes_may_have_any_keys():
    layer = Named({"norm": nn.LayerNorm(), 1: 2.0, None: [3]}, nn.Dense(WIDTH))
    with pytest.raises(TypeError, match="not supported between"):  # JAX's, as ever
        sorted(layer.before)
    assert Sharing(as_layers([layer, layer])).roots(0) == {
        _compat.identity(module) for module in (layer, layer.before["norm"], layer.part)
    }


def test_without_the_name_of_flax_they_are_not_noticed(monkeypatch):
    monkeypatch.delattr("flax.linen.module._caches", raising=False)
    assert _compat.adopted(object()) == {}
