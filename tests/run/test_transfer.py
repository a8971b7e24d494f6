"""Moves between stages: as `jax.device_put` makes them, and as cheap as a call.

`_compat.copier` is imported because it has a fallback: both ways have to be one.
"""

import sys

import jax
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
