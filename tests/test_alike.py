"""Equal stages: traced once, compiled once for a device; and nothing else is equal."""

import collections
import dataclasses
import itertools
import re
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jpipe
from jpipe._functions._objective import Objective
from jpipe._layers import _alike

from . import reference as ref

WIDTH = 6
X, TARGETS = ref.regression(8)
RNGS = {"dropout": jax.random.key(1)}
# As text it is shortened.
LONG = np.zeros((1200, 1), np.float32)


def program_of(layers, balance=None, x=X, rngs=None, **options):
    options.setdefault("devices", jax.devices()[:1] * len(balance or layers))
    pipe = jpipe.pipeline(layers, 2, balance=balance, **options)
    variables = pipe.init(jax.random.key(0), x)
    find = pipe._library.gradients(Objective(ref.mse))
    return find(variables, x, TARGETS, rngs, True).program


def around(*middle):
    """Stages that are given and give the same width, between two that do not."""
    return [ref.dense(WIDTH), *middle, ref.dense(4)]


def are_equal(first, second, **options):
    """Whether two layers, each a stage between others, share what is traced."""
    rows = program_of(around(first, second), **options).rows
    return rows[1][0].task.closed is rows[2][0].task.closed


class Block(nnx.Module):
    """A residual block, with what may differ between two of them."""

    def __init__(self, seed, scale=1.0, rate=None, about=None, kept=None, config=None):
        rngs = nnx.Rngs(seed)
        options = {} if about is None else {"kernel_metadata": {"about": about}}
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs, **options)
        self.scale = scale
        self.config = config
        self.drop = None if rate is None else nnx.Dropout(rate, rngs=rngs)
        self.cache = None if kept is None else nnx.Intermediate(jnp.array(kept))

    def __call__(self, x):
        y = self.scale * self.linear(x)
        return x + (y if self.drop is None else self.drop(y))


class Scaled(nn.Module):
    """Equal attributes need not do the same: to dtypes 1 and 1.0 differ."""

    scale: float

    @nn.compact
    def __call__(self, x):
        return x * self.scale + nn.Dense(WIDTH)(x)


class Hidden(nn.Module):
    """What a class leaves out of comparisons and of its text still counts."""

    scale: Any = dataclasses.field(default=1.0, compare=False, repr=False)

    @nn.compact
    def __call__(self, x):
        return x + jnp.mean(jnp.asarray(self.scale)) * nn.Dense(WIDTH)(x)


class Named:
    """A callable that takes all that bear its name for itself."""

    def __init__(self, scale):
        self.scale = scale

    def __call__(self, x):
        return self.scale * x

    def __eq__(self, other):
        return isinstance(other, Named)

    def __hash__(self):
        return 7

    def __repr__(self):
        return "Named"


@dataclasses.dataclass(frozen=True)
class Config:
    """A user's dataclass, with a field that it does not compare."""

    scale: float = dataclasses.field(default=1.0, compare=False, repr=False)


class Slots:
    """A base whose slot is no field of what is derived from it."""

    __slots__ = ("scale",)


@dataclasses.dataclass(eq=False)
class Slotted(Slots):
    """A dataclass that holds more than its fields."""

    value: dataclasses.InitVar[float]

    def __post_init__(self, value):
        self.scale = value

    def __call__(self, x):
        return self.scale * x


@dataclasses.dataclass(init=False, eq=False)
class Items(dict):
    """A dataclass that holds items too."""

    def __call__(self, x):
        return self["scale"] * x


class Pair(collections.namedtuple("Pair", "a b")):
    """A named tuple with an attribute beside its items."""

    def __new__(cls, scale):
        pair = super().__new__(cls, 0, 0)
        pair.scale = scale
        return pair

    def __call__(self, x):
        return self.scale * x


class Configured(nn.Module):
    """A module with a config that it calls or reads."""

    config: Any

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(WIDTH)(x)
        return self.config(x) if callable(self.config) else self.config.scale * x


class Twice(nn.Module):
    """A module held twice shares its parameters; two equal ones do not."""

    first: nn.Module
    second: nn.Module

    @nn.compact
    def __call__(self, x):
        return self.second(self.first(x))


class Made(nn.Module):
    """A module whose hidden field says how it is initialized."""

    scale: float = dataclasses.field(default=1.0, compare=False, repr=False)

    @nn.compact
    def __call__(self, x):
        return nn.Dense(WIDTH, kernel_init=nn.initializers.constant(self.scale))(x)


class Dropped(nn.Module):
    """A block that draws other numbers in each layer."""

    @nn.compact
    def __call__(self, x, train: bool):
        return nn.Dropout(0.5, deterministic=not train)(nn.Dense(WIDTH)(x))


class Again(nn.Module):
    """A block within `nn.remat`, which is given keys that nothing draws from."""

    @nn.compact
    def __call__(self, x):
        return nn.remat(nn.Dense)(WIDTH)(x)


class WithList(nn.Module):
    """A module that has no hash."""

    widths: list

    @nn.compact
    def __call__(self, x):
        for width in self.widths:
            x = nn.Dense(width)(x)
        return x


class TestWhatIsEqual:
    @pytest.mark.parametrize(
        ("first", "second"),
        [
            (nn.Dense(WIDTH), nn.Dense(WIDTH)),
            (ref.Residual(WIDTH), ref.Residual(WIDTH)),
            (Again(), Again()),
            (WithList([WIDTH]), WithList([WIDTH])),
            (Configured(Config(2.0)), Configured(Config(2.0))),
            (Configured(jnp.sin), Configured(jnp.sin)),
            (Dropped(), Dropped()),
            (Twice(*[nn.Dense(WIDTH)] * 2), Twice(*[nn.Dense(WIDTH)] * 2)),
            (Block(1, config=Config(2.0)), Block(2, config=Config(2.0))),
            (Block(1, rate=0.5), Block(2, rate=0.5)),
            (
                nn.Dropout(0.5, deterministic=False),
                nn.Dropout(0.5, deterministic=False),
            ),
            (jnp.tanh, jnp.tanh),
            (Block(1), Block(2)),
            (Block(1, scale=2.0), Block(2, scale=2.0)),
            (jpipe.layer(nn.Dense(WIDTH)), jpipe.layer(nn.Dense(WIDTH))),
        ],
    )
    def test_these(self, first, second):
        assert are_equal(first, second, rngs=RNGS)

    @pytest.mark.parametrize(
        ("first", "second"),
        [
            (nn.Dense(WIDTH), nn.Dense(WIDTH, use_bias=False)),
            (nn.Dense(WIDTH), ref.Residual(WIDTH)),
            (nn.Dense(WIDTH, name="a"), nn.Dense(WIDTH, name="b")),
            (Scaled(1), Scaled(1.0)),
            (jnp.tanh, jnp.sin),
            (lambda x: 2 * x, lambda x: 3 * x),
            (WithList([WIDTH]), WithList([WIDTH, WIDTH])),
            (Hidden(1.0), Hidden(3.0)),
            (Hidden(0.0), Hidden(-0.0)),
            (Hidden(LONG), Hidden(LONG + 1)),
            (Configured(Named(1.0)), Configured(Named(3.0))),
            (Configured(Config(1.0)), Configured(Config(3.0))),
            (
                Twice(*[nn.Dense(WIDTH)] * 2),
                Twice(nn.Dense(WIDTH), nn.Dense(WIDTH)),
            ),
            (Block(1, config=Config(1.0)), Block(1, config=Config(3.0))),
            (Block(1, config=Named(1.0)), Block(1, config=Named(3.0))),
            (Block(1), Block(1, scale=2.0)),
            (Block(1, scale=1), Block(1, scale=1.0)),
            (Block(1), Block(1, about="rows")),
            (Block(1, kept=1.0), Block(1, kept=2.0)),
            (Block(1, rate=0.5), Block(1, rate=0.25)),
            (Block(1, kept=1.0), Block(1, kept=1.0)),
            (Slotted(1.0), Slotted(3.0)),
            (Items(scale=1.0), Items(scale=3.0)),
            (Pair(1.0), Pair(3.0)),
            (nn.Dense(WIDTH), Block(1)),
        ],
    )
    def test_not_these(self, first, second):
        assert not are_equal(first, second, rngs=RNGS)

    def test_they_are_not_made_alike_either(self):
        """What was made for an earlier pipeline serves a later one too."""
        for scale in (1.0, 3.0):
            made = jpipe.sequential([Made(scale), Made(2 * scale)]).init(
                RNGS["dropout"], X
            )
            kernels = [entry["params"]["Dense_0"]["kernel"][0, 0] for entry in made]
            assert kernels == [scale, 2 * scale]

    @pytest.mark.parametrize("hashable", [True, False])
    def test_nor_is_one_made_as_before_its_config_changed(self, hashable):
        class Settings:
            """A config that may be changed, such as those of `ml_collections`."""

            if not hashable:
                __hash__ = None

        class Made(nn.Module):
            settings: Any

            @nn.compact
            def __call__(self, x):
                init = nn.initializers.constant(self.settings.scale)
                return nn.Dense(WIDTH, kernel_init=init)(x)

        settings = Settings()
        for settings.scale in (1.0, 3.0):
            made = jpipe.sequential([Made(settings)]).init(jax.random.key(0), X)
            assert made[0]["params"]["Dense_0"]["kernel"][0, 0] == settings.scale

    def test_not_with_another_input(self):
        layers = [nn.Dense(WIDTH), nn.Dense(WIDTH), nn.Dense(WIDTH), nn.Dense(4)]
        rows = program_of(layers).rows  # the first is given a width of five
        first, second, third, _ = (row[0].task.closed for row in rows)
        assert first is not second
        assert second is third

    def test_not_with_other_skip_connections(self):
        def stash(x):
            jpipe.stash("skip", x)
            return x

        def pop(x):
            return x + jpipe.pop("skip")

        def both(namespace):
            return [jpipe.isolate(layer, namespace) for layer in (stash, pop)]

        rows = program_of(around(*both("a"), *both("b")), [1, 2, 2, 1]).rows
        assert rows[1][0].task.closed is not rows[2][0].task.closed

    def test_not_where_one_keeps_what_the_other_computes_again(self):
        layers = around(ref.Residual(WIDTH), ref.Residual(WIDTH))
        remat = ["full", "full", "none", "none"]
        rows = program_of(layers, remat=remat).rows
        first, second = (row[0].programs for row in rows[1:3])
        assert rows[1][0].task.closed is rows[2][0].task.closed
        assert first.derivatives is not second.derivatives


class Counted(nn.Module):
    """A dense layer that counts how often Flax calls it."""

    calls: ClassVar[list] = []

    @nn.compact
    def __call__(self, x):
        self.calls.append(x.shape)
        return nn.Dense(WIDTH)(x)


class TestWhatIsMadeOnce:
    def test_the_trace(self):
        def calls(number):
            Counted.calls.clear()
            program_of(around(*(Counted() for _ in range(number))))
            return len(Counted.calls)

        calls(1)  # which compiles what makes its parameters
        assert calls(5) == calls(1)

    def test_on_one_device_the_compiled_programs(self, caplog):
        layers = around(*(ref.Residual(WIDTH) for _ in range(6)))
        pipe = jpipe.pipeline(layers, 4, balance=[1] * 8, schedule="interleaved")
        variables = pipe.init(jax.random.key(0), X)
        assert [jax.devices().index(d) for d in pipe.devices] == [0, 1, 2, 3] * 2
        with jax.log_compiles(), caplog.at_level("WARNING"):
            pipe.value_and_grad(ref.mse)(variables, X, TARGETS)
        ended = re.findall(r"XLA compilation of jit\((stage\w+)\)", caplog.text)
        names = ["stage0", "stage1_5", "stage2_6", "stage3", "stage4"]
        programs = [f"{name}_{op}" for name in names for op in ("forward", "backward")]
        zeros = [f"{name}_zeros" for name in [*names, "stage7"]]
        assert sorted(ended) == sorted([*programs, *zeros, "stage7_forward_backward"])


def test_names_of_programs_that_many_stages_share_stay_short():
    """JAX makes file names of them: of its compilation cache, of dumps of XLA."""
    rows = program_of(around(*(jnp.tanh for _ in range(9)))).rows
    (programs,) = {row[0].programs for row in rows[1:-1]}
    assert programs.forward.__name__ == "stage1_2_3_4_and_5_more_forward"


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "zb_v"])
def test_equal_stages_train_as_one_device_does(double, schedule):
    layers = [ref.Residual(WIDTH, jnp.float64) for _ in range(8)]
    x, targets = jax.random.normal(jax.random.key(3), (2, 10, WIDTH), jnp.float64)
    tx = optax.adam(1e-2)
    pipe = jpipe.pipeline(layers, 4, schedule=schedule, balance=[1] * 8)
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    params = tuple(ref.on_host(entry) for entry in state.params)
    expected, _, losses = ref.optax_steps(layers, params, x, targets, tx, 3)
    step = pipe.train_step(ref.mse, tx)
    for loss in losses:
        state, metrics = step(state, x, targets)
        assert float(metrics["loss"]) == pytest.approx(loss, rel=ref.FLOAT64)
    ref.assert_close(state.params, expected, ref.FLOAT64)


class Normed(nn.Module):
    """A block whose statistics training changes."""

    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        return jnp.tanh(nn.Dense(WIDTH)(x))


class NormedNnx(nnx.Module):
    """The same as an nnx module."""

    def __init__(self, seed):
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.9, rngs=nnx.Rngs(seed))
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(seed))

    def __call__(self, x):
        return jnp.tanh(self.linear(self.norm(x)))


@pytest.mark.parametrize(
    "blocks",
    [
        [Normed() for _ in range(6)],
        [NormedNnx(seed) for seed in range(6)],
        [Block(seed) for seed in range(6)],
        [Dropped() for _ in range(6)],
        [ref.dense(WIDTH)] * 6,  # tied: one module, six times
    ],
    ids=["batch norm", "nnx batch norm", "nnx", "dropout", "tied"],
)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_sharing_changes_no_bit(blocks, schedule, monkeypatch):
    """The same programs run, whether stages share them or each has its own."""
    x = jax.random.normal(jax.random.key(3), (10, WIDTH))
    tx = optax.adam(1e-2)

    def trained():
        pipe = jpipe.pipeline(blocks, 4, schedule=schedule, balance=[1] * 6)
        state = pipe.init_train_state(jax.random.key(0), x, tx)
        step = pipe.train_step(ref.mse, tx)
        for _ in range(2):
            state, metrics = step(state, x, jnp.cos(x))
        y = pipe.apply(state.variables, x)
        return state.variables, metrics["loss"], y, pipe._library.training.rows

    *shared, rows = trained()
    number = itertools.count()
    monkeypatch.setattr(_alike, "behaviour", lambda layer: next(number))
    *alone, others = trained()
    ref.assert_equal(shared, alone)
    assert len({id(row[0].task.closed) for row in others}) == 6
    # The first has an input without gradient, the last has the loss.
    assert len({id(row[0].task.closed) for row in rows}) == 3
