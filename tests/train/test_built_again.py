"""Layers and losses that read what was changed since: built again, they are of now."""

import functools
import types

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn

import jpipe

from .. import reference as ref

HERE = types.SimpleNamespace()


def weighted(scale):
    return lambda y, t: scale * (y - t) ** 2


class Focal:
    def __init__(self, power):
        self.power = power

    def __call__(self, y, t):
        return jnp.abs(y - t) ** self.power


class Scaled:
    @property
    def scale(self):
        return HERE.value

    def loss(self, y, t):
        return (self.scale * (y - t) ** 2).mean()


def scaled(function):
    @functools.wraps(function)
    def wrapper(y, t):
        return HERE.value * function(y, t)

    return wrapper


@jax.custom_vjp
def ruled(y):
    return y**2


ruled.defvjp(lambda y: (y**2, y), lambda y, g: (g * y * HERE.value,))


def two(y, t):
    return (HERE.value[0](y, t) + HERE.value[1](y, t)).mean()


def criterion(y, t):
    return HERE.value(y, t).mean()


# The loss, and what it finds before and after.
READ = {
    "function of a library": (criterion, optax.l2_loss, optax.huber_loss),
    "functions of one name": (
        two,
        (weighted(1.0), weighted(2.0)),
        (weighted(3.0), weighted(2.0)),
    ),
    "keywords of a partial": (
        criterion,
        functools.partial(optax.huber_loss, delta=0.1),
        functools.partial(optax.huber_loss, delta=0.2),
    ),
    "schedule": (
        lambda y, t: HERE.value(1) * ((y - t) ** 2).mean(),
        optax.linear_schedule(1.0, 0.0, 10),
        optax.linear_schedule(2.0, 0.0, 10),
    ),
    "bound method": (criterion, Focal(1.0).__call__, Focal(4.0).__call__),
    "decorator": (scaled(lambda y, t: ((y - t) ** 2).mean()), 1.0, 3.0),
    "property": (Scaled().loss, 1.0, 3.0),
    "rule of a gradient": (lambda y, t: ruled(y - t).mean(), 1.0, 3.0),
    "array": (
        lambda y, t: (HERE.value * (y - t) ** 2).mean(),
        jnp.arange(3.0),
        jnp.ones(3),
    ),
}


@pytest.mark.parametrize("name", READ)
def test_a_step_that_is_built_again_has_the_loss_of_now(name):
    loss, before, after = READ[name]
    x, targets = ref.regression(4)
    pipe = jpipe.pipeline([nn.Dense(4), nn.Dense(3)], 2)
    variables = pipe.init(jax.random.key(0), x)

    def by_hand(params):
        first, last = params
        y = (x @ first["kernel"] + first["bias"]) @ last["kernel"] + last["bias"]
        return loss(y, targets[:, :3])

    for HERE.value in (before, after, before):
        found = pipe.value_and_grad(loss)(variables, x, targets[:, :3])
        expected = jax.value_and_grad(by_hand)(ref.params_of(ref.on_host(variables)))
        ref.assert_close(found, expected, 1e-5)


def test_what_a_build_was_traced_with_is_not_what_it_was_built_with():
    def loss(y, t):
        return HERE.value * ((y - t) ** 2).mean()

    x, targets = ref.regression(4)
    pipe = jpipe.pipeline([nn.Dense(4)], 2)
    variables = pipe.init(jax.random.key(0), x)
    HERE.value = 1.0
    expected, _ = pipe.value_and_grad(loss)(variables, x, targets[:, :4])
    late = pipe.value_and_grad(loss)
    HERE.value = 5.0
    assert late(variables, x, targets[:, :4])[0] == pytest.approx(5 * expected)
    HERE.value = 1.0
    assert pipe.value_and_grad(loss)(variables, x, targets[:, :4])[0] == expected


GAIN = 1.0


def amplified(x):
    return jax.vmap(lambda row: GAIN * row)(x)


class Amplified(nn.Module):
    config: types.SimpleNamespace

    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(self.config.gain() * x)


class Drawn(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.initializers.constant(GAIN)
        return x * self.param("scale", init, (4,))


CONFIG = types.SimpleNamespace(gain=lambda: GAIN)
READERS = [
    amplified,
    Amplified(CONFIG),
    jpipe.layer(nn.Dense(4), lambda m, x: CONFIG.gain() * m(x)),
]


@pytest.mark.parametrize("layer", READERS)
def test_a_step_that_is_built_again_has_the_layers_of_now(layer, monkeypatch):
    x, targets = ref.regression(4)
    pipe = jpipe.pipeline([nn.Dense(4), layer], 2)
    variables = pipe.init(jax.random.key(0), x)

    def by_hand(params, gain):
        y = x @ params[0]["kernel"] + params[0]["bias"]
        if layer is amplified:
            y = gain * y
        elif isinstance(layer, Amplified):
            own = params[1]["Dense_0"]
            y = gain * y @ own["kernel"] + own["bias"]
        else:
            y = gain * (y @ params[1]["kernel"] + params[1]["bias"])
        return ((y - targets) ** 2).mean()

    params = ref.params_of(ref.on_host(variables))
    find = pipe.value_and_grad(ref.mse)
    before = find(variables, x, targets)
    ref.assert_close(before, jax.value_and_grad(by_hand)(params, 1.0), 1e-5)
    applied = pipe.apply(variables, x)
    monkeypatch.setitem(globals(), "GAIN", 3.0)
    ref.assert_equal(find(variables, x, targets), before)  # as under jax.jit
    found = pipe.value_and_grad(ref.mse)(variables, x, targets)
    ref.assert_close(found, jax.value_and_grad(by_hand)(params, 3.0), 1e-5)
    # What is trained is what is evaluated.
    assert not jnp.allclose(pipe.apply(variables, x), applied)
    loss = ((pipe.apply(variables, x) - targets) ** 2).mean()
    assert loss == pytest.approx(float(found[0]), rel=1e-5)


def test_what_is_made_again_has_the_initializers_and_the_widths_of_now(monkeypatch):
    x, _ = ref.regression(4)
    pipe = jpipe.pipeline([nn.Dense(4), Drawn()], 2)
    for gain in (1.0, 3.0):
        monkeypatch.setitem(globals(), "GAIN", gain)
        variables = pipe.init(jax.random.key(0), x)
        assert (variables[1]["params"]["scale"] == gain).all()
    wide = types.SimpleNamespace(width=2)
    layer = jpipe.Stage(
        init=lambda key, x: {"params": {"w": jnp.ones((x.shape[-1], wide.width))}},
        apply=lambda variables, x: x @ variables["params"]["w"],
    )
    pipe = jpipe.pipeline([nn.Dense(4), layer], 2)
    for wide.width in (2, 3):
        variables = pipe.init(jax.random.key(0), x)
        assert pipe.apply(variables, x).shape == (4, wide.width)
        value = pipe.value_and_grad(lambda y, t: (y - t[:, :1]).mean())
        assert value(variables, x, x)[1][1]["w"].shape == (4, wide.width)


def test_it_is_said_what_building_in_a_loop_costs():
    x, targets = ref.regression(4)
    pipe = jpipe.pipeline([nn.Dense(4)], 2)
    variables = pipe.init(jax.random.key(0), x)

    def step():
        def loss(y, t):
            return ((y - t) ** 2).mean()

        return pipe.value_and_grad(loss)(variables, x, targets)

    for _ in range(29):
        step()
    with pytest.warns(UserWarning, match="once, before the loop") as caught:
        step()
    assert caught[0].filename == __file__
    step()
