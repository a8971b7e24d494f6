"""Layers and losses that read what was changed since: built again, they are of now."""

import functools
import itertools
import types
import warnings

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
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


@flax.struct.dataclass
class Average:
    value: jax.Array
    decay: float = flax.struct.field(pytree_node=False)


class Averaged(nn.Module):
    decay: float

    @nn.compact
    def __call__(self, x):
        init = lambda: Average(jnp.zeros(x.shape[-1]), self.decay)  # noqa: E731
        own = self.variable("averages", "x", init).value
        return x * own.decay


def test_variables_of_equal_arrays_keep_what_is_static_in_them():
    pipe = jpipe.pipeline([Averaged(0.9), Averaged(0.5)], 2)
    x = jnp.ones((4, 3))
    variables = pipe.init(jax.random.key(0), x)
    assert [v["averages"]["x"].decay for v in variables] == [0.9, 0.5]
    assert pipe.apply(variables, x)[0, 0] == pytest.approx(0.45)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_equal_layers_get_what_their_initializer_gives_to_each(count):
    given = itertools.count()

    def following(key, shape, dtype):
        return jnp.full(shape, np.float32(next(given)), dtype)

    layers = [nn.Dense(3, kernel_init=following) for _ in range(count)]
    pipe = jpipe.pipeline(layers, 2, devices=jax.devices()[:1] * count)
    variables = pipe.init(jax.random.key(0), jnp.ones((4, 3)))
    found = [float(v["params"]["kernel"][0, 0]) for v in variables]
    assert len(set(found)) == count
    assert found == sorted(found)


def test_the_state_of_an_optimizer_is_made_by_what_it_reads_now(monkeypatch):
    def init(params):
        return jax.tree.map(lambda leaf: jnp.full_like(leaf, GAIN), params)

    def update(updates, state, params=None):
        return jax.tree.map(lambda g, s: -0.1 * g - s, updates, state), state

    x, targets = ref.regression(4)
    tx = optax.GradientTransformation(init, update)
    for gain in (0.0, 2.0):
        monkeypatch.setitem(globals(), "GAIN", gain)
        pipe = jpipe.pipeline([nn.Dense(4)], 2)
        state = pipe.init_train_state(jax.random.key(0), x, tx)
        assert all((leaf == gain).all() for leaf in jax.tree.leaves(state.opt_state))
        after, _ = pipe.train_step(ref.mse, tx, donate=False)(state, x, targets)
        grads = pipe.value_and_grad(ref.mse)(state.variables, x, targets)[1]
        expected = jax.tree.map(
            lambda p, g, own=gain: p - 0.1 * g - own, state.params, grads
        )
        ref.assert_close(after.params, expected, 1e-6)


def test_skips_may_change_between_two_builds(monkeypatch):
    def stashing(x):
        jpipe.stash(f"skip {GAIN}", 2 * x)
        return x

    def popping(x):
        return x + jpipe.pop(f"skip {GAIN}")

    x, targets = ref.regression(4)
    pipe = jpipe.pipeline([nn.Dense(4), stashing, popping], 2)
    variables = pipe.init(jax.random.key(0), x)
    found = []
    for gain in (2.0, 3.0):  # the first since variables were made
        monkeypatch.setitem(globals(), "GAIN", gain)
        found.append(pipe.value_and_grad(ref.mse)(variables, x, targets))
    ref.assert_equal(*found)


def swapped(x):
    return HERE.value(x)


def test_executables_of_one_text_that_read_two_refs_are_two():
    """Of a `jax.Ref` the text has no more than that there is one."""
    pipe = jpipe.pipeline([jnp.tanh], 1)
    refs = [jax.new_ref(jnp.asarray(value)) for value in (2.0, 5.0)]
    x, targets = jnp.full((2, 1), 3.0), jnp.zeros((2, 1))
    (one,) = jax.device_put([jnp.ones(())], pipe.devices[0])
    found = [pipe.jit(lambda t, r=r: t * r[...])(one) for r in refs]
    assert found == [2.0, 5.0]
    losses = [lambda y, t, r=r: r[...] * ref.mse(y, t) for r in refs]
    found = [pipe.value_and_grad(loss)(({},), x, targets)[0] for loss in losses]
    assert found[1] == 2.5 * found[0]
    refs[0][...] = 4.0
    assert pipe.value_and_grad(losses[0])(({},), x, targets)[0] == 2 * found[0]


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


@pytest.mark.parametrize("calls", [1, 2])
def test_a_step_that_is_called_again_costs_nothing(calls):
    x, targets = ref.regression(4)
    pipe, tx = jpipe.pipeline([nn.Dense(4)], 2), optax.sgd(0.1)
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(31):
            step = pipe.train_step(ref.mse, tx)
            for _ in range(calls):
                state, _ = step(state, x, targets)
    said = ["once, before the loop" in str(warning.message) for warning in caught]
    assert any(said) == (calls == 1)
