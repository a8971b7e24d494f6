"""Equal layers: told by what they hold, and by nothing else."""

import collections
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import jpipe

from .. import reference as ref
from .stages import WIDTH, Block, Dropped, X, around, gradient_of

RNGS = {"dropout": jax.random.key(1)}
# As text it is shortened.
LONG = np.zeros((1200, 1), np.float32)


def are_equal(first, second, **options):
    """Whether two layers, each a stage between others, share what is traced."""
    works = gradient_of(around(first, second), **options).works
    return works.task(1).closed is works.task(2).closed


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
    """A base whose slot is not a field of what is derived from it."""

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
        for scale in (1.0, 3.0):
            made = jpipe.sequential([Made(scale), Made(2 * scale)]).init(
                RNGS["dropout"], X
            )
            kernels = [entry["params"]["Dense_0"]["kernel"][0, 0] for entry in made]
            assert kernels == [scale, 2 * scale]

    def test_a_new_pipeline_asks_again_what_a_function_does(self):
        """Functions read what may have changed: a config, a class, a global name."""

        class Config:
            scale, width = 0.0, WIDTH

        def init(key, shape, dtype=jnp.float32):
            return jnp.full(shape, Config.scale, dtype)

        class Made(nn.Module):
            settings: Any = None

            @nn.compact
            def __call__(self, x):
                return nn.Dense(Config.width, kernel_init=init)(x)

        for settings in (Config, Config(), None):
            for Config.scale, Config.width in ((1.0, 3), (2.0, 4)):
                pipe = jpipe.sequential([Made(settings), Made(settings)])
                variables = pipe.init(jax.random.key(0), X)
                for entry in variables:
                    kernel = entry["params"]["Dense_0"]["kernel"]
                    assert kernel.shape[1] == Config.width
                    assert (kernel == Config.scale).all()
                assert pipe.apply(variables, X).shape == (len(X), Config.width)

    def test_not_with_another_input(self):
        layers = [nn.Dense(WIDTH), nn.Dense(WIDTH), nn.Dense(WIDTH), nn.Dense(4)]
        works = gradient_of(layers).works  # the first is given a width of five
        first, second, third = (works.task(s).closed for s in range(3))
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

        works = gradient_of(around(*both("a"), *both("b")), [1, 2, 2, 1]).works
        assert works.task(1).closed is not works.task(2).closed

    def test_not_where_one_keeps_what_the_other_computes_again(self):
        layers = around(ref.Residual(WIDTH), ref.Residual(WIDTH))
        remat = ["full", "full", "none", "none"]
        works = gradient_of(layers, remat=remat).works
        first, second = (works.derivatives(s, 0, works.mode(s, 0)) for s in (1, 2))
        assert works.task(1).closed is works.task(2).closed
        assert first is not second
