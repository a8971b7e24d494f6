"""Moves between stages: as `jax.device_put` makes them, and as cheap as a call."""

import gc
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxlib import _jax

import jpipe
from jpipe import _compat
from jpipe._instructions._graph import Graph
from jpipe._instructions._program import Program
from jpipe._jaxprs._function import Function

from .. import reference as ref

DTYPES = ["float32", "float16", "bfloat16", "complex64", "int8", "int32", "bool"]


@pytest.fixture
def fresh():
    """`copier` without what it found out before, and after."""
    _compat.copier.cache_clear()
    yield
    _compat.copier.cache_clear()


def noise(y):
    """A layer whose output has a typed key among its leaves."""
    return {"y": y, "key": jax.random.key(7)}


def add_noise(inputs):
    return inputs["y"] + jax.random.normal(inputs["key"], inputs["y"].shape)


def gradient_of(layers, x, targets):
    pipe = jpipe.pipeline(layers, 2)
    variables = pipe.init(jax.random.key(0), x)
    return pipe.value_and_grad(ref.mse)(variables, x, targets)


class TestACopy:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
    def test_is_what_device_put_gives(self, dtype, shape):
        first, second = jax.devices()[:2]
        made = jax.device_put(jnp.ones(shape, dtype), first)
        (copied,) = _compat.copier(first, second)([made])
        put = jax.device_put(made, second)
        assert copied.aval == put.aval
        assert copied.sharding == put.sharding
        assert copied.committed
        assert copied.format == put.format
        assert (copied == put).all()

    def test_keeps_weak_types(self):
        weak = jax.device_put(jnp.asarray(1.0), jax.devices()[0])
        assert weak.weak_type
        (copied,) = _compat.copier(*jax.devices()[:2])([weak])
        assert copied.weak_type

    def test_is_no_other_argument_to_a_compiled_function(self):
        first, second = jax.devices()[:2]
        made = jax.device_put(jnp.ones(3), first)
        program = jax.jit(lambda x: x + 1)
        program(jax.device_put(made, second))
        program(*_compat.copier(first, second)([made]))
        assert program._cache_size() == 1

    def test_outlives_its_source(self):
        first, second = jax.devices()[:2]
        for number in range(20):
            made = jax.device_put(jnp.full(100_000, float(number)), first)
            (copied,) = _compat.copier(first, second)([made])
            made.delete()
            assert (copied == number).all()

    def test_takes_any_number_of_leaves(self):
        copy = _compat.copier(*jax.devices()[:2])
        assert copy([]) == []
        leaves = [jnp.float32(i) for i in range(5)]
        assert [float(leaf) for leaf in copy(leaves)] == [0, 1, 2, 3, 4]


class TestTheGuardOfTransfers:
    """A user's `jax.transfer_guard` finds explicit moves only."""

    def step(self):
        pipe = jpipe.pipeline(ref.mlp(), 2, balance=[2, 2, 2])
        x, targets = jax.device_put(ref.regression(8), jax.devices()[0])
        variables = pipe.init(jax.random.key(0), x)
        gradient = pipe.value_and_grad(ref.mse)
        gradient(variables, x, targets)
        return lambda: gradient(variables, x, targets)

    def test_lets_the_moves_of_a_step_pass(self):
        step = self.step()
        with jax.transfer_guard_device_to_device("disallow"):
            step()

    def test_can_forbid_them_all_the_same(self):
        step = self.step()
        with (
            jax.transfer_guard_device_to_device("disallow_explicit"),
            pytest.raises(Exception, match="Disallowed device-to-device transfer"),
        ):
            step()

    def test_holds_again_after_a_copy(self):
        program = jax.jit(jnp.negative)
        program(np.ones(3, np.float32))
        _compat.copier(*jax.devices()[:2])([jnp.ones(3)])
        with (
            jax.transfer_guard_host_to_device("disallow"),
            pytest.raises(Exception, match="Disallowed host-to-device transfer"),
        ):
            program(np.ones(3, np.float32))


def test_keys_travel_too():
    """Typed keys are not plain arrays: `jax.device_put` moves them."""
    layers = [ref.dense(4), noise, add_noise]
    x, targets = ref.regression(4)
    value = gradient_of(layers, x, targets)
    twin = jpipe.sequential(layers, 2)
    variables = twin.init(jax.random.key(0), x)
    ref.assert_close(
        value, twin.value_and_grad(ref.mse)(variables, x, targets), ref.FLOAT32
    )


@pytest.mark.parametrize("guard", ["disallow", "disallow_explicit"])
def test_a_first_use_under_a_guard_is_not_the_last_word(guard, fresh):
    with jax.transfer_guard(guard):
        assert _compat.copier(*jax.devices()[:2]) is not None


def test_nor_is_a_first_use_in_a_trace(fresh):
    found = []

    def traced(x):
        found.append(_compat.copier(*jax.devices()[:2]))
        return x

    jax.eval_shape(traced, 0.0)
    assert found[0] is not None


class Missing:
    """A jaxlib without the names."""


class Other:
    """A jaxlib whose function of that name wants something else."""

    guard_lib = jax.tree_util

    @staticmethod
    def batched_device_put(first):
        return first


class Loose:
    """A jaxlib whose function leaves arrays free to move."""

    guard_lib = _jax.guard_lib

    @staticmethod
    def batched_device_put(aval, sharding, xs, devices):
        return jax.numpy.zeros(aval.shape, aval.dtype)


@pytest.mark.parametrize("jaxlib", [Missing, Other, Loose])
def test_a_jax_without_the_names_gives_the_same_bits(jaxlib, fresh, monkeypatch):
    layers = ref.mlp()
    x, targets = ref.regression(6)
    expected = gradient_of(layers, x, targets)
    _compat.copier.cache_clear()
    monkeypatch.setitem(sys.modules, "jaxlib._jax", jaxlib)
    assert _compat.copier(*jax.devices()[:2]) is None
    value = gradient_of(layers, x, targets)
    for mine, theirs in zip(
        jax.tree.leaves(value), jax.tree.leaves(expected), strict=True
    ):
        assert (mine == theirs).all()


class Elsewhere:
    """A device of another process."""

    process_index = 1


@pytest.mark.parametrize("swap", [False, True])
def test_devices_of_other_processes_are_left_to_device_put(swap):
    pair = [jax.devices()[0], Elsewhere()]
    assert _compat.copier(*(pair[::-1] if swap else pair)) is None


def test_moves_leave_nothing_behind():
    pipe = jpipe.pipeline(ref.mlp(), 4, balance=[2, 2, 2])
    x, targets = ref.regression(8)
    variables = pipe.init(jax.random.key(0), x)
    gradient = pipe.value_and_grad(ref.mse)
    counts = []
    for _ in range(4):
        value = gradient(variables, x, targets)
        jax.block_until_ready(value)
        gc.collect()
        counts.append(len(jax.live_arrays()))
    assert len(set(counts[1:])) == 1


def test_one_result_can_go_to_several_places():
    graph = Graph()
    given = graph.argument(jax.ShapeDtypeStruct((), jnp.float32), 0)
    double = Function.like("double", lambda x: [2 * x], graph.specs[given])
    (made,) = graph.call(double, 0, [given])
    outputs = [made, *(graph.at(made, place) for place in (2, 1))]
    program = Program(graph, outputs, jax.devices()[:3])
    arrived = program([jax.device_put(jnp.float32(3), jax.devices()[0])])
    assert [float(leaf) for leaf in arrived] == [6, 6, 6]
    assert [leaf.device.id for leaf in arrived] == [0, 2, 1]
    assert len(set(map(id, arrived))) == 3
