"""Long skip connections: transparent, straight, freed; every fault is named."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import jpipe

from .. import reference as ref
from ..errors.model import rows
from ..listing import gradient_of, moves, peak_bytes, plan_of_gradient


def keep(x):
    jpipe.stash("a", x)
    return x


def take(x):
    return x + jpipe.pop("a")


def test_skip_goes_straight_to_where_it_is_popped(moved):
    outer = [jpipe.isolate(layer, "outer") for layer in (keep, take)]
    inner = [jpipe.isolate(layer, "inner") for layer in (keep, take)]
    layers = [lambda x: x[:, :2], inner[0], inner[1], lambda x: x.sum(1, keepdims=True)]
    layers = [outer[0], *layers, outer[1]]
    pipe = jpipe.pipeline(layers, 1, balance=[2, 1, 2, 1])
    x, devices = jnp.ones((4, 3)), pipe.devices
    variables = pipe.init(jax.random.key(0), x)
    moved.clear()
    np.testing.assert_array_equal(pipe.apply(variables, x), np.full((4, 3), 5.0))
    # The input and the outer skip; none goes by way of the stages between.
    goals = [device for size, device in moved if size == x.size]
    assert goals == [devices[0], devices[3]]
    # Stage 1 hands on what it stashes, which goes straight from stage 0.
    assert str(pipe).splitlines()[-1] == (
        "skip connections: 'a' of 'inner': stage 0 to 2, 'a' of 'outer': stage 0 to 3"
    )


def test_a_cheap_layer_runs_in_its_stage_and_sends_what_it_returns():
    """The next stage doesn't compute it again from the input, which it doesn't get."""
    layers = [lambda x: (jnp.tanh(x), x), lambda pair: pair[0] + pair[1]]
    pipe = jpipe.pipeline(layers, 2, balance=[1, 1])
    x = jnp.ones((4, 3))
    tanh_and_x = 2 * x[:2].nbytes
    stages = plan_of_gradient(pipe, x, x).stages
    assert [stage.sent_bytes for stage in stages] == [tanh_and_x, 0]


WIDTHS = [6, 4, 2, 2, 3, 6]
NAMES = ["a", "b", "c", "c", "b", "a"]


def go_down(f, h):
    return jnp.tanh(f(h))


def go_up(f, h, skip):
    return f(jnp.repeat(h, 2, axis=1) * skip)


def unet_of_stashes():
    """Three layers down, three up, each of which reads what is as wide as it."""

    def down(f, h, name):
        y = go_down(f, h)
        jpipe.stash(name, y)
        return y[:, ::2]

    def up(f, h, name):
        return go_up(f, h, jpipe.pop(name))

    calls = [down] * 3 + [up] * 3
    return [
        jpipe.layer(nn.Dense(width), functools.partial(call, name=name))
        for width, name, call in zip(WIDTHS, NAMES, calls, strict=True)
    ]


def unet_of_dictionaries(hand_on):
    """Each layer hands on a dictionary of what later layers read."""

    def down(f, d, name):
        y = go_down(f, d["h"])
        return {**hand_on(d), name: y, "h": y[:, ::2]}

    def up(f, d, name):
        d = dict(hand_on(d))
        return {**d, "h": go_up(f, d["h"], d.pop(name))}

    calls = [down] * 3 + [up] * 3
    layers = [
        jpipe.layer(nn.Dense(width), functools.partial(call, name=name))
        for width, name, call in zip(WIDTHS, NAMES, calls, strict=True)
    ]
    return [lambda x: {"h": x}, *layers, lambda d: d["h"]]


def unet_by_hand(variables, x, targets):
    layers = [
        nn.Dense(width).bind(v) for width, v in zip(WIDTHS, variables, strict=True)
    ]
    skips = []
    for f in layers[:3]:
        skips.append(go_down(f, x))
        x = skips[-1][:, ::2]
    for f in layers[3:]:
        x = go_up(f, x, skips.pop())
    return ref.mse(x, targets)


# In `jax.jit` a trace has new variables for what is handed on.
@pytest.mark.parametrize("hand_on", [dict, jax.jit(dict)], ids=["plain", "jit"])
def test_what_a_dictionary_hands_on_goes_straight_to_where_it_is_read(hand_on):
    stashes = jpipe.pipeline(unet_of_stashes(), 2)
    dictionaries = jpipe.pipeline(
        unet_of_dictionaries(hand_on), 2, balance=[2, 1, 1, 1, 1, 2]
    )
    x, targets = np.random.default_rng(0).normal(size=(2, 4, 6)).astype(np.float32)
    variables = stashes.init(jax.random.key(0), x)
    programs = [gradient_of(pipe, x, targets)[0] for pipe in (stashes, dictionaries)]
    assert sorted(moves(programs[0])) == sorted(moves(programs[1]))
    assert peak_bytes(programs[0]) == peak_bytes(programs[1])
    plans = [plan_of_gradient(pipe, x, targets) for pipe in (stashes, dictionaries)]
    sent_bytes = [[stage.sent_bytes for stage in plan.stages] for plan in plans]
    assert sent_bytes[0] == sent_bytes[1]
    assert [plan.skips for plan in plans] == [
        (("'a'", 0, 5), ("'b'", 1, 4)),
        (("a", 0, 5), ("b", 1, 4)),
    ]

    loss, grads = stashes.value_and_grad(ref.mse)(variables, x, targets)
    placed = dictionaries.place(({}, *variables, {}))
    results = dictionaries.value_and_grad(ref.mse)(placed, x, targets)
    ref.assert_equal(results, (loss, ({}, *grads, {})))
    expected = jax.value_and_grad(unet_by_hand)(jax.device_get(variables), x, targets)
    grads = tuple([{"params": grad} for grad in grads])
    ref.assert_close((loss, grads), expected, 1e-5)


def init(*layers):
    return lambda: jpipe.sequential(layers).init(jax.random.key(0), jnp.ones((2, 3)))


def keep_too(x):
    jpipe.stash("b", x)
    return x


FAULTS = {
    ValueError: {
        "'a' is popped by layer 0 (take), and was not stashed before": init(take, keep),
        "'a' is popped by layer 2 (take), and was popped by layer 1 (take)": init(
            keep, take, take
        ),
        "'a' is stashed twice: by layer 0 (keep) and layer 1 (keep)": init(keep, keep),
        "'a' is stashed twice: by layer 0 (keep) and layer 2 (keep)": init(
            keep, take, keep
        ),
        "the skip connections do not fit ... 'a' of 'ns' is stashed by layer 0 (keep) "
        "and never popped ... 'b' is stashed by layer 1 (keep_too) and never": init(
            jpipe.isolate(keep, "ns"), keep_too
        ),
    },
    RuntimeError: {
        "is for the layers of a pipeline": lambda: jpipe.stash("a", 1),
        "pop('a')": lambda: jpipe.pop("a"),
        "return the value from it and stash it": init(jax.jit(keep), take),
        "pop it outside and pass it in": init(keep, jax.jit(take)),
        "pass it in": init(keep, lambda x: jax.lax.map(take, x)),
    },
    TypeError: {
        "stash: the name comes first and must be hashable ... it is a Dynamic": init(
            lambda x: jpipe.stash(x, "a")
        ),
        "layer 0 (<lambda>) returned None; it must return what the next": init(
            lambda x: jpipe.stash("a", x), take
        ),
    },
}


@pytest.mark.parametrize(("call", "error", "match"), rows(FAULTS))
def test_wrong_uses_of_stash_and_pop_are_refused(call, error, match):
    with pytest.raises(error, match=match):
        call()


def test_skips_may_depend_on_training():
    def first(x, train):
        if train:
            jpipe.stash("q", x)
        return x

    def second(x, train):
        return x + jpipe.pop("q") if train else x

    x, _ = ref.regression(4)
    pipe = jpipe.pipeline([first, second], 2)
    loss, _ = pipe.value_and_grad(ref.mse)(({}, {}), x, jnp.zeros_like(x))
    ref.assert_close(loss, jnp.mean((2 * x) ** 2), 1e-6)
    ref.assert_equal(pipe.apply(({}, {}), x), x)
