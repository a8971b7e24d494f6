"""Modules that a layer hides, whose values would be constants, are refused."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import jpipe

X = jnp.ones((4, 3))


class Pair(nnx.Module):
    def __init__(self):
        self.a = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
        self.b = nnx.Linear(3, 3, rngs=nnx.Rngs(1))


class Calls(nn.Module):
    """It is given a function."""

    function: Any

    @nn.compact
    def __call__(self, x):
        return self.function(nn.Dense(3)(x))


class Whole(nn.Module):
    def setup(self):
        self.first = nn.Dense(3)
        self.second = Calls(self.first.__call__)

    def __call__(self, x):
        return self.second(self.first(x))


GLOBAL = Pair()


def from_outside():
    pair, bound = Pair(), Whole().bind(Whole().init(jax.random.key(0), X))

    def default(x, module=pair):
        return module.b(x)

    return {
        "a variable": (lambda x: pair.b(x), r"takes pair\.b, a Linear"),
        "a global variable": (lambda x: GLOBAL.b(x), r"takes GLOBAL\.b, a Linear"),
        "a list": (
            (lambda parts: lambda x: parts[0](x))([pair.b]),
            r"\[0\], a Linear",
        ),
        "a method": ((lambda f: lambda x: f(x))(pair.b.__call__), "takes f, a Linear"),
        "a bound linen module": (lambda x: bound.first(x), "takes bound, a Whole"),
        "a default": (default, "takes a default, a Pair"),
        "in a partial": (functools.partial(lambda x, n: pair(x), n=1), "takes pair, "),
        "in a jitted one": (jax.jit(lambda x: pair.b(x)), r"takes pair\.b, a Linear"),
        "beside its own module": (
            jpipe.layer(pair.a, lambda a, x: pair.b(a(x))),
            r"takes pair\.b, a Linear",
        ),
        "a method in a part": (
            bound.second,
            "takes self.function, a Dense",
        ),
    }


@pytest.mark.parametrize("name", from_outside())
def test_a_layer_that_has_a_module_from_outside_is_refused(name):
    layer, says = from_outside()[name]
    with pytest.raises(TypeError, match=f"layer 1: .*{says}"):
        jpipe.pipeline([nn.Dense(3), layer], 2)


def test_a_stage_may_be_made_of_methods_of_a_module():
    dense = nn.Dense(3)
    stage = jpipe.Stage(dense.init, dense.apply)
    pipe = jpipe.pipeline([stage, nn.Dense(3)], 2)
    variables = pipe.init(jax.random.key(0), X)
    assert pipe.apply(variables, X).shape == X.shape
    with pytest.raises(
        TypeError, match=r"calls a Dense.*jpipe\.layer\(module, 'apply'"
    ):
        jpipe.pipeline([dense.apply], 2)


def test_what_is_no_bound_module_is_none_of_this():
    dense, values = nn.Dense(3), {"params": {"kernel": jnp.eye(3), "bias": X[0]}}
    graphdef, state = nnx.split(nnx.Linear(3, 3, rngs=nnx.Rngs(0)))
    layers = [
        lambda x: dense.apply(values, x),
        lambda x: nnx.merge(graphdef, state)(x),
        jpipe.layer(Whole(), lambda whole, x: whole(x)),
        Calls(jnp.tanh),
        lambda x: len([nn.Dense]) * x,
    ]
    jpipe.pipeline(layers, 2, balance=[5]).init(jax.random.key(0), X)


class Any_(nn.Module):
    """It passes on whatever it is told."""

    @nn.compact
    def __call__(self, x, **options):
        return nn.Dropout(0.5)(x, deterministic=not options.get("train", False))


class Told(nn.Module):
    @nn.compact
    def __call__(self, x, train=False, **options):
        return nn.Dropout(0.5)(x, deterministic=not train)


def test_a_module_that_takes_any_keywords_is_refused():
    with pytest.raises(TypeError, match=r"layer 0: Any_ is called with any arguments"):
        jpipe.pipeline([Any_()], 2)
    listed = jpipe.layer(Any_(), lambda module, x, train: module(x, train=train))
    jpipe.pipeline([listed, Told(), nn.Sequential([nn.Dense(3)])], 2, balance=[3])
