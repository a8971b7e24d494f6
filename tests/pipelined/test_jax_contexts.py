"""Contexts of JAX around everything: the same numbers, bit for bit."""

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType

import jpipe

from .. import reference as ref

# What becomes of the statistics is not its subject.
pytestmark = pytest.mark.filterwarnings("ignore:value_and_grad leaves:UserWarning")

X = np.arange(24, dtype=np.float32).reshape(6, 4) / 24
TARGETS = np.ones((6, 2), np.float32)
SHARED = nn.Dense(4)
LINEAR = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
TX = optax.chain(
    optax.clip_by_global_norm(0.5), optax.inject_hyperparams(optax.adamw)(1e-2)
)


class Block(nn.Module):
    """Statistics and randomness."""

    @nn.compact
    def __call__(self, x, train: bool = False):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(4)(x))
        return nn.Dropout(0.5, deterministic=not train)(x)


def everything(key):
    """What each method returns, as leaves of NumPy."""
    pipe = jpipe.pipeline([SHARED, Block(), SHARED, LINEAR], 3, balance=[2, 1, 1])
    variables = pipe.init(key, X)
    on_host = jax.tree.map(np.asarray, variables)
    y = pipe.apply(variables, X)
    gradients = pipe.value_and_grad(ref.mse)(variables, X, TARGETS, rngs=key)
    state = pipe.init_train_state(key, X, TX)
    taken = pipe.init_train_state(key, X, TX, variables=on_host)
    step = pipe.train_step(ref.mse, TX)
    for _ in range(2):
        state, metrics = step(state, X, TARGETS)
    assert step.profile(taken, X, TARGETS).makespan > 0
    made = variables, y, gradients, state, taken, metrics, pipe.place(on_host)
    return jax.tree.leaves(ref.on_host(made))


def mesh(first, count, axis_type):
    devices = np.array(jax.devices()[first : first + count])
    return jax.sharding.Mesh(devices, ("data",), axis_types=(axis_type,))


@pytest.fixture(scope="module")
def expected():
    return everything(jax.random.key(3))


CONTEXTS = {
    "a mesh of others, explicit": lambda: jax.set_mesh(mesh(5, 3, AxisType.Explicit)),
    "no implicit transfers": lambda: jax.transfer_guard("disallow"),
}


@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)
def test_contexts_of_jax_change_no_bit(context, expected):
    key = jax.random.key(3)
    with context():
        actual = everything(key)
    ref.assert_equal(actual, expected)


def test_a_function_is_placed_outside_of_the_mesh_around_it():
    meshes = []

    def loss_fn(params, x):
        meshes.append(jax.sharding.get_abstract_mesh())
        for w in params:
            x = jax.numpy.tanh(x @ w)
        return (x**2).mean()

    value_and_grad = jpipe.value_and_grad(loss_fn, 3, num_stages=2)
    with jax.set_mesh(mesh(5, 3, AxisType.Explicit)):
        value_and_grad.place([np.eye(4, dtype=np.float32)] * 2, X)
        assert len(value_and_grad.plan.stages) == 2
    assert meshes
    assert all(mesh.empty for mesh in meshes)
