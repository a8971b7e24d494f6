"""Batch norms of one micro-batch alone do what they do in Flax: nothing is merged."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import jpipe

from .. import reference as ref

KEY = jax.random.key(0)
TOKENS, WIDTH = 3, 4


def batch():
    return 2 * jax.random.normal(KEY, (6, TOKENS, WIDTH)) + 1


def masked(norm, x):
    return norm(x, mask=x[..., :1] > 0)


def twice(norm, x):
    return norm(2 * norm(x) + 1)


class Linen(nn.Module):
    use: Any
    kind: type = nn.BatchNorm

    @nn.compact
    def __call__(self, x, train: bool):
        return self.use(self.kind(not train, momentum=0.9, name="norm"), x)


class Nnx(nnx.Module):
    def __init__(self, use):
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.9, rngs=nnx.Rngs(0))
        self.use = use

    def __call__(self, x):
        return self.use(self.norm, x)


def kept(norm, x):
    """Reads what the norm has left, as a rule of one's own does."""
    y = norm(x)
    return y + norm.mean[...]


def trained(layer, num_microbatches=1):
    """The loss, and the statistics after a mini-batch."""
    x = batch()
    pipe = jpipe.sequential([layer, jnp.sin], num_microbatches)
    find = pipe.value_and_grad(ref.mse, has_state=True)
    return x, find(pipe.init(KEY, x), x, x)


def expect(found, y, left, x):
    """Checks a loss, and what a norm left."""
    (loss, state), _ = found
    ref.assert_close(loss, ref.mse(jnp.sin(y), x), ref.FLOAT32)
    ref.assert_close(state[0]["batch_stats"]["norm"], left, ref.FLOAT32)


USES = [masked, twice]


@pytest.mark.parametrize("kind", [nn.BatchNorm, nn.remat(nn.BatchNorm)])
@pytest.mark.parametrize("use", USES)
def test_those_of_linen(use, kind):
    module = Linen(use, kind)
    x, found = trained(module)
    variables = module.init(KEY, x, train=True)
    y, state = module.apply(variables, x, train=True, mutable=["batch_stats"])
    expect(found, y, state["batch_stats"]["norm"], x)
    with pytest.raises(ValueError, match="or take num_microbatches=1"):
        trained(module, 2)


@pytest.mark.parametrize("use", [*USES, lambda norm, x: nnx.remat(masked)(norm, x)])
def test_those_of_nnx(use):
    x, found = trained(Nnx(use))
    module = Nnx(use)
    y = module(x)
    left = {"mean": module.norm.mean[...], "var": module.norm.var[...]}
    expect(found, y, left, x)
    with pytest.raises(ValueError, match="or take num_microbatches=1"):
        trained(Nnx(use), 2)


def test_statistics_keep_their_dtype(double):
    """Those of linen are float32 whatever the input is, which a pipeline keeps."""
    x, ((_, state), _) = trained(Linen(lambda norm, x: norm(x)))
    assert x.dtype == jnp.float64
    assert state[0]["batch_stats"]["norm"]["mean"].dtype == jnp.float32
