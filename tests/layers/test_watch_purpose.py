"""Dropouts that are on in evaluation on purpose, behind parameters for other things."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jpipe

KEY, X = jax.random.key(0), jnp.ones((8, 4))
RNGS = {"dropout": jax.random.key(1)}


class Sampled(nn.Module):
    """Drops in evaluation too; its parameter leaves out the head behind."""

    @nn.compact
    def __call__(self, x, features_only=False):
        if features_only:
            return x
        x = nn.Dropout(0.5, deterministic=False)(x)
        return x + 0 * nn.Dense(4)(x)


class Shaped(nn.Module):
    """The same with a head that is not a module."""

    @nn.compact
    def __call__(self, x, features_only=False):
        if features_only:
            return x
        x = nn.Dropout(0.5, deterministic=False)(x)
        return jnp.concatenate([x, x], axis=1)


class SampledNnx(nnx.Module):
    def __init__(self):
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
        self.head = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    def __call__(self, x, features_only=False):
        if features_only:
            return x
        x = self.dropout(x, deterministic=False)
        return x + 0 * self.head(x)


class Inside(nn.Module):
    """What holds the dropout holds more."""

    @nn.compact
    def __call__(self, x, with_block=True):
        return Sampled()(x) if with_block else x


def outputs(listed, train):
    pipe = jpipe.sequential([listed], 2)
    y = pipe.apply(pipe.init(KEY, X), X, rngs=RNGS, train=train)
    return np.asarray(y)


@pytest.mark.parametrize("kind", [Sampled, Shaped, SampledNnx, Inside])
@pytest.mark.parametrize("train", [False, True])
def test_a_parameter_for_something_else_is_not_blamed(kind, train):
    assert set(np.unique(outputs(kind(), train))) == {0, 2}


class Guarded(nn.Module):
    """Its parameter leaves out the dropout and nothing else."""

    @nn.compact
    def __call__(self, x, inference=False):
        x = nn.Dense(4)(x)
        return x if inference else nn.Dropout(0.5, deterministic=False)(x)


class Held(nn.Module):
    """The same, where the dropout is in a module of its own."""

    @nn.compact
    def __call__(self, x, inference=False):
        return x if inference else Noise()(x)


class Noise(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.5, deterministic=False)(x)


class Known(nn.Module):
    """By its name the parameter is a switch, whatever else it does."""

    @nn.compact
    def __call__(self, x, is_eval=False):
        if is_eval:
            return x
        return nn.Dense(4)(nn.Dropout(0.5, deterministic=False)(x))


class GuardedNnx(SampledNnx):
    def __call__(self, x, inference=False):
        x = self.head(x)
        return x if inference else self.dropout(x, deterministic=False)


@pytest.mark.parametrize(
    ("listed", "name"),
    [
        (Guarded(), "inference"),
        (Held(), "inference"),
        (jpipe.layer(Known(), lambda module, x: module(x)), "is_eval"),
        (GuardedNnx(), "inference"),
    ],
)
def test_a_parameter_that_may_say_whether_it_is_trained_is_asked_for(listed, name):
    with pytest.raises(ValueError, match=f"nobody fills {name}=False of"):
        outputs(listed, False)
