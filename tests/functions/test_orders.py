"""Of which example each element is, followed through programs made by chance."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from hypothesis import event, given, settings
from hypothesis import strategies as st

import jpipe
from jpipe._mixing import _ordered
from jpipe._mixing._made import EACH, OTHER, taken_in
from jpipe._mixing._pairs import Numbers
from jpipe._mixing._results import results

from .. import reference as ref

FEW, GROWTH, TOKENS, WIDTH = 4, 3, 2, 6
NUMBERS = Numbers(GROWTH, FEW)
COUNTS = NUMBERS.counts


def halves(x):
    return jnp.split(x, 2)


def in_pairs(x):
    return x.reshape(-1, 2, *x.shape[1:])


# What moves elements, and leaves as many of each example.
MOVES = {
    "turned": lambda x: x[::-1],
    "shifted": lambda x: jnp.roll(x, 1, axis=0),
    "shifted back": lambda x: jnp.roll(x, -1, axis=0),
    "halves exchanged": lambda x: jnp.concatenate(halves(x)[::-1]),
    "halves side by side": lambda x: jnp.stack(halves(x), 1).reshape(x.shape),
    "pairs exchanged": lambda x: in_pairs(x)[:, ::-1].reshape(x.shape),
    "every second first": lambda x: jnp.concatenate([x[::2], x[1::2]]),
    "tokens first": lambda x: x.swapaxes(0, 1).reshape(x.shape),
    "tokens turned": lambda x: x[:, ::-1],
    "tokens merged": lambda x: x.reshape(-1, WIDTH)[:, ::-1].reshape(x.shape),
    "heads": lambda x: (
        x.reshape(*x.shape[:2], 2, 3).swapaxes(1, 2).reshape(-1, 3).reshape(x.shape)
    ),
    "one more token": lambda x: jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, 1:],
    "one more example": lambda x: jnp.pad(x, ((2, 1), (0, 0), (0, 0)))[2:-1],
    "repeated": lambda x: jnp.repeat(x, 3, axis=0)[1::3],
    "turned by places": lambda x: x[len(x) - 1 - jnp.arange(len(x))],
    "shifted by places": lambda x: jnp.take(x, (jnp.arange(len(x)) + 1) % len(x), 0),
    "one cut at a place": lambda x: jnp.concatenate(
        [jax.lax.dynamic_slice_in_dim(x, i, len(x) - i) for i in (1, 0)]
    )[: len(x)],
    "beside itself": lambda x: jnp.tile(x, (3, 1, 1))[len(x) : 2 * len(x)],
}
# What makes something of elements at the same places, or of several.
MEETS = {
    "a curve": jnp.tanh,
    "other features": lambda x: x[..., jnp.array([0, 2, 1, 3, 5, 4])],
    "taken along the width": lambda x: jnp.take_along_axis(
        x, jnp.argsort(x, axis=-1), axis=-1
    ),
    "shifted in pairs": lambda x: (
        in_pairs(x) - in_pairs(x).mean(1, keepdims=True) / 3
    ).reshape(x.shape),
    "shifted by tokens": lambda x: x - x.mean(1, keepdims=True) / 3,
    "among tokens": lambda x: jax.nn.softmax(x @ x.swapaxes(1, 2)) @ x,
    "along the tokens": lambda x: jnp.cumsum(x, axis=1),
    "sorted by width": lambda x: jnp.sort(x, axis=-1),
    "beside a half": lambda x: x * jnp.concatenate([halves(x)[0]] * 2),
    "beside the first": lambda x: x * x[:1],
    "shifted in four": lambda x: (
        in_four(x) - in_four(x).mean(1, keepdims=True) / 3
    ).reshape(x.shape),
    "attention in pairs": lambda x: attention(in_pairs(x).reshape(-1, 2, 12)).reshape(
        x.shape
    ),
    "attention in four": lambda x: attention(in_four(x).reshape(4, -1, 12)).reshape(
        x.shape
    ),
}


def in_four(x):
    return x.reshape(4, -1, *x.shape[1:])


def attention(x):
    return jax.nn.softmax(x @ x.swapaxes(1, 2) / 9) @ x


def followed(function):
    """How its result is made of examples."""
    shapes = [jax.ShapeDtypeStruct((n, TOKENS, WIDTH), jnp.float32) for n in COUNTS]
    one, other = (jax.make_jaxpr(function)(shape) for shape in shapes)
    (made,) = results(one, other, [taken_in(3, 0, COUNTS)], NUMBERS)
    return made


def chain(names, steps):
    def run(x):
        for name in names:
            x = steps[name](x)
        return x

    return run


chains = st.lists(st.sampled_from([*MOVES]), min_size=1, max_size=5)


@settings(deadline=None, max_examples=60)
@given(chains)
def test_each_element_is_of_the_example_whose_number_it_carries(names):
    move = chain(names, MOVES)
    made = followed(move)
    for count, order in zip(COUNTS, made.orders.each, strict=True):
        numbers = np.arange(count, dtype=np.float32)[:, None, None]
        carried = move(jnp.broadcast_to(numbers, (count, TOKENS, WIDTH)))
        np.testing.assert_array_equal(np.broadcast_to(order, carried.shape), carried)
    assert made.orders.exact


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.sampled_from([*MOVES, *MEETS]), min_size=1, max_size=4), st.booleans()
)
def test_examples_that_come_together_are_told_and_no_others(names, beside):
    steps = chain(names, MOVES | MEETS)

    def function(x):
        return x * steps(x) if beside else steps(x)

    x = jax.random.normal(jax.random.key(0), (GROWTH * FEW, TOKENS, WIDTH))
    parts = jnp.concatenate([function(part) for part in jnp.split(x, GROWTH)])
    made = followed(function)
    mixed = not np.allclose(function(x), parts, atol=1e-5)
    if made.kind != EACH and made.why:
        assert mixed
    elif made.orders and made.orders.exact:
        assert mixed != made.orders.are_in_place(0, COUNTS, COUNTS)
    else:
        event("nobody knows")


@pytest.mark.parametrize("name", [*MOVES, *MEETS])
def test_each_step_alone(name):
    """So that none of them is one that nobody follows."""
    made = followed((MOVES | MEETS)[name])
    assert made.kind == OTHER or made.orders.exact


def test_equal_orders_are_equal():
    few, other = (taken_in(3, 0, COUNTS).orders for _ in range(2))
    assert few == other
    assert hash(few) == hash(other)
    turned = followed(MOVES["turned"]).orders
    assert all(a != b for a, b in itertools.permutations([few, turned], 2))


def test_a_fault_of_the_check_is_told_and_stops_no_training(monkeypatch):
    def broken(eqn, order):
        raise KeyError("dimensions")

    monkeypatch.setitem(_ordered.MOVES, "rev", broken)
    layers = [nn.Dense(WIDTH), lambda x: x * x[:, ::-1]]
    x = jnp.ones((8, WIDTH))
    pipe = jpipe.sequential(layers, 2)
    variables = pipe.init(jax.random.key(0), x)
    told = r"cannot follow whether examples come together.*KeyError\('dimensions'\)"
    with pytest.warns(UserWarning, match=told):
        pipe.value_and_grad(ref.mse)(variables, x, x)
