"""Arrays that layers close over; what is trained is none of them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jpipe

from .. import reference as ref

KEY, X = jax.random.key(0), jnp.ones((4, 3))
TARGETS = jnp.zeros((4, 3))


def linear():
    return nnx.Linear(3, 3, rngs=nnx.Rngs(0))


def gradient(layers, loss_of=lambda variables: ref.mse):
    """The gradient of a list of layers, or of one model."""
    count = None if isinstance(layers, list) else 1
    pipe = jpipe.pipeline(layers, 2, num_stages=count)
    variables = pipe.init(KEY, X)
    return pipe.value_and_grad(loss_of(variables))(variables, X, TARGETS)


def penalized(kernel):
    return lambda y, t: ref.mse(y, t) + (kernel() ** 2).sum()


MODULE = linear()
CONSTANT = {
    "module in a function": (
        [MODULE, lambda x: MODULE(jnp.sin(x))],
        lambda variables: ref.mse,
        r"(?s)bias of layer 0 .Linear.*kernel of layer 0",
    ),
    "module in a loss": (
        [MODULE],
        lambda variables: penalized(lambda: MODULE.kernel[...]),
        r"(?s)would be constants.*kernel of layer 0",
    ),
    "variables in a loss": (
        [nn.Dense(3), nn.relu],
        lambda variables: penalized(lambda: variables[0]["params"]["kernel"]),
        r"variables\[0\]\['params'\]\['kernel'\]",
    ),
    "variables in the loss of a model": (
        nn.Dense(3),
        lambda variables: penalized(lambda: variables["params"]["kernel"]),
        r"(?s)would be constants.*variables\['params'\]\['kernel'\]$",
    ),
    "module in the loss of a model": (
        MODULE,
        lambda variables: penalized(lambda: MODULE.kernel[...]),
        r"kernel of the model .Linear",
    ),
    "module in a model": (
        jpipe.layer(MODULE, lambda module, x: module(MODULE(x))),
        lambda variables: ref.mse,
        r"(?s)bias of the model .Linear.*kernel of the model",
    ),
}


@pytest.mark.parametrize(("layers", "loss_of", "says"), CONSTANT.values(), ids=CONSTANT)
def test_parameters_read_as_constants_too_raise(layers, loss_of, says):
    """Weight decay in ``loss_fn``; an output tied to ``embed.embedding`` of nnx.

    Both would train, with a part of the gradient missing.
    """
    with pytest.raises(TypeError, match=says):
        gradient(layers, loss_of)


def test_loss_function_may_close_over_its_parameters_as_constants_as_in_jax():
    """A penalty that draws them to what they were at the start."""
    start = {"w": jnp.arange(9.0).reshape(3, 3), "b": jnp.ones(3)}

    def loss(params, x):
        pull = ((params["w"] - start["w"]) ** 2).sum() + (start["w"] ** 2).sum()
        return jnp.mean((x @ params["w"] + params["b"]) ** 2) + pull

    grad_fn = jpipe.value_and_grad(loss, 2, num_stages=1, devices=jax.devices()[:1])
    expected = jax.value_and_grad(loss)(start, X)
    ref.assert_close(grad_fn(start, X), expected, ref.FLOAT32)


@pytest.mark.parametrize("layers", [[jnp.sin, nn.relu], jnp.sin])
def test_state_without_parameters_warns_that_nothing_is_trained(layers):
    count = None if isinstance(layers, list) else 1
    pipe = jpipe.pipeline(layers, 2, num_stages=count)
    with pytest.warns(UserWarning, match="steps with this state train nothing") as w:
        state = pipe.init_train_state(KEY, X, optax.sgd(0.1))
    assert len(w) == 1
    state, _ = pipe.train_step(ref.mse, optax.sgd(0.1))(state, X, TARGETS)
    assert int(state.step) == 1


def test_module_that_is_listed_nowhere_is_a_constant_as_under_jit():
    """Such as the teacher of a distillation."""
    teacher, student = linear(), nnx.Linear(3, 3, rngs=nnx.Rngs(1))
    _, grads = gradient([student, lambda y: y - jax.lax.stop_gradient(teacher(y))])
    assert set(grads[0]) == {"kernel", "bias"}
    assert grads[1] == {}


def test_arrays_of_numpy_may_depend_on_the_size_of_a_micro_batch(double):
    x, targets = ref.regression(10, jnp.float64)
    table = jnp.arange(1.0, 5.0)

    def turned(y):  # there and back
        order = np.arange(len(y))[::-1]
        return (y * table * np.full((len(y), 1), 3.0))[order][order]

    layers = [ref.dense(6, jnp.float64), ref.dense(4, jnp.float64), turned]
    pipe = jpipe.pipeline(layers, 4, balance=[1, 2])
    variables = pipe.init(KEY, x)
    params = ref.params_of(variables)
    expected = ref.gradient(layers, ref.mse)(params, x, targets)
    result = pipe.value_and_grad(ref.mse)(variables, x, targets)
    ref.assert_close(result, expected, ref.FLOAT64)

    def loss(params, x, targets):
        return ref.mse(ref.compose(layers, params, x), targets)

    grad_fn = jpipe.value_and_grad(loss, 4, num_stages=2)
    placed = grad_fn.place(params, x, targets)
    ref.assert_close(grad_fn(placed, x, targets), expected, ref.FLOAT64)
