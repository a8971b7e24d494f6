"""What a layer reaches by any way is found; what it does not take is let alone."""

import collections
import dataclasses
import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import jpipe

X = jnp.ones((4, 3))


def linear(seed=0):
    return nnx.Linear(3, 3, rngs=nnx.Rngs(seed))


LINEAR = linear()
NESTED = {"a": {"b": [LINEAR]}, "scale": 2.0}


class Holds:
    def __init__(self, part=LINEAR):
        self.part, self.scale = part, 2.0

    def __call__(self, x):
        return self.part(x)

    def scaled(self, x):
        return x * self.scale

    def within(self, x):
        return jax.tree.map(lambda leaf: leaf * self.scale, x)

    @property
    def inner(self):
        return self.part


class Derived(Holds):
    def __call__(self, x):
        return super().__call__(x)


class Slots:
    __slots__ = ("part",)

    def __init__(self):
        self.part = LINEAR

    def __call__(self, x):
        return self.part(x)


@dataclasses.dataclass
class Data:
    part: Any


HOLDS, DATA = Holds(), Data(LINEAR)
SPACE = types.SimpleNamespace(inner=collections.deque([LINEAR]))


def helper(x):
    return LINEAR(x)


def calls_a_helper(x):
    return helper(x)


def with_an_inner_function(x):
    def inner(y):
        return LINEAR(y)

    return inner(x)


class Given(nn.Module):
    function: Any

    @nn.compact
    def __call__(self, x):
        return self.function(nn.Dense(3)(x))


class GivenNnx(nnx.Module):
    def __init__(self, function):
        self.function, self.part = function, linear(1)

    def __call__(self, x):
        return self.function(self.part(x))


class OfItself(GivenNnx):
    """What it holds of itself is the module that it was, not the one that is called."""

    def __init__(self):
        super().__init__(lambda x: self.part(x))


class Calls(nnx.Module):
    def __init__(self):
        self.scale = nnx.Param(jnp.ones(3))

    def __call__(self, x):
        return self.more(x) * self.scale

    def more(self, x):
        return LINEAR(x)


def param(p):
    return lambda x: x * p


HIDING = {
    "partial": (
        functools.partial(lambda m, x: m(x), LINEAR),
        "a partial is given",
    ),
    "object": (HOLDS, r"self\.part"),
    "derived": (Derived(), r"self\.part"),
    "slots": (Slots(), r"self\.part"),
    "bound method": (HOLDS.__call__, r"self\.part"),
    "attribute": (lambda x: HOLDS.part(x), r"HOLDS\.part"),
    "method of a global": (lambda x: HOLDS(x), r"HOLDS\.part"),
    "property": (lambda x: HOLDS.inner(x), r"self\.part"),
    "dataclass": (lambda x: DATA.part(x), r"DATA\.part"),
    "namespace": (lambda x: SPACE.inner[0](x), r"SPACE\.inner\[0\]"),
    "helper": (calls_a_helper, "LINEAR"),
    "inner function": (with_an_inner_function, "LINEAR"),
    "comprehension": (lambda x: sum([LINEAR(x) for _ in range(1)]), "LINEAR"),
    "nested": (lambda x: NESTED["a"]["b"][0](x), r"NESTED\['a'\]\['b'\]\[0\]"),
    "stage": (jpipe.Stage(lambda k, x: {}, lambda v, x: LINEAR(x)), "LINEAR"),
    "Param": (param(nnx.Param(jnp.ones(3))), "p, a Param"),
    "nnx.jit": (nnx.jit(lambda x: LINEAR(x)), "LINEAR"),
    "remat": (jax.checkpoint(lambda x: LINEAR(x)), "LINEAR"),
    "linen, module": (Given(LINEAR), r"self\.function"),
    "linen, function": (Given(lambda x: LINEAR(x)), "LINEAR"),
    "linen, object": (Given(HOLDS), r"self\.function\.part"),
    "linen, inner": (nn.Sequential([nn.Dense(3), Given(HOLDS)]), r"function\.part"),
    "nnx, function": (GivenNnx(lambda x: LINEAR(x)), "LINEAR"),
    "nnx, object": (GivenNnx(HOLDS), r"self\.function\.part"),
    "nnx, method": (GivenNnx(HOLDS.__call__), r"self\.part"),
    "nnx, itself": (OfItself(), "self"),
    "nnx, called": (Calls(), "LINEAR"),
    "layer": (jpipe.layer(nn.Dense(3), lambda m, x: helper(m(x))), "LINEAR"),
}


@pytest.mark.parametrize("name", HIDING)
def test_a_module_that_a_layer_reaches_is_refused(name):
    layer, place = HIDING[name]
    says = rf"layer 1: a \w+ that takes .*{place}.*, from outside, whose values would"
    with pytest.raises(TypeError, match=says):
        jpipe.pipeline([nn.Dense(3), layer], 2)


def asserts(x):
    assert len(x), "which pytest writes anew, by what holds these tests"
    return x


def loop(x, n=3):
    return x if not n else loop(x, n - 1)


def makes(x):
    return nnx.Linear(3, 3, rngs=nnx.Rngs(0))(x)


def names_a_class(x):
    return x if isinstance(x, Holds) else Data(x).part


def test_what_a_layer_does_not_take_is_let_alone():
    itself = {}
    itself["itself"] = itself
    held = Holds()
    layers = [
        HOLDS.scaled,
        HOLDS.within,
        lambda x: x * HOLDS.scale,
        lambda x: held.scaled(x),
        lambda x: x * NESTED["scale"],
        lambda x: x * LINEAR.out_features,
        lambda x: x * len(itself),
        asserts,
        loop,
        makes,
        names_a_class,
        functools.partial(jax.nn.gelu, approximate=True),
        GivenNnx(jnp.tanh),
        GivenNnx(jax.nn.gelu),
        nnx.Sequential(linear(3), jnp.tanh, nnx.Dropout(0.5, deterministic=True)),
        nnx.MultiHeadAttention(3, 3, decode=False, rngs=nnx.Rngs(0)),
        nn.Sequential([nn.Dense(3), jnp.tanh]),
        LINEAR,
        jpipe.layer(LINEAR, lambda module, x: jnp.tanh(module(x))),
    ]
    jpipe.pipeline(layers, 2, balance=[len(layers)])
