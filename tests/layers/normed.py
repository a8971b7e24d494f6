"""A layer with a batch norm, and what training makes of its statistics."""

import jax
import optax
from flax import linen as nn

from .. import reference as ref


class Normed(nn.Module):
    """A dense layer and a batch norm, whose statistics are far from zero."""

    momentum: float = 0.9

    @nn.compact
    def __call__(self, x, train: bool):
        x = 3 * nn.Dense(6)(x) + 100
        return nn.BatchNorm(not train, momentum=self.momentum, name="norm")(x)


def committed(pipe, x, targets, steps=1):
    state = pipe.init_train_state(jax.random.key(0), x, optax.sgd(0.0))
    step = pipe.train_step(ref.mse, optax.sgd(0.0))
    for _ in range(steps):
        state, _ = step(state, x, targets)
    return state
