"""Moves between stages: as `jax.device_put` makes them, and as cheap as a call.

`_compat.copier` is imported because it has a fallback: both ways have to be one.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import SingleDeviceSharding

import jpipe
from jpipe import _compat

from .. import reference as ref


@pytest.fixture
def fresh():
    """What `copier` found out is forgotten before, and after."""
    _compat._copies.clear()
    yield
    _compat._copies.clear()


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


def in_numpy(shape):
    """Ones in memory that JAX on CPU would take as it is: of 64 bytes each."""
    size = int(np.prod(shape)) * 4
    memory = np.zeros(size + 64, np.uint8)
    first = -memory.ctypes.data % 64
    leaf = memory[first : first + size].view(np.float32).reshape(shape)
    leaf[...] = 1
    return leaf


@pytest.mark.parametrize("kind", ["layers", "model", "function"])
def test_placed_arrays_do_not_change_with_memory_of_numpy(kind):
    """Which its owner fills anew; a state of an optimizer neither."""
    x, layers = jnp.ones((4, 8)), [nn.Dense(8), nn.Dense(8)]
    if kind == "function":
        tree = {"w": in_numpy((8, 8))}
        grad_fn = jpipe.value_and_grad(
            lambda p, x: jnp.mean(x @ p["w"]), 2, num_stages=1
        )
        placed = grad_fn.place(tree, x)
    else:
        pipe = jpipe.pipeline(layers, 2)
        if kind == "model":
            pipe = jpipe.pipeline(nn.Sequential(layers), 2, num_stages=2)
        made = pipe.init_train_state(jax.random.key(0), x, optax.adam(0.1))
        trees = made.params, made.opt_state
        trees = jax.tree.map(lambda leaf: in_numpy(leaf.shape), trees)
        tree = made.replace(params=trees[0], opt_state=trees[1])
        placed = pipe.place(tree, x)
    before = jax.tree.map(np.copy, ref.on_host(placed))
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, np.ndarray):
            leaf[...] = 7
    ref.assert_equal(placed, before)


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
    source, target = jax.devices()[:2]
    assert _compat.copier(source, [SingleDeviceSharding(target)]) is None
    pipe = jpipe.pipeline(ref.mlp(), 2, balance=[2, 2, 2])
    ref.assert_equal(pipe.value_and_grad(ref.mse)(*given), expected)


def test_stages_of_several_devices_hand_their_arrays_over_in_bulk(monkeypatch):
    """What a step puts in place does not grow with its moves."""
    x, targets = ref.regression(16)
    counts, put = [], jax.device_put

    def counting(*args, **options):
        counts[-1] += 1
        return put(*args, **options)

    monkeypatch.setattr(jax, "device_put", counting)
    for num_microbatches in (2, 4):
        pipe = jpipe.pipeline(
            ref.mlp(),
            num_microbatches,
            balance=[3, 3],
            mesh=jax.make_mesh((2, 2), ("stage", "data")),
        )
        counts.append(0)
        variables = pipe.init(jax.random.key(0), x)
        gradient = pipe.value_and_grad(ref.mse)
        gradient(variables, x, targets)
        counts[-1] = 0
        gradient(variables, x, targets)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("axes", [("stage", "data"), ("stage", "model")])
def test_moves_between_meshes_are_those_of_device_put(axes, fresh, monkeypatch):
    x, targets = ref.regression(16)

    def gradients():
        mesh = jax.make_mesh((2, 2), axes)
        pipe = jpipe.pipeline(ref.mlp(), 2, balance=[3, 3], mesh=mesh)
        variables = pipe.init(jax.random.key(0), x)
        with jax.transfer_guard_device_to_device("disallow"):
            return pipe.value_and_grad(ref.mse)(variables, x, targets)

    found = gradients()
    monkeypatch.setattr(_compat, "copier", lambda *_: None)
    ref.assert_equal(found, gradients())


@pytest.mark.parametrize("ahead", [True, False])
def test_weights_that_are_not_committed_are_sent_too(ahead):
    """A copy of such an array is committed no more than the array."""
    tied = nn.Dense(5)
    pipe = jpipe.pipeline([tied, ref.dense(5), tied, ref.dense(4)], 2, balance=[1] * 4)
    x, targets = ref.regression(8)
    first, *rest = pipe.init(jax.random.key(0), x)
    loose = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), first)
    assert not any(leaf.committed for leaf in jax.tree.leaves(loose))
    gradient = pipe.value_and_grad(ref.mse)
    expected = gradient((first, *rest), x, targets)
    with jax.debug_nans(not ahead):
        found = gradient((loose, *rest), x, targets)
    ref.assert_close(found, expected, ref.FLOAT32)
    assert found[0].devices() == expected[0].devices()
