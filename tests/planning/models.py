"""Small models in which layers share, stash, draw, loop and change; and plans."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import jpipe

from .. import reference as ref


class Model(NamedTuple):
    """Layers with a mini-batch of eight examples, and a loss.

    Attributes:
      layers: makes them.
      x: the input.
      targets: those of the loss.
      loss: of outputs and targets.
    """

    layers: Callable[[], list[Any]]
    x: Any
    targets: Any
    loss: Any = ref.mse


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        h = nn.BatchNorm(use_running_average=not train)(nn.Dense(6)(x))
        return nn.Dropout(0.5, deterministic=not train)(h)


def down(x):
    jpipe.stash("across", x)
    return jnp.tanh(x[:, ::2])


def up(x):
    return jnp.repeat(x, 2, axis=1) * jpipe.pop("across")


def tied():
    embed = nn.Embed(11, 6)
    return [embed, ref.dense(6), jpipe.layer(embed, "attend")]


def cross_entropy(logits, labels):
    found = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)
    return -jnp.mean(found)


X, T = ref.regression(8)
TOKENS = jnp.arange(40, dtype=jnp.int32).reshape(8, 5) % 11
MODELS = {
    "blocks": Model(ref.mlp, X, T),
    "norms": Model(lambda: [ref.dense(6), Normed(), Normed(), ref.dense(4)], X, T),
    "skips": Model(lambda: [ref.dense(6), down, ref.dense(3), up, ref.dense(4)], X, T),
    "tied": Model(tied, TOKENS, TOKENS, cross_entropy),
}


def profile(name: str, **options: Any) -> jpipe.Profile:
    """The profile of a model with its loss, on half of its mini-batch."""
    model = MODELS[name]
    given = {"num_microbatches": 2, "loss_fn": model.loss, "targets": model.targets}
    return jpipe.profile(model.layers(), model.x, **(given | options))


SAMPLE = jax.ShapeDtypeStruct((16, 8), jnp.float32)


def dense(blocks: int) -> list[Any]:
    """As many dense layers of one width, each with a tanh, and a last one."""
    each = [layer for _ in range(blocks) for layer in (nn.Dense(32), nn.tanh)]
    return [*each, nn.Dense(4)]


@functools.cache
def planned(blocks: int, **options: Any) -> jpipe.Plan:
    """A plan of `dense`, estimated: nothing is measured."""
    given = {"num_devices": 2, "num_microbatches": 4, "measure": False}
    given |= {"action_seconds": 0.0, "bandwidth": 1e9}
    return jpipe.plan(dense(blocks), SAMPLE, optax.adam(1e-3), **given | options)
