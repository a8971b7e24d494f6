"""States of which a mean over micro-batches would be another model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jpipe

from .. import reference as ref

KEY = jax.random.key(0)


class Carry(nn.Module):
    """A recurrent cell that goes on where the last mini-batch ended."""

    @nn.compact
    def __call__(self, x, train):
        carry = self.variable("carry", "h", jnp.zeros, (x.shape[0], 4))
        h = jnp.tanh(nn.Dense(4)(x) + carry.value)
        if train and not self.is_initializing():
            carry.value = jax.lax.stop_gradient(h)
        return h


def state(write):
    class Holds(nn.Module):
        """Writes to a table of eight rows."""

        @nn.compact
        def __call__(self, x, train):
            x = nn.Dense(4)(x)
            rows = self.variable("memory", "rows", jnp.zeros, (8, 4))
            at = self.variable("memory", "at", jnp.zeros, (), jnp.int32)
            if train and not self.is_initializing():
                new = jax.lax.stop_gradient(x)
                rows.value = write(rows.value, at.value, new)
                at.value = (at.value + len(x)) % 8
            return x

    return Holds()


def queue(rows, at, new):
    return jax.lax.dynamic_update_slice(rows, new, (at, 0))


def table(rows, at, new):
    return rows.at[(at + jnp.arange(len(new))) % 8].set(new)


def fifo(rows, at, new):
    return jnp.concatenate([rows[len(new) :], new])


def chosen(rows, at, new):
    return jnp.where(at < 4, jax.jit(table)(rows, at, new), rows)


def by_data(rows, at, new):
    nearest = jnp.argmax(rows @ new.T, axis=0)
    return rows.at[nearest].set(new.astype(rows.dtype))


def train(layer, num_microbatches):
    x, _ = ref.regression(4)
    x = x[:, :4]
    pipe = jpipe.pipeline([layer], num_microbatches, devices=jax.devices()[:1])
    variables = pipe.init(KEY, x)
    (_, after), _ = pipe.value_and_grad(ref.mse, has_state=True)(variables, x, x)
    return variables[0], after[0], x


@pytest.mark.parametrize(
    ("layer", "match"),
    [
        (Carry(), r"layer 0 \(Carry\) .* carry/h, which has an axis for the 2 examp"),
        (state(queue), r"layer 0 \(Holds\) .* memory/rows, of which it replaces some"),
        (state(table), "memory/rows, of which it replaces"),
        (state(fifo), "memory/rows, of which it replaces"),
        (state(chosen), "memory/rows, of which it replaces"),
        (state(by_data), "memory/rows, of which it replaces"),
    ],
)
def test_what_no_mean_is_is_refused_but_for_one_micro_batch(layer, match):
    with pytest.raises(ValueError, match=match):
        train(layer, 2)
    variables, after, x = train(layer, 1)
    name = next(name for name in after)
    whole = jax.tree.map(jnp.asarray, variables)
    expected = layer.apply(whole, x, True, mutable=[name])[1]
    # Compiled as a whole, in single precision.
    ref.assert_close(after, expected, 1e-6)


@pytest.mark.parametrize(
    "write",
    [
        lambda rows, at, new: 0.9 * rows + 0.1 * new.mean(0),
        lambda rows, at, new: rows.at[3].set(new.mean(0)),
        lambda rows, at, new: rows.at[0].add(new.mean(0)),
        lambda rows, at, new: jnp.stack([*rows[:7], new.mean(0)]),
    ],
)
def test_what_is_a_mean_is_kept(write):
    variables, after, x = train(state(write), 2)
    mean = [
        state(write).apply(variables, part, True, mutable=["memory"])[1]["memory"]
        for part in (x[:2], x[2:])
    ]
    rows = jnp.mean(jnp.stack([part["rows"] for part in mean]), 0)
    ref.assert_close(after["memory"]["rows"], rows, 1e-6)  # in single precision


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_a_norm_of_complex_numbers_is_refused(kind):
    made = {
        "linen": lambda: nn.BatchNorm(use_bias=False, use_scale=False),
        "nnx": lambda: nnx.BatchNorm(
            3, use_bias=False, use_scale=False, rngs=nnx.Rngs(0)
        ),
    }
    x = jnp.ones((4, 3)) * (1 + 2j)
    pipe = jpipe.pipeline([made[kind](), jnp.abs], 2)
    variables = pipe.init(KEY, x)
    loss = pipe.value_and_grad(lambda y, t: jnp.mean(y), has_state=True)
    with pytest.raises(ValueError, match="complex"):
        loss(variables, x, np.zeros(4))
