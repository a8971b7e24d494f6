"""Weakly typed arrays take the dtype of what they meet, as on one device."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jpipe

from .. import reference as ref

pytestmark = pytest.mark.usefixtures("quick")


def weak(shape, value):
    """An array of the default dtype that is weakly typed."""
    array = jnp.full(shape, value)
    assert array.weak_type
    return array


def strong(tree):
    return jax.tree.map(lambda leaf: leaf.astype(leaf.dtype), tree)


def single(width):
    """A layer of the dtype that its parameters and its input make together."""
    return nn.Dense(width, param_dtype=jnp.float32)


class Like(nn.Module):
    """Has a parameter of the dtype that comes out of the layer before."""

    @nn.compact
    def __call__(self, x):
        h = single(3)(x)
        return h * self.param("scale", nn.initializers.ones, (3,), h.dtype)


def keep(x):
    jpipe.stash("kept", 2 * x["b"])
    return x["a"]


def add(h):
    return h + jpipe.pop("kept")


def kinds(tree):
    """The dtype of each leaf, and whether it is weak."""
    return jax.tree.map(lambda leaf: (leaf.dtype, leaf.weak_type), tree)


LAYERS = (keep, Like(), add, single(4))


def outputs(params, x):
    h = Like().apply({"params": params[1]}, x["a"]) + 2 * x["b"]
    return single(4).apply({"params": params[3]}, h)


def value_and_grad(params, x, targets):
    def loss(params):
        y = outputs(params, x)
        return ref.mse(y, targets), (y, 2 * targets)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)


@pytest.mark.parametrize("is_weak", [True, False])
def test_weak_and_strong_inputs_give_the_dtypes_and_gradients_of_flax(double, is_weak):
    """Single precision of weak input, where strong input makes it double."""
    x = {"a": weak((4, 5), 1.25), "b": weak((4, 3), -0.5)}
    targets = weak((4, 4), 0.25)
    if not is_weak:
        x, targets = strong((x, targets))
    pipe = jpipe.pipeline(LAYERS, 2, schedule="zb_h1", remat="none")
    variables = pipe.init(jax.random.key(0), x)
    flax = jax.eval_shape(Like().init, jax.random.key(0), x["a"])["params"]
    assert kinds(variables[1]["params"]) == kinds(flax)
    assert flax["scale"].dtype == ("float32" if is_weak else "float64")

    params = ref.params_of(variables)
    expected = value_and_grad(params, x, targets)
    actual = pipe.value_and_grad(
        lambda y, t: (ref.mse(y, t), (y, 2 * t)), has_aux=True, aux_axes=0
    )(variables, x, targets)
    ref.assert_close(actual, expected, ref.FLOAT32)
    (_, aux), _ = actual
    (_, expected_aux), _ = expected
    assert kinds(aux) == kinds(expected_aux)
    assert aux[1].weak_type == is_weak
    ref.assert_close(pipe.apply(variables, x), expected_aux[0], ref.FLOAT32)


def test_programs_of_weak_and_strong_batches_are_traced_once_each():
    traces = []

    def counted(x):
        traces.append(1)
        return x

    pipe = jpipe.pipeline([nn.Dense(3), counted], 2)
    x, targets = weak((4, 5), 1.25), weak((4, 3), 0.25)
    tx = optax.sgd(0.1)
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    step = pipe.train_step(ref.mse, tx)
    counts = [len(traces)]
    batches = [(x, targets), strong((x, targets)), (x, strong(targets))]
    for batch in [*batches, *batches]:
        state, _ = step(state, *batch)
        counts.append(len(traces))
    assert counts[0] < counts[1] < counts[2] < counts[3] == counts[-1]


def test_a_weak_parameter_of_a_state_is_strong_after_a_step():
    """So optax makes it: the first step computes in half precision, the second not.

    Other than the parameters that `init` makes, as after a step.
    """

    class Scale(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x * self.param("scale", nn.initializers.ones, ())

    layers = [Scale(), lambda y: y + 1]
    pipe, tx = jpipe.pipeline(layers, 2), optax.sgd(0.1)
    x = jnp.full((4, 3), 1.25, jnp.bfloat16)
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    params = {"scale": jnp.asarray(1.7)}, {}
    state = pipe.place(state.replace(params=jax.tree.map(jnp.copy, params)))
    assert state.params[0]["scale"].weak_type
    step = pipe.train_step(ref.mse, tx)
    for dtype in (jnp.bfloat16, jnp.float32, jnp.float32):
        loss, grads = ref.gradient(layers)(params, x, x)
        params = optax.apply_updates(params, tx.update(grads, tx.init(params))[0])
        state, metrics = step(state, x, x)
        assert metrics["loss"].dtype == loss.dtype == dtype
        ref.assert_close((metrics["loss"], state.params), (loss, params), 1e-2)


# ------------------------------------- parameters that are made of a Python number


class Weak(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x * self.param("scale", lambda _: jnp.full(3, 0.5))


class WeakNnx(nnx.Module):
    def __init__(self):
        self.scale = nnx.Param(0.5)

    def __call__(self, x):
        return x * self.scale


@pytest.mark.parametrize("kind", [Weak, WeakNnx])
def test_parameter_made_of_a_number_is_of_the_default_dtype_from_the_start(kind):
    """JAX alone computes in another dtype from its first update on."""
    pipe = jpipe.pipeline([kind(), jnp.sin], 2)
    x = jnp.ones((4, 3), jnp.bfloat16)
    variables = pipe.init(jax.random.key(0), x)
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(variables))
    expected = jnp.sin(x * jnp.full(3, 0.5, jnp.float32))
    ref.assert_close(pipe.apply(variables, x), expected, ref.FLOAT32)
