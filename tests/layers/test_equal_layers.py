"""Equal layers are traced and compiled once; those that only look equal are not."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jpipe

from .. import reference as ref

KEY, WIDTH = jax.random.key(0), 6
X, TARGETS = ref.regression(8)


def around(*middle):
    """Stages that are given and give the same width, between two that do not."""
    return [ref.dense(WIDTH), *middle, ref.dense(4)]


class Block(nnx.Module):
    """A residual block, with what may differ between two of them."""

    def __init__(self, seed, scale=1.0, config=None):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(seed))
        self.scale, self.config = scale, config

    def __call__(self, x):
        factor = self.config.scale if self.config else 1.0
        return x + factor * self.scale * self.linear(x)


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


EQUAL = [
    lambda seed: ref.Residual(WIDTH),
    lambda seed: Again(),
    lambda seed: Dropped(),
    lambda seed: Block(seed, scale=2.0),
    lambda seed: jnp.tanh,
    lambda seed: jpipe.layer(nn.Dense(WIDTH), lambda module, x: jnp.sin(module(x))),
]


def test_equal_layers_are_compiled_once():
    layers = around(*(make(seed) for make in EQUAL for seed in (1, 2)))
    pipe = jpipe.pipeline(layers, 2, devices=jax.devices()[:1] * len(layers))
    variables = pipe.init(KEY, X)
    find = pipe.value_and_grad(ref.mse)
    report = pipe.compile(find, variables, X, TARGETS, rngs=KEY)
    names = [program.name for program in report.programs]
    for first in range(1, len(layers) - 1, 2):
        own = [name for name in names if name.startswith(f"stage{first}_")]
        pair = f"stage{first}_{first + 1}"
        assert len(own) == 2
        assert own[0] == f"{pair}_forward"
        assert own[1].startswith(f"{pair}_backward")


def test_names_of_programs_that_many_stages_share_stay_short():
    """JAX makes file names of them: of its compilation cache, of dumps of XLA."""
    pipe = jpipe.pipeline(around(*[jnp.tanh] * 9), 2, devices=jax.devices()[:1] * 11)
    report = pipe.compile(pipe.apply, pipe.init(KEY, X), X)
    names = [program.name for program in report.programs]
    assert "stage1_2_3_4_and_5_more_forward" in names


class Counted(nn.Module):
    """A dense layer that counts how often Flax calls it."""

    calls: ClassVar[list] = []

    @nn.compact
    def __call__(self, x):
        self.calls.append(x.shape)
        return nn.Dense(WIDTH)(x)


def test_equal_layers_are_traced_once():
    def calls(number):
        Counted.calls.clear()
        pipe = jpipe.pipeline(around(*(Counted() for _ in range(number))), 2)
        pipe.value_and_grad(ref.mse)(pipe.init(KEY, X), X, TARGETS)
        return len(Counted.calls)

    # A second layer shows that the initializer of both is a function of the key.
    assert calls(5) == calls(2) == calls(1) + 1


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


class WithList(nn.Module):
    """A module that has no hash."""

    widths: list

    @nn.compact
    def __call__(self, x):
        for width in self.widths:
            x = nn.Dense(width)(x)
        return x


class Full(nn.Module):
    """A parameter of the dtype of an attribute: 1 equals 1.0."""

    number: object

    @nn.compact
    def __call__(self, x):
        return x * self.param("number", lambda key: jnp.full((), self.number))


class Same(nnx.Module):
    """An nnx module that says that it is equal to all of its class."""

    def __init__(self, scale):
        self.linear, self.scale = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)), scale

    def __call__(self, x):
        return self.scale * self.linear(x)

    def __eq__(self, other):
        return isinstance(other, Same)

    def __hash__(self):
        return 1


def of(scale):
    return lambda x: scale * x


# As text it is shortened.
LONG = np.zeros((1200, 1), np.float32)
UNEQUAL = [
    *(nn.Dense(WIDTH), nn.Dense(WIDTH, use_bias=False)),
    *(Hidden(1.0), Hidden(3.0), Hidden(LONG), Hidden(LONG + 1)),
    *(Configured(Named(1.0)), Configured(Named(3.0))),
    *(Configured(Config(1.0)), Configured(Config(3.0))),
    *(Twice(*[nn.Dense(WIDTH)] * 2), Twice(nn.Dense(WIDTH), nn.Dense(WIDTH))),
    *(WithList([WIDTH]), WithList([WIDTH, WIDTH])),
    *(Full(2), Full(2.0)),
    *(Block(1), Block(1, scale=2.0), Block(1, config=Config(3.0))),
    *(Block(1, config=Named(1.0)), Block(1, config=Named(3.0)), Same(1.0), Same(3.0)),
    *(of(2.0), of(3.0), *(lambda x, by=by: by * x for by in (2.0, 3.0))),
]


def test_layers_that_only_look_equal_compute_what_they_say():
    listed = [layer for layer in UNEQUAL if not isinstance(layer, Full)]
    pipe = jpipe.pipeline(listed, 2, devices=jax.devices()[:1] * len(listed))
    x = X[:, :1] * jnp.ones(WIDTH)
    variables = pipe.init(KEY, x)
    y = pipe.apply(variables, x)
    expected = x
    for layer, own in zip(listed, jax.device_get(variables), strict=True):
        is_linen = isinstance(layer, nn.Module)
        expected = layer.apply(own, expected) if is_linen else layer(expected)
    ref.assert_close(y, expected, 1e-4)


def test_initial_values_are_those_of_each_layer():
    class Made(nn.Module):
        """A module whose hidden field says how it is initialized."""

        scale: float = dataclasses.field(default=1.0, compare=False, repr=False)

        @nn.compact
        def __call__(self, x):
            return nn.Dense(WIDTH, kernel_init=nn.initializers.constant(self.scale))(x)

    for scale in (1.0, 3.0):
        made = jpipe.sequential([Made(scale), Made(2 * scale)]).init(KEY, X)
        kernels = [entry["params"]["Dense_0"]["kernel"][0, 0] for entry in made]
        assert kernels == [scale, 2 * scale]
    made = jpipe.sequential([Full(2), Full(2.0)]).init(KEY, X)
    dtypes = [entry["params"]["number"].dtype for entry in made]
    assert dtypes == [jnp.int32, jnp.float32]


def test_new_pipeline_traces_functions_that_read_other_globals():
    class Config:
        scale, width = 0.0, WIDTH

    def init(key, shape, dtype=jnp.float32):
        return jnp.full(shape, Config.scale, dtype)

    class Made(nn.Module):
        settings: Any = None

        @nn.compact
        def __call__(self, x):
            return nn.Dense(Config.width, kernel_init=init)(x)

    for settings in (Config, None):
        for Config.scale, Config.width in ((1.0, 3), (2.0, 4)):
            pipe = jpipe.sequential([Made(settings), Made(settings)])
            variables = pipe.init(KEY, X)
            for entry in variables:
                kernel = entry["params"]["Dense_0"]["kernel"]
                assert kernel.shape[1] == Config.width
                assert (kernel == Config.scale).all()
            assert pipe.apply(variables, X).shape == (len(X), Config.width)


class Normed(nn.Module):
    """A block whose statistics training changes."""

    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        return jnp.tanh(nn.Dense(WIDTH)(x))


@pytest.mark.parametrize(
    "blocks",
    [
        [Normed() for _ in range(4)],
        [Dropped() for _ in range(4)],
    ],
    ids=["batch norm", "dropout"],
)
def test_equal_stages_train_as_one_stage_does(blocks):
    x = jax.random.normal(jax.random.key(3), (10, WIDTH))
    tx = optax.sgd(0.1)

    def trained(make, **options):
        pipe = make(blocks, 4, **options)
        state = pipe.init_train_state(KEY, x, tx)
        step = pipe.train_step(ref.mse, tx)
        for _ in range(2):
            state, metrics = step(state, x, jnp.cos(x))
        return state.variables, metrics["loss"]

    shared = trained(jpipe.pipeline)
    ref.assert_close(shared, trained(jpipe.sequential), 1e-5)


def test_plan_counts_equal_layers_each():
    pipe = jpipe.pipeline([nn.Dense(5) for _ in range(4)], 2, balance=[3, 1])
    pipe.init(KEY, jax.ShapeDtypeStruct((4, 5), jnp.float32))
    assert [stage.num_params for stage in pipe.plan.stages] == [90, 30]


class Two(nn.Module):
    """Two dense layers, of which one method uses the second only."""

    def setup(self):
        self.first, self.second = nn.Dense(3), nn.Dense(3)

    def __call__(self, x):
        return self.second(self.first(x))

    def last(self, x):
        return self.second(x)


def test_tied_layer_leaves_an_equal_one_its_own_parameters():
    tied, free = Two(), Two()
    layers = [tied, jpipe.layer(tied, "last"), jpipe.layer(free, "last")]
    variables = jpipe.sequential(layers).init(KEY, jnp.ones((4, 3)))
    names = [sorted(entry.get("params", ())) for entry in variables]
    assert names == [["first", "second"], [], ["second"]]


def test_error_names_the_layer_though_an_equal_one_passed():
    class Fails(nn.Module):
        @nn.compact
        def __call__(self, x):
            if x.shape[-1] != 5:
                raise TypeError("five, please")
            return nn.Dense(5)(x)

    with pytest.raises(TypeError, match="five") as caught:
        jpipe.sequential([Fails(), Fails(), nn.Dense(6), Fails()]).init(KEY, X)
    assert "layer 3 (Fails)" in "".join(caught.value.__notes__)


def test_no_tracer_outlives_a_trace(small_heap):
    x = jnp.ones((4, 5))

    def keep(x):
        jpipe.stash("x", x)
        return 2 * x

    with jax.check_tracer_leaks(True):
        layers = [keep, jnp.sin, lambda x: x + jpipe.pop("x"), nn.Dense(3)]
        pipe = jpipe.pipeline(layers, 2, balance=[1, 2, 1])
        variables = pipe.init(KEY, x)
        pipe.value_and_grad(ref.mse)(variables, x, x[:, :3])


def test_layers_are_traced_on_micro_batches_in_every_call():
    def layer(x):
        assert x["rows"].shape[1] == 4, x
        return (x["rows"].reshape(3, 4) + x["whole"]).T

    axes = {"rows": 1, "whole": None}
    pipe = jpipe.pipeline([layer, ref.dense(2)], 2, in_axes=axes)
    x = {"rows": jnp.arange(24.0).reshape(3, 8), "whole": jnp.ones((3, 1))}
    targets, tx = jnp.ones((8, 2)), optax.sgd(0.1)
    variables = pipe.init(KEY, x)
    loss, _ = pipe.value_and_grad(ref.mse)(variables, x, targets)
    y = pipe.apply(variables, x)
    assert loss == pytest.approx(float(ref.mse(y, targets)), rel=1e-5)
    for given in (None, variables):
        state = pipe.init_train_state(KEY, x, tx, variables=given)
        _, metrics = pipe.train_step(ref.mse, tx)(state, x, targets)
        assert metrics["loss"] == loss


def test_init_traces_layers_on_a_micro_batch():
    shapes = []

    def noted(x):
        shapes.append(x.shape)
        return x

    x = jnp.ones((10, 5))
    made = jpipe.pipeline([noted, ref.dense(4)], 4).init(KEY, x)
    assert set(shapes) == {(3, 5)}
    ref.assert_equal(made, jpipe.sequential([noted, ref.dense(4)]).init(KEY, x))
