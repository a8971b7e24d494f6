"""Modules that layers take from elsewhere, which no attribute tells, are not shared."""

import copy
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

import jpipe

from .test_shared_modules import WIDTH, Holder, Named

OUTSIDE = nn.Dense(WIDTH)


class Takes(nn.Module):
    """It takes a module from elsewhere."""

    def setup(self):
        self.part = OUTSIDE

    def __call__(self, x):
        return self.part(x)


def test_module_taken_from_elsewhere_by_two_layers_is_refused():
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


def test_module_that_is_taken_and_listed_is_refused():
    x, d = jnp.ones((4, WIDTH)), nn.Dense(WIDTH)
    with pytest.raises(ValueError, match=r"0 .Dense. and 1 .Takes. take one mod"):
        jpipe.pipeline([OUTSIDE, Takes()], 2).init(jax.random.key(0), x)
    with pytest.raises(ValueError, match="puts a module in its own place"):
        jpipe.pipeline([d, Given(d)], 2).init(jax.random.key(0), x)


def test_module_taken_by_one_listed_twice_is_one_value():
    takes, x = Takes(), jnp.ones((4, WIDTH))
    for again in (takes, jpipe.layer(takes, lambda module, x: module.part(x))):
        variables = jpipe.pipeline([takes, again], 2).init(jax.random.key(0), x)
        assert [sorted(entry) for entry in variables] == [["params"], []]
    jpipe.pipeline([Given(nn.Dense(WIDTH)), takes], 2).init(jax.random.key(0), x)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, nn.Module.clone])
@pytest.mark.parametrize("made", [lambda d: d, Holder], ids=["itself", "inside"])
def test_copies_are_other_modules_as_under_a_flax_parent(made, copied):
    """Of these `copy.copy` alone gives what Flax takes for the same module."""
    d, x = nn.Dense(WIDTH), jnp.ones((4, WIDTH))
    layers = [made(d), jnp.tanh, made(copied(d))]
    parent = nn.Sequential(layers).init(jax.random.key(0), x)
    pipe = jpipe.pipeline(layers, 2)
    variables = pipe.init(jax.random.key(0), x)
    leaves = jax.tree.leaves(variables)
    assert len(leaves) == len(jax.tree.leaves(parent))


def test_modules_in_a_dict_of_any_keys_are_shared():
    layer = Named({"norm": nn.LayerNorm(), 1: 2.0, None: [3]}, nn.Dense(WIDTH))
    x = jnp.ones((4, WIDTH))
    variables = jpipe.pipeline([layer, layer], 2).init(jax.random.key(0), x)
    names = [sorted(entry.get("params", ())) for entry in variables]
    assert names == [["Dense_0", "before_norm", "part"], []]
