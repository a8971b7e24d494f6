"""Modules of nnx that a pipeline cannot carry, and why."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jpipe

from ..errors.model import says
from .nnx_modules import KEY, Noisy


def test_missing_key_names_the_stream():
    x = jnp.ones((4, 3))
    pipe = jpipe.pipeline([nnx.relu, Noisy(nnx.Rngs(0, dropout=1))], 2)
    grad = pipe.value_and_grad(lambda y, t: y.mean())
    for rngs in (None, {"noise": KEY}):
        match = says("random stream for which there is no key", "rngs={'dropout': ")
        with pytest.raises(ValueError, match=match) as error:
            grad(({}, {}), x, x, rngs=rngs)
        assert "raised by layer 1 (Noisy) of stage 1" in error.value.__notes__[0]
    # Nothing is drawn in evaluation, or at a rate of zero.
    grad(({}, {}), x, x, train=False)
    pipe = jpipe.pipeline([nnx.Dropout(0.0, rngs=nnx.Rngs(0))], 2)
    pipe.apply(({},), x, train=True)


def test_modules_that_cannot_be_layers_are_all_listed():
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
    called = [linear.__call__, jax.jit(functools.partial(linear.__call__))]
    called.append(jax.jit(jax.checkpoint(linear)))
    with pytest.raises(TypeError) as error:
        jpipe.pipeline([linear, Takes(), Tree(), Reference(), *called], 2)
    lines = str(error.value).splitlines()[1:]
    expected = [
        "layer 1: Takes: the Variable type Params takes the name of what is trained",
        "layer 2: Tree is an nnx.Pytree; derive it from nnx.Module",
        "layer 3: Reference: a Param that is a reference",
        "layer 4: a function that calls a Linear",
        "layer 5: a function that calls a Linear",
        "layer 6: a function that calls a Linear",
    ]
    for line, start in zip(lines, expected, strict=True):
        assert line.startswith(f"  * {start}")


def test_variables_of_another_module_are_refused():
    pipe = jpipe.pipeline([nnx.Linear(3, 2, rngs=nnx.Rngs(0))], 2)
    with pytest.raises(ValueError, match=r"missing: .*'params'.*'bias'"):
        pipe.apply(({"params": {"kernel": jnp.ones((3, 2))}},), jnp.ones((2, 3)))
    with pytest.raises(ValueError, match=r"(?s)not those of this Linear.*params/bias"):
        pipe.modules(({"params": {"kernel": jnp.ones((3, 2))}},))
