"""Examples that are taken apart and put together again: what was done is measured.

That each of several pieces became something else no order of examples tells.
"""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from jax.scipy.sparse.linalg import bicgstab, cg

import jpipe

from .. import reference as ref
from .asked import KEY, PARTS, WIDTH, check_left, check_told, data, gradient_by


def halves(x):
    return x[: len(x) // 2], x[len(x) // 2 :]


def each_its_own(x):
    first, second = halves(x)
    return jnp.concatenate([jnp.tanh(first), jnp.sin(second)])


def without_condition(x):
    """The first eighth of a batch, as of guidance without a classifier."""
    count = max(1, len(x) // 8)
    return jnp.concatenate([jnp.zeros_like(x[:count]), x[count:]])


def the_first_alone(x):
    return jnp.concatenate([jnp.tanh(x[:1]), x[1:]])


def members(x):
    """An ensemble, each member of which has a part of the batch."""
    scales = jnp.linspace(0.5, 2, 2 * WIDTH).reshape(2, 1, WIDTH)
    return jnp.tanh(x.reshape(2, -1, WIDTH) * scales).reshape(-1, WIDTH)


def mapped(x):
    scales = jnp.array([1.0, 2.0])
    return jax.vmap(jnp.multiply)(x.reshape(2, -1, WIDTH), scales).reshape(-1, WIDTH)


def stopped(x):
    first, second = jnp.split(x, 2)
    return jnp.concatenate([first, jax.lax.stop_gradient(second)])


def stopped_one_by_one(x):
    keep = len(x) // 2
    rows = [x[i] if i < keep else jax.lax.stop_gradient(x[i]) for i in range(len(x))]
    return jnp.stack(rows)


def solved(x):
    return cg(lambda v: v * (1 + x**2), x, maxiter=3)[0]


def solved_with_others(x):
    return cg(lambda v: x @ (x.T @ v) + v, x)[0]


def stabilized(x):
    return bicgstab(lambda v: v * (1 + x**2), x, maxiter=2)[0]


RESULTS = "gives other results for examples together than for parts of them"
GRADIENTS = "has a backward that makes something of the cotangents of several examples"
FOLLOWS = "computes with what is made of all examples"
TOLD = {
    each_its_own: RESULTS,
    without_condition: RESULTS,
    the_first_alone: RESULTS,
    members: "tells examples apart by their place in the batch",
    mapped: "tells examples apart by their place in the batch",
    stopped: GRADIENTS,
    stopped_one_by_one: GRADIENTS,
    solved: FOLLOWS,
    solved_with_others: FOLLOWS,
    stabilized: FOLLOWS,
}


def in_chunks(x):
    return jnp.concatenate([*map(jnp.tanh, halves(x))])


def in_pairs(x):
    scales = jnp.array([1.0, 2.0])[:, None]
    return (x.reshape(-1, 2, WIDTH) * scales).reshape(-1, WIDTH)


def time_first(x):
    """Steps of time before examples, as recurrent layers have them, and merged."""
    steps = x.reshape(len(x), 2, -1).swapaxes(0, 1)
    made = jnp.tanh(steps.reshape(-1, WIDTH // 2)).reshape(steps.shape)
    return made.swapaxes(0, 1).reshape(x.shape)


def solved_alone(x):
    matrices = jnp.eye(WIDTH) + x[:, :, None] * x[:, None]
    return jnp.linalg.solve(matrices, x[..., None])[..., 0]


class Ensemble(nn.Module):
    """Each member of which has a part of the batch, and factors of its own."""

    @nn.compact
    def __call__(self, x):
        scales = self.param("scales", nn.initializers.normal(1), (2, 1, WIDTH))
        return nn.Dense(WIDTH)((x.reshape(2, -1, WIDTH) * scales).reshape(-1, WIDTH))


APART = [in_chunks, in_pairs, time_first, solved_alone]


@pytest.mark.parametrize("layer", TOLD)
def test_pieces_that_become_something_else_are_told(layer):
    check_told(layer, TOLD[layer])


@pytest.mark.parametrize("layer", APART)
def test_pieces_that_do_not_are_left_alone(layer):
    check_left(layer)


def test_an_ensemble_in_one_batch_is_told():
    with pytest.warns(UserWarning, match=rf"layer 1 \(Ensemble\) {RESULTS}"):
        gradient_by(Ensemble())


def pieces(first, second):
    """A mean loss of which each half is another."""

    def loss(y, t):
        each = jnp.sum((y - t) ** 2, -1)
        half = len(each) // 2
        return jnp.concatenate([first(each[:half]), second(each[half:])]).mean()

    return loss


def loss_of(loss_fn, num_microbatches=PARTS, reduction="mean"):
    pipe = jpipe.sequential([nn.Dense(WIDTH)], num_microbatches)
    find = pipe.value_and_grad(loss_fn, reduction=reduction)
    return find(pipe.init(KEY, data()), data(), jnp.cos(data()))


def test_a_loss_of_pieces_is_measured_and_so_are_its_gradients():
    little, stopped = pieces(jnp.tanh, jnp.sin), pieces(jnp.sin, jax.lax.stop_gradient)
    with pytest.raises(ValueError, match="loss_fn is, of random numbers, "):
        loss_of(little)
    with pytest.raises(ValueError, match=f"loss_fn {GRADIENTS}"):
        loss_of(pieces(jnp.abs, lambda each: jnp.abs(jax.lax.stop_gradient(each))))
    with pytest.raises(ValueError, match="loss_fn is, of random numbers, "):
        loss_of(stopped)
    with pytest.raises(ValueError, match="loss_fn is, of random numbers, "):
        loss_of(lambda y, t: (len(y) * little(y, t) + 0.0, len(y)), PARTS, "weighted")
    alike = pieces(jnp.sqrt, jnp.sqrt)
    ref.assert_close(loss_of(alike), loss_of(alike, 1), 1e-5)


def shifted(x):
    """Each example in the place of the one after it, and none in the first."""
    return jnp.concatenate([jnp.zeros_like(x[:1]), x[:-1]])


def test_a_loss_is_not_blamed_for_layers_that_put_examples_elsewhere():
    with pytest.raises(ValueError, match=r"with one another, as the layers put examp"):
        gradient_by(shifted, loss_fn=ref.mse)
