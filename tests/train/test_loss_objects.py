"""Losses that are objects: told apart by what they hold, which is read at each call."""

import dataclasses
import functools
import types
from array import array

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jpipe

from .. import reference as ref


class Scaled:
    """A loss whose equality says nothing of what it holds."""

    def __init__(self, scale):
        self.scale = scale
        self.calls = 0

    def __eq__(self, other):
        return isinstance(other, Scaled)

    def __hash__(self):
        return 0

    def __call__(self, y, t):
        return self.scale * jnp.mean((y - t) ** 2)

    def counting(self, y, t):
        self.calls += 1
        return self(y, t)


class Slotted(Scaled):
    __slots__ = ("__hidden",)

    def __init__(self, scale):
        self.__hidden = scale

    def __call__(self, y, t):
        return self.__hidden * jnp.mean((y - t) ** 2)

    scale = property(
        lambda self: self.__hidden,
        lambda self, value: setattr(self, "_Slotted__hidden", value),
    )


@dataclasses.dataclass
class Data:
    scale: float

    def __call__(self, y, t):
        return self.scale * jnp.mean((y - t) ** 2)


class Derived(Scaled):
    def __call__(self, y, t):
        return super().__call__(y, t)


class Handing(Scaled):
    def __call__(self, y, t):
        return scaled_by(self, y, t)


def scaled_by(loss, y, t):
    return loss.scale * jnp.mean((y - t) ** 2)


class InNumpy(Scaled):
    """Its scale changes in place."""

    def __init__(self, scale):
        self.held = {"scale": [np.asarray(scale, np.float32)]}

    def __call__(self, y, t):
        return self.held["scale"][0] * jnp.mean((y - t) ** 2)

    scale = property(
        lambda self: self.held["scale"][0],
        lambda self, value: self.held["scale"][0].__setitem__((), value),
    )


class InMemory(Scaled):
    """Its scale changes in place, in an array of the given kind."""

    def __init__(self, kind, scale):
        self.held = kind([scale])

    def __call__(self, y, t):
        return self.held.item(0) * jnp.mean((y - t) ** 2)

    scale = property(
        lambda self: self.held.item(0),
        lambda self, value: self.held.fill(value),
    )


class Recorded(np.ndarray):
    """A subclass, as that of a file mapped to memory is."""


class InBytes(Scaled):
    def __init__(self, scale):
        self.held = array("d", [scale])

    def __call__(self, y, t):
        return self.held[0] * jnp.mean((y - t) ** 2)

    scale = property(
        lambda self: self.held[0],
        lambda self, value: self.held.__setitem__(0, value),
    )


class Linen(nn.Module):
    @nn.compact
    def __call__(self, y, t):
        scale = self.param("scale", nn.initializers.constant(1.0), ())
        return scale * jnp.mean((y - t) ** 2)


class Nnx(nnx.Module):
    def __init__(self, scale):
        self.held = nnx.Variable(jnp.float32(scale))

    def __call__(self, y, t):
        return self.held[...] * jnp.mean((y - t) ** 2)

    @property
    def scale(self):
        return self.held[...]

    @scale.setter
    def scale(self, value):
        self.held[...] = jnp.float32(value)


MAKERS = {
    "object": Scaled,
    "slots": Slotted,
    "dataclass": Data,
    "super": Derived,
    "handed on": Handing,
    "numpy": InNumpy,
    "subclass of numpy": lambda s: InMemory(lambda x: np.array(x).view(Recorded), s),
    "array": InBytes,
    "nnx": Nnx,
}


@functools.cache
def model():
    """A pipeline that counts how often it is traced, its variables and data."""
    traces = []

    def counted(x):
        traces.append(1)
        return jnp.tanh(x)

    pipe = jpipe.pipeline([ref.dense(4), counted], 2)
    x, targets = ref.regression(4)
    return pipe, pipe.init(jax.random.key(0), x), x, targets, traces


@functools.cache
def plain():
    """The loss and its gradients on one device, of a scale of one."""
    _, variables, *data, _ = model()
    params = ref.params_of(variables)
    return ref.value_and_grad([ref.dense(4), jnp.tanh], params, *data)


def check(gradient, scale):
    """That the loss is scaled so, and how many traces that took."""
    _, variables, x, targets, traces = model()
    before = len(traces)
    found = gradient(variables, x, targets)
    count = len(traces) - before
    expected = jax.tree.map(lambda leaf: leaf * scale, plain())
    ref.assert_close(found, expected, ref.FLOAT32)
    return count


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "itself") for name in MAKERS),
        *((name, "method") for name in ("object", "slots", "numpy", "nnx")),
        *((name, "partial") for name in ("object", "dataclass", "array", "nnx")),
    ],
)
def test_what_a_loss_holds_is_read_at_each_call(name, kind):
    loss = MAKERS[name](1.0)
    same = {"method": loss.__call__, "partial": functools.partial(loss)}
    gradient = model()[0].value_and_grad(same.get(kind, loss))
    check(gradient, 1.0)
    assert not check(gradient, 1.0)
    loss.scale = 3.0
    assert [check(gradient, 3.0) > 0 for _ in range(2)] == [True, False]
    loss.scale = 1.0
    if name != "nnx":  # whose array is another one
        assert not check(gradient, 1.0)


def test_losses_that_are_equal_are_two_if_they_hold_something_else():
    pipe = model()[0]
    for one, other in [(Scaled(1.0), Scaled(2.0)), (Data(1.0), Data(2.0))]:
        check(pipe.value_and_grad(one), 1.0)
        check(pipe.value_and_grad(other), 2.0)


def test_a_bound_linen_module_is_a_loss():
    loss = Linen()
    one, two = ({"params": {"scale": jnp.float32(scale)}} for scale in (1, 2))
    pipe = model()[0]
    bound = loss.bind(one)
    gradient = pipe.value_and_grad(bound)
    check(gradient, 1.0)
    assert not check(gradient, 1.0)
    assert check(pipe.value_and_grad(loss.bind(two)), 2.0)
    assert not check(gradient, 1.0)


def test_a_train_step_reads_its_loss_at_each_call():
    pipe, _, x, targets, traces = model()
    loss, tx = Scaled(1.0), optax.sgd(0.1)
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    step = pipe.train_step(loss.counting, tx, donate=False)
    losses, counts = [], []
    for loss.scale in (1.0, 1.0, 2.0, 2.0):
        before = len(traces)
        losses.append(float(step(state, x, targets)[1]["loss"]))
        counts.append(len(traces) - before > 0)
    np.testing.assert_allclose(losses, np.array([1, 1, 2, 2]) * losses[0], 1e-6)
    assert counts == [True, False, True, False]


class Trainer:
    """What it has come to is beside its loss, which does not read it."""

    def __init__(self, pipe, x):
        self.scale, self.number = 1.0, 0
        self.state = pipe.init_train_state(jax.random.key(0), x, optax.sgd(0.1))
        self.step = pipe.train_step(self.loss, optax.sgd(0.1))

    def loss(self, y, t):
        return self.scaled(jnp.mean((y - t) ** 2))

    def scaled(self, value):
        return self.scale * value

    def train(self, x, targets):
        self.state, _ = self.step(self.state, x, targets)
        self.number += 1


def test_what_a_loss_does_not_read_may_change():
    pipe, _, x, targets, traces = model()
    trainer = Trainer(pipe, x)
    trainer.train(x, targets)
    before = len(traces)
    for _ in range(3):
        trainer.train(x, targets)
    assert len(traces) == before
    trainer.scale = 2.0
    trainer.train(x, targets)
    assert len(traces) > before


def test_a_loss_that_never_stays_the_same_is_told_what_that_costs():
    loss = Scaled(0.0)
    gradient = model()[0].value_and_grad(loss)
    for loss.scale in (1.0, 2.0, 3.0):
        check(gradient, loss.scale)
    loss.scale = 4.0
    says = "holds something else for the 5th time; each time all is compiled anew"
    with pytest.warns(UserWarning, match=says):
        check(gradient, 4.0)
    loss.scale = 5.0
    check(gradient, 5.0)


def test_a_step_built_again_reads_what_its_loss_closes_over():
    weight = 1.0

    def loss(y, t):
        return weight * ref.mse(y, t)

    pipe = jpipe.pipeline([ref.dense(4)], 2)
    x, targets = ref.regression(4)
    variables = pipe.init(jax.random.key(0), x)
    first, _ = pipe.value_and_grad(loss)(variables, x, targets)
    weight = 5.0
    second, _ = pipe.value_and_grad(loss)(variables, x, targets)
    assert float(second) == pytest.approx(5 * float(first), rel=1e-6)


FACTOR = 1.0


def penalty(y):
    return FACTOR * (y**2).mean()


def penalized(y, t):
    return ref.mse(y, t) + penalty(y)


# Of another dtype JAX keeps what it has cast, by the identity of the array.
FACTORS = np.ones(4, np.float32)


def scaled(factor, y, t):
    return factor * ref.mse(y, t)


helper = functools.partial(scaled, 1.0)
MODULE = types.ModuleType("losses")
MODULE.factor = 1.0


def wraps(loss):
    @functools.wraps(loss)
    def wrapper(y, t):
        return loss(y, t)

    return wrapper


class Penalized:
    factor = 1.0

    def __call__(self, y, t):
        return self.factor * penalized(y, t)


@pytest.mark.parametrize(
    "make",
    [
        lambda: penalized,
        lambda: functools.partial(penalized),
        lambda: functools.partial(functools.partial(penalized)),
        Penalized,
        lambda: Penalized().__call__,
        lambda: wraps(penalized),
        lambda: lambda y, t: jax.vmap(lambda a, b: FACTOR * ref.mse(a, b))(y, t).mean(),
        lambda: lambda y, t: sum([FACTOR * ref.mse(a, t) for a in [y]]),
        lambda: lambda y, t: MODULE.factor * ref.mse(y, t),
        lambda: lambda y, t: Penalized.factor * ref.mse(y, t),
        lambda: lambda y, t: jnp.mean(FACTORS * (y - t) ** 2),
        lambda: lambda y, t: helper(y, t),
    ],
)
def test_and_what_its_helpers_and_its_class_take(make, monkeypatch):
    pipe = jpipe.pipeline([ref.dense(4)], 2)
    x, targets = ref.regression(4)
    variables = pipe.init(jax.random.key(0), x)
    y = pipe.apply(variables, x)
    loss_fn = make()
    for factor in (1.0, 5.0):
        monkeypatch.setitem(globals(), "FACTOR", factor)
        monkeypatch.setitem(
            globals(), "helped", lambda y, t, f=factor: f * ref.mse(y, t)
        )
        monkeypatch.setattr(Penalized, "factor", factor)
        monkeypatch.setattr(MODULE, "factor", factor)
        FACTORS[:] = factor
        loss, _ = pipe.value_and_grad(loss_fn)(variables, x, targets)
        np.testing.assert_allclose(loss, loss_fn(y, targets), rtol=1e-6)


def test_a_loss_that_closes_over_what_is_trained_is_refused():
    pipe = jpipe.pipeline([ref.dense(4)], 2)
    x, targets = ref.regression(4)
    tx = optax.sgd(0.1)
    state = pipe.init_train_state(jax.random.key(0), x, tx)

    def decayed(y, t):
        return ref.mse(y, t) + optax.tree.norm(state.params, squared=True)

    match = r"without a gradient(.|\n)*pipe.jit(.|\n)*variables\[0\]\['params'\]"
    with pytest.raises(TypeError, match=match):
        pipe.train_step(decayed, tx)(state, x, targets)
    with pytest.raises(TypeError, match=match):
        pipe.value_and_grad(decayed)(state.variables, x, targets)
    copies = jax.tree.map(jnp.copy, state.params)
    pipe.value_and_grad(lambda y, t: ref.mse(y, t) + optax.tree.norm(copies))(
        state.variables, x, targets
    )
