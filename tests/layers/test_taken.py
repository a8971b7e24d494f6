"""Modules that layers take from elsewhere, which no attribute tells, are not shared."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

import jpipe

from .test_shared_modules import WIDTH, Holder

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
