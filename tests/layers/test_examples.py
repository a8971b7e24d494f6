"""States of which a mean over micro-batches would be another model."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
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


def by_data_in_sum(rows, at, new):
    return rows.at[jnp.argmax(new.mean(0))].set(new.mean(0).astype(rows.dtype))


def by_data_in_a_branch(rows, at, new):
    return jax.lax.cond(
        at % 2 == 0, by_data_in_sum, lambda *args: args[0], rows, at, new
    )


def by_data_in_a_loop(rows, at, new):
    def put(state):
        return state[0] + 1, by_data_in_sum(state[1], at, new)

    return jax.lax.while_loop(lambda state: state[0] < 2, put, (0, rows))[1]


def by_data_in_columns(rows, at, new):
    return by_data_in_sum(rows.reshape(4, 8).T, at, new.repeat(2, 1)[:, :4]).T.reshape(
        8, 4
    )


def by_data_that_decays(rows, at, new):
    rows = by_data_in_sum(0.9 * rows, at, new)
    return jnp.clip(rows / (1 + jnp.linalg.norm(rows)), -1, 1).at[0].set(0)


def first_rows(rows, at, new):
    return rows.at[: len(new)].set(new)


def padded(rows, at, new):
    new = jnp.pad(new, ((0, len(rows) - len(new)), (0, 0)))
    return jnp.where(jnp.any(new, 1, keepdims=True), new, rows)


def one(rows, at, new):
    return rows.at[0].set(new[0] / 2)


def in_order(rows, at, new):
    return rows.at[0].set(jnp.sort(new, 1)[0])


def in_the_order_of_another(rows, at, new):
    by = jnp.broadcast_to(new.sum(1, keepdims=True), new.shape)
    return rows.at[0].set(jax.lax.sort([by, new], dimension=0)[1][-1])


def in_a_loop(rows, at, new):
    def put(rows, i):
        return rows.at[i].set(new[0]), None

    return jax.lax.scan(put, rows, jnp.arange(2))[0]


def all_in_order(rows, at, new):
    return rows.at[: len(new)].set(jnp.sort(new, axis=1))


class Memory(nnx.Module):
    """Remembers the inputs of the last call, as many as a micro-batch has."""

    def __init__(self, size):
        self.dense = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        self.rows = nnx.BatchStat(jnp.zeros((size, 4)))

    def __call__(self, x):
        y = self.dense(x) + self.rows[...].mean(0)
        self.rows[...] = jax.lax.stop_gradient(x)
        return y


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
        (Carry(), r"layer 0 \(Carry\) .* carry/h, which holds single ones of the 2 ex"),
        (state(queue), r"layer 0 \(Holds\) .* memory/rows, which holds single ones"),
        (state(table), "memory/rows, which holds single"),
        (state(fifo), "memory/rows, which holds single"),
        (state(chosen), "memory/rows, which holds single"),
        (state(first_rows), "memory/rows, which holds single"),
        (state(padded), "memory/rows, which holds single"),
        (state(one), "memory/rows, which holds single"),
        (state(in_order), "memory/rows, which holds single"),
        (state(in_the_order_of_another), "memory/rows, which holds single"),
        (state(in_a_loop), "memory/rows, which holds single"),
        (state(all_in_order), "memory/rows, which holds single"),
        (state(by_data), "memory/rows, which holds single"),
        (state(by_data_in_sum), "memory/rows, of which it replaces places"),
        (state(by_data_in_a_branch), "memory/rows, of which it replaces places"),
        (state(by_data_in_a_loop), "memory/rows, of which it replaces places"),
        (state(by_data_in_columns), "memory/rows, of which it replaces places"),
        (state(by_data_that_decays), "memory/rows, of which it replaces places"),
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


def halved(rows, at, new):
    """A loop of one value, whose end reads what is made of no example."""
    limit = 1 + 0 * jnp.sum(rows)

    def halve(kept):
        return kept / 2 + 0 * jnp.sum(new)

    return jax.lax.while_loop(lambda kept: jnp.max(kept) > limit, halve, rows + 4)


def doubled(rows, at, new):
    for _ in range(60):
        rows = rows / 2 + rows / 2
    return rows + new.mean(0)


@pytest.mark.parametrize(
    "write",
    [
        halved,
        doubled,
        lambda rows, at, new: rows + jnp.zeros(4).at[jnp.argmax(new.mean(0))].set(1),
        lambda rows, at, new: 0.9 * rows + 0.1 * new.mean(0),
        lambda rows, at, new: rows.at[3].set(new.mean(0)),
        lambda rows, at, new: rows.at[at % 3].set(new.mean(0)),
        lambda rows, at, new: jnp.concatenate([rows[1:], new.mean(0)[None]]),
        lambda rows, at, new: rows.at[at % 3].set(jnp.sort(new, axis=1).mean(0)),
        lambda rows, at, new: rows.at[0].add(new.mean(0)),
        lambda rows, at, new: jnp.stack([*rows[:7], new.mean(0)]),
        lambda rows, at, new: rows.at[:4].set(new.T @ new),
        lambda rows, at, new: rows.at[2].set(jnp.median(new, 0)),
        lambda rows, at, new: rows.at[2].set(jnp.sort(new, 0)[-1]),
        lambda rows, at, new: rows.at[2].set(jnp.sort(new, 1).mean(0)),
        lambda rows, at, new: rows.at[3].set(new.reshape(2, -1, 4).mean(1)[1]),
        lambda rows, at, new: (
            rows + jax.ops.segment_sum(new, jnp.argmax(new, 1), 8, mode="drop")
        ),
    ],
)
def test_what_is_a_mean_is_kept(write):
    with pytest.warns(UserWarning, match="writes memory/at, which adds what") as caught:
        variables, after, x = train(state(write), 2)
    *mean, whole = [
        state(write).apply(variables, part, True, mutable=["memory"])[1]["memory"]
        for part in (x[:2], x[2:], x)
    ]
    rows = jnp.mean(jnp.stack([part["rows"] for part in mean]), 0)
    ref.assert_close(after["memory"]["rows"], rows, 1e-6)  # in single precision
    if "memory/rows" in str(caught[0].message):
        assert not np.allclose(rows, whole["rows"], atol=1e-3)


def test_a_memory_as_long_as_a_micro_batch_is_refused():
    """Of nnx, whose state does not grow with the input: other sizes do not fit."""
    x = jnp.arange(16.0).reshape(4, 4)
    tx = optax.sgd(0.1)
    for num_microbatches in (1, 2):
        pipe = jpipe.pipeline([Memory(4 // num_microbatches)], num_microbatches)
        state = pipe.init_train_state(KEY, x, tx)
        step = pipe.train_step(ref.mse, tx)
        if num_microbatches == 1:
            state, _ = step(state, x, x)
            np.testing.assert_array_equal(
                state.model_state[0]["batch_stats"]["rows"], x
            )
        else:
            with pytest.raises(ValueError, match="rows, which holds single ones of th"):
                step(state, x, x)


def test_what_no_mean_is_is_refused_of_shards_of_one_micro_batch_too():
    x = jnp.arange(32.0).reshape(8, 4)
    mesh = jax.make_mesh((1, 2), ("stage", "data"))
    pipe = jpipe.pipeline([state(one)], 1, mesh=mesh)
    with pytest.raises(ValueError, match="rows, which holds single ones of the 4"):
        pipe.value_and_grad(ref.mse)(pipe.init(KEY, x), x, x)


def test_examples_may_lie_along_any_axis():
    class Keeps(nn.Module):
        """Holds one example of those along the second axis."""

        @nn.compact
        def __call__(self, x, train):
            held = self.variable("memory", "held", jnp.zeros, (4,))
            if train and not self.is_initializing():
                held.value = jax.lax.stop_gradient(x[:, 0])
            return x * self.param("w", nn.initializers.ones, (4, 1))

    x = jnp.arange(24.0).reshape(4, 6)
    pipe = jpipe.pipeline([Keeps()], 3, in_axes=1, out_axes=1, target_axes=1)
    variables = pipe.init(KEY, x)
    with pytest.raises(ValueError, match="held, which holds single ones of the 2"):
        pipe.value_and_grad(ref.mse)(variables, x, x)


def test_integers_of_single_examples_are_refused():
    class Last(nnx.Module):
        """Adds the embedding of the last token of each example."""

        def __init__(self):
            self.embed = nnx.Embed(5, 4, rngs=nnx.Rngs(0))
            self.last = nnx.BatchStat(jnp.zeros(2, jnp.int32))

        def __call__(self, tokens):
            y = self.embed(tokens) + self.embed(self.last[...])
            self.last[...] = tokens
            return y

    tokens, targets = jnp.arange(4), jnp.zeros((4, 4))
    pipe = jpipe.pipeline([Last()], 2)
    with pytest.raises(ValueError, match="last, which holds single ones of the 2 ex"):
        pipe.value_and_grad(ref.mse)(pipe.init(KEY, tokens), tokens, targets)


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
