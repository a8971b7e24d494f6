"""Contexts of JAX around everything: the same numbers, bit for bit."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jpipe

from .. import reference as ref

X = np.arange(24, dtype=np.float32).reshape(6, 4) / 24
TARGETS = np.ones((6, 2), np.float32)
SCALE = np.linspace(0, 1, 4, dtype=np.float32)
SHARED = nn.Dense(4)
LINEAR = nnx.Linear(4, 2, rngs=nnx.Rngs(0))


class Block(nn.Module):
    """Statistics and randomness."""

    @nn.compact
    def __call__(self, x, train: bool = False):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(4)(x))
        return nn.Dropout(0.5, deterministic=not train)(x * SCALE)


def optimizer() -> optax.GradientTransformation:
    """One that looks at all gradients, and holds hyperparameters."""
    adamw = optax.inject_hyperparams(optax.adamw)(1e-2)
    return optax.chain(optax.clip_by_global_norm(0.5), adamw)


def everything(key: jax.Array, x, targets) -> list[np.ndarray]:
    """What each method returns, as leaves of NumPy."""
    pipe = jpipe.pipeline(
        [SHARED, Block(), nn.relu, SHARED, LINEAR], 3, balance=[2, 2, 1]
    )
    tx = optimizer()
    variables = pipe.init(key, x)
    on_host = jax.tree.map(np.asarray, variables)
    y = pipe.apply(variables, x)
    run = pipe.value_and_grad(ref.mse)
    gradients = run(variables, x, targets, rngs={"dropout": key})
    state = pipe.init_train_state(key, x, tx)
    taken = pipe.init_train_state(key, x, tx, variables=on_host)
    step = pipe.train_step(ref.mse, tx)
    for _ in range(2):
        state, metrics = step(state, x, targets)
    assert pipe.profile_step(taken, (x, targets)).makespan > 0
    placed = pipe.place(on_host)
    modules = len(pipe.modules(state.variables)), str(pipe)
    assert modules[0] == 5
    readable = [s.replace(rng=jax.random.key_data(s.rng)) for s in (state, taken)]
    made = variables, y, gradients, readable, metrics, placed
    return [np.asarray(leaf) for leaf in jax.tree.leaves(made)]


def mesh(first: int, count: int, axis_type: AxisType) -> jax.sharding.Mesh:
    devices = np.array(jax.devices()[first : first + count])
    return jax.sharding.Mesh(devices, ("data",), axis_types=(axis_type,))


def whole_on(mesh: jax.sharding.Mesh, array: np.ndarray) -> jax.Array:
    return jax.device_put(array, NamedSharding(mesh, PartitionSpec()))


@pytest.fixture(scope="module")
def expected() -> list[np.ndarray]:
    return everything(jax.random.key(3), X, TARGETS)


CONTEXTS = {
    "a mesh of the pipeline's devices": lambda: jax.set_mesh(mesh(0, 3, AxisType.Auto)),
    "a mesh of others, explicit": lambda: jax.set_mesh(mesh(5, 3, AxisType.Explicit)),
    "no implicit transfers": lambda: jax.transfer_guard("disallow"),
    "another default device": lambda: jax.default_device(jax.devices()[7]),
}


@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)
def test_everything_gives_the_same_bits_in(context, expected):
    key = jax.random.key(3)
    with context():
        actual = everything(key, X, TARGETS)
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, e, strict=True)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_what_is_spread_over_a_mesh_is_taken_from_it(axis_type, expected):
    around = mesh(0, 3, axis_type)
    rows = NamedSharding(around, PartitionSpec("data"))
    with jax.set_mesh(around):
        key, x = jax.random.key(3), jax.device_put(X, rows)
        actual = everything(key, x, whole_on(around, TARGETS))
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, e, strict=True)


def test_the_mesh_is_set_again_afterwards_and_nothing_is_traced_anew(caplog):
    pipe = jpipe.pipeline([jnp.sin, jnp.cos], 2)
    around = mesh(0, 2, AxisType.Auto)
    with jax.set_mesh(around):
        first = pipe.apply(({}, {}), X)
        with jax.log_compiles():
            again = pipe.apply(({}, {}), X)
        assert jax.sharding.get_mesh() == around
        with contextlib.suppress(TypeError), jax.log_compiles(False):
            pipe.apply(({},), "x")
        assert jax.sharding.get_mesh() == around
    assert not caplog.records
    np.testing.assert_array_equal(first, again)


def test_inside_of_a_trace_under_a_mesh_the_message_is_that_of_traces():
    pipe = jpipe.pipeline([jnp.sin], 2)
    with (
        jax.set_mesh(mesh(0, 2, AxisType.Auto)),
        pytest.raises(TypeError, match=r"outside of jax\.jit"),
    ):
        jax.jit(pipe.apply)(({},), X)
