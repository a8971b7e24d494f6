"""Equal layers are traced and compiled once; those that only look equal are not."""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx, struct

import jpipe

from .. import reference as ref
from ..listing import program_of
from .normed import Normed

KEY, WIDTH = jax.random.key(0), 6
X, TARGETS = ref.regression(8)


def around(*middle):
    """Stages that are given and give the same width, between two that do not."""
    return [ref.dense(WIDTH), *middle, ref.dense(4)]


class Block(nnx.Module):
    """A residual block, with what may differ between two of them."""

    def __init__(self, seed, scale=1.0):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(seed))
        self.scale = scale

    def __call__(self, x):
        return x + self.scale * self.linear(x)


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
    report = find.compile(variables, X, TARGETS, rngs=KEY)
    names = [program.name for program in report.programs]
    for first in range(1, len(layers) - 1, 2):
        stage_names = [name for name in names if name.startswith(f"stage{first}_")]
        pair = f"stage{first}_{first + 1}"
        assert len(stage_names) == 2
        assert stage_names[0] == f"{pair}_forward"
        assert stage_names[1].startswith(f"{pair}_backward")


class Counted(nn.Module):
    """A dense layer that counts how often Flax calls it."""

    calls: ClassVar[list] = []

    @nn.compact
    def __call__(self, x):
        self.calls.append(x.shape)
        return nn.Dense(WIDTH)(x)


def test_layers_are_traced_once_each_for_variables_a_step_and_the_check_of_a_loss():
    def calls(number):
        Counted.calls.clear()
        pipe = jpipe.pipeline(around(*(Counted() for _ in range(number))), 2)
        program_of(pipe.value_and_grad(ref.mse), pipe.init(KEY, X), X, TARGETS)
        return len(Counted.calls)

    # Flax calls each to make its variables, in the trace of a step, and for twice as
    # many examples: what grows has a row for each.
    assert (calls(1), calls(5)) == (3, 15)


class Hidden(nn.Module):
    """A field that is left out of comparisons and of the text still counts.

    In what it computes, and in how it is initialized.
    """

    scale: Any = dataclasses.field(default=1.0, compare=False, repr=False)

    @nn.compact
    def __call__(self, x):
        constant = nn.initializers.constant(self.scale)
        return x + self.scale * nn.Dense(WIDTH, kernel_init=constant)(x)


class Twice(nn.Module):
    """A module held twice shares its parameters; two equal ones do not."""

    first: nn.Module
    second: nn.Module

    @nn.compact
    def __call__(self, x):
        return self.second(self.first(x))


class Full(nn.Module):
    """A parameter of the dtype of an attribute: 1 equals 1.0."""

    number: object

    @nn.compact
    def __call__(self, x):
        return x * self.param("number", lambda key: jnp.full((), self.number))


def of(scale):
    return lambda x: scale * x


UNEQUAL = [
    *(nn.Dense(WIDTH), nn.Dense(WIDTH, use_bias=False)),
    *(Hidden(1.0), Hidden(3.0)),
    *(Twice(*[nn.Dense(WIDTH)] * 2), Twice(nn.Dense(WIDTH), nn.Dense(WIDTH))),
    *(Block(1), Block(1, scale=2.0)),
    *(of(2.0), of(3.0)),
]


def test_layers_that_only_look_equal_compute_what_they_say():
    pipe = jpipe.pipeline(UNEQUAL, 2, devices=jax.devices()[:1] * len(UNEQUAL))
    x = X[:, :1] * jnp.ones(WIDTH)
    variables = pipe.init(KEY, x)
    y = pipe.apply(variables, x)
    expected = x
    for layer, entry in zip(UNEQUAL, jax.device_get(variables), strict=True):
        is_linen = isinstance(layer, nn.Module)
        expected = layer.apply(entry, expected) if is_linen else layer(expected)
    ref.assert_close(y, expected, 1e-4)


class Begins(nn.Module):
    """A matrix that begins near an array which the initializer captures."""

    beginning: Any

    @nn.compact
    def __call__(self, x):
        def initializer(key):
            return self.beginning + 1e-3 * jax.random.normal(key, (WIDTH, WIDTH))

        return x @ self.param("matrix", initializer)


def test_layers_whose_initializers_capture_other_arrays_begin_at_these():
    beginnings = jnp.eye(WIDTH), jnp.ones((WIDTH, WIDTH))
    pipe = jpipe.pipeline([Begins(beginning) for beginning in beginnings], 2)
    variables = pipe.init(KEY, jnp.ones((8, WIDTH)))
    for entry, beginning in zip(variables, beginnings, strict=True):
        ref.assert_close(entry["params"]["matrix"], beginning, 1e-2)


@struct.dataclass
class Numbered:
    """An array, and a number that JAX takes for a part of the structure."""

    x: jax.Array
    number: int = struct.field(pytree_node=False, default=2)


@pytest.mark.parametrize(
    "compute",
    [
        lambda x, n: n * x,
        lambda x, n: np.full(5, n, np.float32) * x,
        lambda x, n: x**n,
        lambda x, n: x + jax.lax.slice_in_dim(x, n, n + 1, axis=1),
    ],
    ids=["a literal", "an array", "a parameter", "parameters"],
)
def test_equal_layers_that_are_given_other_numbers_compute_with_these(compute):
    def layer(numbered):
        return Numbered(compute(numbered.x, numbered.number), numbered.number + 1)

    layers = [lambda x: Numbered(x), layer, layer, lambda numbered: numbered.x]
    pipe = jpipe.pipeline(layers, 2, balance=[1] * 4)
    y = pipe.apply(pipe.init(KEY, X), X)
    ref.assert_close(y, compute(compute(X, 2), 3), 1e-6)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def times_in_the_backward(x, number):
    return x


times_in_the_backward.defvjp(
    lambda x, number: (x, None), lambda number, _, cotangent: (number * cotangent,)
)


def assert_six_times(pipe, variables):
    """Gradients of a first dense layer are twice three times those of it alone."""
    _, grads = pipe.value_and_grad(ref.mse)(variables, X, X)

    def loss(params):
        return ref.mse(nn.Dense(5).apply({"params": params}, X), X)

    expected = jax.grad(loss)(ref.on_host(variables)[0]["params"])
    ref.assert_close(grads[0], jax.tree.map(lambda g: 2 * 3 * g, expected), 1e-6)


def test_equal_layers_that_are_given_other_numbers_are_differentiated_with_these():
    def layer(numbered):
        x = times_in_the_backward(numbered.x, numbered.number)
        return Numbered(x, numbered.number + 1)

    layers = [nn.Dense(5), lambda x: Numbered(x), layer, layer, lambda n: n.x]
    pipe = jpipe.pipeline(layers, 2, balance=[1] * 5, devices=jax.devices()[:1] * 5)
    variables = pipe.init(KEY, X)
    assert_six_times(pipe, variables)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Along:
    """An array, and what a layer reads of it beside: an axis."""

    value: jax.Array
    axis: int = dataclasses.field(metadata={"static": True})


class Unhashable:
    """A static field without a hash, which is equal to itself only."""

    __hash__ = None

    def __init__(self, axis):
        self.axis = axis

    def __eq__(self, other):
        return self is other


def cumulated(module, value, axis):
    return jnp.cumsum(module(value), axis)


def by_field(module, x):
    return Along(cumulated(module, x.value, x.axis), 3 - x.axis)


def by_name(module, x):
    ((name, value),) = x.items()
    axis = {"rows": 1, "columns": 2}[name]
    return {{1: "columns", 2: "rows"}[axis]: cumulated(module, value, axis)}


def by_shape(module, x):
    value, unread = x
    axis = unread.shape[1]
    return cumulated(module, value, axis), jnp.zeros((len(value), 3 - axis))


def by_unhashable(module, x):
    return Along(cumulated(module, x.value, x.axis.axis), Unhashable(3 - x.axis.axis))


BY_STRUCTURE = {
    by_field: (lambda x: Along(x, 1), lambda x: x.value),
    by_name: (lambda x: {"rows": x}, lambda x: x["rows"]),
    by_shape: (lambda x: (x, jnp.zeros((len(x), 1))), lambda x: x[0]),
    by_unhashable: (lambda x: Along(x, Unhashable(1)), lambda x: x.value),
}


@pytest.mark.parametrize("does", BY_STRUCTURE)
def test_equal_layers_that_are_given_other_structures_do_what_these_say(does):
    first, last = BY_STRUCTURE[does]
    modules = [nn.Dense(WIDTH) for _ in range(4)]
    layers = [first, *(jpipe.layer(module, does) for module in modules), last]
    x = jax.random.normal(KEY, (8, WIDTH, WIDTH))
    pipe = jpipe.pipeline(layers, 2, devices=jax.devices()[:1] * len(layers))
    variables = pipe.init(KEY, x)

    def apply(params, x):
        x = first(x)
        for module, module_params in zip(modules, params[1:-1], strict=True):
            x = does(
                lambda value, m=module, p=module_params: m.apply({"params": p}, value),
                x,
            )
        return last(x)

    params = ref.params_of(variables)
    ref.assert_close(pipe.apply(variables, x), apply(params, x), 1e-5)
    result = pipe.value_and_grad(ref.mse)(variables, x, jnp.zeros_like(x))
    loss = jax.value_and_grad(lambda params: ref.mse(apply(params, x), 0.0))
    ref.assert_close(result, loss(params), 1e-5)


def test_gradients_of_equal_layers_depend_on_shapes_of_unread_inputs():
    def layer(pair):
        x, unread = pair
        (number,) = unread.shape[1:]
        x = times_in_the_backward(x, number)
        return x, jnp.zeros((len(x), number + 1))

    layers = [nn.Dense(5), lambda x: (x, jnp.zeros((len(x), 2))), layer, layer]
    layers.append(lambda pair: pair[0])
    pipe = jpipe.pipeline(layers, 2, devices=jax.devices()[:1] * 5)
    variables = pipe.init(KEY, X)
    assert_six_times(pipe, variables)


def test_layers_equal_but_in_smaller_micro_batches_have_their_gradients():
    def layer(numbered):
        x = times_in_the_backward(numbered.x, numbered.number)
        return Numbered(x, numbered.number + (len(x) == 2))

    layers = [nn.Dense(5), lambda x: Numbered(x), layer, layer, lambda n: n.x]
    pipe = jpipe.pipeline(layers, 4, devices=jax.devices()[:1] * 5)
    x = jax.random.normal(KEY, (10, 5))  # of 3, 3, 2 and 2
    variables = pipe.init(KEY, x)
    _, grads = pipe.value_and_grad(ref.mse)(variables, x, x)
    scale = jnp.repeat(jnp.array([2 * 2, 2 * 3]), jnp.array([6, 4]))[:, None]

    def loss(params):
        squares = (layers[0].apply({"params": params}, x) - x) ** 2
        return jnp.mean(scale * squares)

    expected = jax.grad(loss)(ref.on_host(variables)[0]["params"])
    ref.assert_close(grads[0], expected, 1e-5)


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


def test_initial_values_are_those_of_each_layer():
    layers = [Hidden(1.0), Hidden(3.0), Full(2), Full(2.0)]
    ones, threes, *numbers = jpipe.sequential(layers).init(KEY, jnp.ones((8, WIDTH)))
    kernels = [entry["params"]["Dense_0"]["kernel"][0, 0] for entry in (ones, threes)]
    assert kernels == [1.0, 3.0]
    dtypes = [entry["params"]["number"].dtype for entry in numbers]
    assert dtypes == [jnp.int32, jnp.float32]


# What becomes of the statistics is not its subject.
@pytest.mark.filterwarnings("ignore:value_and_grad leaves:UserWarning")
def test_no_tracer_outlives_a_trace(small_heap):
    x = jnp.ones((4, 5))

    def keep(x):
        jpipe.stash("x", x)
        return 2 * x

    with jax.check_tracer_leaks(True):
        layers = [keep, Normed(), lambda x: x[:, :5] + jpipe.pop("x"), nn.Dense(3)]
        pipe = jpipe.pipeline(layers, 2, balance=[1, 2, 1])
        variables = pipe.init(KEY, x)
        pipe.value_and_grad(ref.mse)(variables, x, x[:, :3])


def test_init_traces_layers_on_the_whole_mini_batch():
    shapes = []

    def noted(x):
        shapes.append(x.shape)
        return x

    x = jnp.ones((10, 5))
    variables = jpipe.pipeline([noted, ref.dense(4)], 4).init(KEY, x)
    assert set(shapes) == {(10, 5)}
    ref.assert_equal(variables, jpipe.sequential([noted, ref.dense(4)]).init(KEY, x))
