"""Where the examples are: in groups, along any axis, or single ones among them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import jpipe

from .. import reference as ref

KEY = jax.random.key(0)


class Follows(nn.Module):
    """A running mean of what it multiplies by a function of the rest of its input."""

    factor: Callable[..., Any]
    write: Callable[..., Any] = lambda mean, h: mean / 2 + h.reshape(-1, 4).mean(0) / 2

    @nn.compact
    def __call__(self, x, train):
        h = nn.Dense(4)(x["h"]) * self.factor(x)
        mean = self.variable("stats", "mean", jnp.zeros, (4,))
        if train and not self.is_initializing():
            mean.value = self.write(mean.value, jax.lax.stop_gradient(h))
        return {**x, "h": h}


def around(change, factor, back, write=Follows.write):
    return [
        lambda x: {**x, "h": change(x["h"])},
        Follows(factor, write),
        lambda x: back(x["h"]),
    ]


def time_first(x):
    return x.swapaxes(0, 1)


def popped(x):
    return jpipe.pop("scale")


def with_scale(x):
    jpipe.stash("scale", jnp.ones(4))
    return x


def same(x):
    return x


ROWS = {"h": 0, "mask": 0}
FOLLOWING = {
    "time first": (
        around(time_first, lambda x: x["mask"].T[..., None], time_first),
        ROWS,
    ),
    "tokens in one row": (
        around(
            lambda h: h.reshape(-1, 4),
            lambda x: x["mask"].reshape(-1, 1),
            lambda h: h.reshape(-1, 3, 4),
        ),
        ROWS,
    ),
    "two views": (
        around(
            lambda h: jnp.concatenate([h, 3 * h]),
            lambda x: jnp.tile(x["mask"], (2, 1))[..., None],
            lambda h: h[: len(h) // 2],
        ),
        ROWS,
    ),
    "examples along several axes": (
        around(same, lambda x: x["mask"].T[..., None], same),
        {"h": 0, "mask": 1},
    ),
    "what is not cut is as long": (
        around(same, lambda x: x["mask"].T, same),
        {"h": 0, "mask": None},
    ),
    "what is popped is as long": (
        [with_scale, *around(same, popped, same)],
        ROWS,
    ),
}


@pytest.mark.parametrize("name", FOLLOWING)
def test_examples_are_found_wherever_layers_put_them(name):
    layers, in_axes = FOLLOWING[name]
    # A micro-batch has as many as there are features.
    h = jax.random.normal(KEY, (8, 3, 4))
    x = {
        "h": h,
        "mask": jnp.ones({0: (8, 3), 1: (3, 8), None: (4, 3)}[in_axes["mask"]]),
    }
    pipe = jpipe.pipeline(layers, 2, balance=[len(layers)], in_axes=in_axes)
    variables = pipe.init(KEY, x)
    find = pipe.value_and_grad(ref.mse, has_state=True)
    (_, after), _ = find(variables, x, h)
    number = len(layers) - 2
    (dense,) = variables[number]["params"].values()
    mean = (h @ dense["kernel"] + dense["bias"]).mean((0, 1)) / 2
    if name == "two views":
        mean *= 2
    ref.assert_close(after[number]["stats"]["mean"], mean, 1e-5)


def test_single_ones_are_found_where_time_comes_first():
    layers = around(
        time_first, lambda _: 1, time_first, lambda mean, h: h[:, 0].mean(0)
    )
    x = {"h": jnp.ones((8, 3, 4))}
    pipe = jpipe.pipeline(layers, 2, balance=[3])
    variables = pipe.init(KEY, x)
    with pytest.raises(ValueError, match=r"layer 1 .* stats/mean, which holds single"):
        pipe.value_and_grad(ref.mse)(variables, x, x["h"])


class Ghost(nn.Module):
    """The running mean of virtual batches of 16 examples."""

    @nn.compact
    def __call__(self, x, train):
        groups = x.reshape(len(x) // 16, 16, -1)
        mean = self.variable("stats", "mean", jnp.zeros, (32,))
        if train and not self.is_initializing():
            mean.value = groups.mean(1).mean(0)
        return (groups - groups.mean(1, keepdims=True)).reshape(len(x), -1)


class GhostInTraining(Ghost):
    """The same that evaluates any number of examples."""

    @nn.compact
    def __call__(self, x, train):
        return super().__call__(x, train) if train or self.is_initializing() else x


@pytest.mark.parametrize("layer", [Ghost(), GhostInTraining()])
def test_groups_of_which_a_micro_batch_has_some_are_no_single_ones(layer):
    x = jax.random.normal(KEY, (64, 32))
    pipe = jpipe.pipeline([layer, nn.Dense(32)], 2, balance=[2])
    find = pipe.value_and_grad(ref.mse, has_state=True)
    (_, after), _ = find(pipe.init(KEY, x), x, x)
    ref.assert_close(after[0]["stats"]["mean"], x.mean(0), 1e-6)


def first_two(x):
    return {"h": x, "rest": x[:2].mean(0)}


def hardest(x):
    return {"h": x, "rest": x[jnp.argmax(jnp.abs(x).sum(-1))]}


def mean_of_all(x):
    return {"h": x, "rest": x.mean(0)}


def through(x):
    return {"h": jnp.sin(x["h"]), "rest": 2 * x["rest"]}


class Rest(nn.Module):
    """Remembers what comes beside the examples."""

    @nn.compact
    def __call__(self, x, train):
        rest = self.variable("stats", "rest", jnp.zeros, (4,))
        if train and not self.is_initializing():
            rest.value = x["rest"] if isinstance(x, dict) else jpipe.pop("rest")
        elif not isinstance(x, dict):
            jpipe.pop("rest")
        h = x["h"] if isinstance(x, dict) else x
        return h * self.param("w", nn.initializers.ones, (4,))


def stashing(layer):
    def stash(x):
        jpipe.stash("rest", layer(x)["rest"])
        return x

    return stash


@pytest.mark.parametrize("choose", [first_two, hardest, mean_of_all])
@pytest.mark.parametrize("way", ["returned", "passed on", "stashed"])
def test_single_ones_that_an_earlier_layer_chose_are_found(choose, way):
    layers = {
        "returned": [choose],
        "passed on": [choose, through],
        "stashed": [stashing(choose)],
    }[way]
    x = jnp.arange(32.0).reshape(8, 4)
    pipe = jpipe.pipeline([*layers, Rest()], 2, balance=[len(layers) + 1])
    find = pipe.value_and_grad(ref.mse, has_state=True)
    variables = pipe.init(KEY, x)
    if choose is not mean_of_all:
        with pytest.raises(ValueError, match="rest, which holds single ones of the 4"):
            find(variables, x, x)
        return
    (_, after), _ = find(variables, x, x)
    factor = 2 if way == "passed on" else 1
    ref.assert_close(after[-1]["stats"]["rest"], factor * x.mean(0), 1e-6)


def of_four(x):
    return {"h": x["h"].reshape(4, 4)}


def test_what_comes_after_a_layer_of_one_number_of_examples_is_followed():
    """A mean that is as long as there are examples is not of single ones."""
    x = {"h": jnp.ones((8, 4))}
    layers = [of_four, *around(same, lambda _: 1, same)]
    pipe = jpipe.pipeline(layers, 2, balance=[4])
    pipe.value_and_grad(ref.mse, has_state=True)(pipe.init(KEY, x), x, x["h"])


def test_it_is_told_which_layer_takes_no_other_number_of_examples():
    def first_two(x):
        return of_four({"h": x["h"][:2].repeat(2, 0)})

    x = {"h": jnp.ones((8, 4))}
    layers = [of_four, first_two, *around(same, lambda _: 1, same)]
    pipe = jpipe.pipeline(layers, 2, balance=[5])
    told = r"layer 3 .* stats/mean, .* or is it none .* Layer 0 .* no other .* than 4"
    with pytest.raises(ValueError, match=told):
        pipe.value_and_grad(ref.mse)(pipe.init(KEY, x), x, x["h"])


class Recurrent(nnx.Module):
    """Goes along the first axis, from where it ended with the last mini-batch."""

    def __init__(self, size):
        self.cell = nnx.SimpleCell(4, 4, rngs=nnx.Rngs(0))
        self.carry = nnx.BatchStat(jnp.zeros((size, 4)))

    def __call__(self, x):
        carry, outputs = self.carry[...], []
        for step in x:
            carry, y = self.cell(carry, step)
            outputs.append(y)
        self.carry[...] = jax.lax.stop_gradient(carry)
        return jnp.stack(outputs)


def test_a_carry_is_found_where_time_comes_first():
    x = jnp.arange(48.0).reshape(4, 3, 4)
    pipe = jpipe.pipeline([time_first, Recurrent(2), time_first], 2, balance=[3])
    with pytest.raises(ValueError, match="carry, which holds single ones of the 2"):
        pipe.value_and_grad(ref.mse)(pipe.init(KEY, x), x, x)
