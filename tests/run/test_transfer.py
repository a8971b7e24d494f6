"""Moves between stages: as `jax.device_put` makes them, and as cheap as a call.

`_compat.copier` is imported because it has a fallback: both ways have to be one.
"""

import sys

import jax
import jax.numpy as jnp
import pytest

import jpipe
from jpipe import _compat

from .. import reference as ref


@pytest.fixture
def fresh():
    """`copier` without what it found out before, and after."""
    _compat.copier.cache_clear()
    yield
    _compat.copier.cache_clear()


@pytest.fixture(scope="module")
def built():
    """A gradient on three devices, and what it is given, on the first."""
    pipe = jpipe.pipeline(ref.mlp(), 2, balance=[2, 2, 2])
    x, targets = jax.device_put(ref.regression(8), jax.devices()[0])
    gradient = pipe.value_and_grad(ref.mse)
    given = pipe.init(jax.random.key(0), x), x, targets
    return gradient, given, gradient(*given)


@pytest.mark.parametrize(
    ("dtype", "shape"), [("float32", (2, 3)), ("bfloat16", ()), ("bool", (0, 3))]
)
def test_a_copy_is_what_device_put_gives(dtype, shape):
    first, second = jax.devices()[:2]
    made = jax.device_put(jnp.ones(shape, dtype), first)
    (copied,) = _compat.copier(first, second)([made])
    put = jax.device_put(made, second)
    for name in ("aval", "sharding", "committed", "format"):
        assert getattr(copied, name) == getattr(put, name)
    assert (copied == put).all()


def test_a_copy_outlives_its_source_and_keeps_its_weak_type():
    copy = _compat.copier(*jax.devices()[:2])
    for number in range(20):
        made = jax.device_put(jnp.full(100_000, float(number)), jax.devices()[0])
        weak = jax.device_put(jnp.asarray(1.0), jax.devices()[0])
        copied, still_weak = copy([made, weak])
        made.delete()
        assert (copied == number).all()
        assert weak.weak_type == still_weak.weak_type is True
    assert copy([]) == []


def test_a_guard_of_transfers_lets_explicit_moves_of_a_step_pass(built):
    gradient, given, _ = built
    with jax.transfer_guard_device_to_device("disallow"):
        gradient(*given)
    with (
        jax.transfer_guard_device_to_device("disallow_explicit"),
        pytest.raises(Exception, match="Disallowed device-to-device transfer"),
    ):
        gradient(*given)


def test_typed_keys_travel_between_stages():
    def noise(y):
        return {"y": y, "key": jax.random.key(7)}

    def add_noise(inputs):
        return inputs["y"] + jax.random.normal(inputs["key"], inputs["y"].shape)

    layers = [ref.dense(4), noise, add_noise]
    x, targets = ref.regression(4)
    found = []
    for make in (jpipe.pipeline, jpipe.sequential):
        pipe = make(layers, 2)
        variables = pipe.init(jax.random.key(0), x)
        found.append(pipe.value_and_grad(ref.mse)(variables, x, targets))
    ref.assert_close(*found, ref.FLOAT32)


class Missing:
    """A jaxlib without the names."""


def test_a_jaxlib_without_the_names_gives_the_same_bits(built, fresh, monkeypatch):
    _, given, expected = built
    monkeypatch.setitem(sys.modules, "jaxlib._jax", Missing)
    assert _compat.copier(*jax.devices()[:2]) is None
    pipe = jpipe.pipeline(ref.mlp(), 2, balance=[2, 2, 2])
    ref.assert_equal(pipe.value_and_grad(ref.mse)(*given), expected)


def test_devices_of_other_processes_are_left_to_device_put():
    class Elsewhere:
        process_index = 1

    assert _compat.copier(jax.devices()[0], Elsewhere()) is None
    assert _compat.copier(Elsewhere(), jax.devices()[0]) is None
