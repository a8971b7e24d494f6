"""Collections beside the parameters: what a step makes of them."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx, struct

import jpipe

from .. import reference as ref


class Previous(nn.Module):
    """Keeps in one variable what another was."""

    @nn.compact
    def __call__(self, x):
        now = self.variable("memory", "now", lambda: jnp.float32(0))
        before = self.variable("memory", "before", lambda: jnp.float32(-5))
        if self.is_mutable_collection("memory"):
            before.value = now.value
            now.value = now.value + 1
        return ref.dense(4)(x)


def test_a_variable_may_take_the_value_of_another():
    pipe = jpipe.pipeline([Previous(), jnp.tanh], 2)
    x, targets = ref.regression(4)
    tx = optax.sgd(0.0)
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    made = ref.on_host(state.model_state[0]["memory"])
    state, _ = pipe.train_step(ref.mse, tx)(state, x, targets)
    memory = ref.on_host(state.model_state[0]["memory"])
    assert memory["before"] == made["now"]
    assert memory["now"] == made["now"] + 1


class Last(nn.Module):
    """Keeps the largest number of the micro-batch that it saw last, as an integer."""

    @nn.compact
    def __call__(self, x):
        seen = self.variable("memory", "seen", lambda: jnp.int32(-1))
        if self.is_mutable_collection("memory") and not self.is_initializing():
            seen.value = x.max().astype(jnp.int32)
        return nn.Dense(1)(x)


@pytest.mark.parametrize("remat", ["full", "none", "except_last"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_an_integer_is_what_the_last_microbatch_makes_of_it(schedule, remat):
    x, tx = jnp.arange(4.0)[:, None], optax.sgd(0.0)
    layers = [jnp.positive, Last()]
    pipe = jpipe.pipeline(layers, 4, schedule=schedule, remat=remat)
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    state, metrics = pipe.train_step(ref.mse, tx)(state, x, x)
    assert state.model_state[1]["memory"]["seen"] == 3
    twin = jpipe.sequential(layers)
    other = twin.init_train_state(jax.random.key(0), x, tx)
    _, expected = twin.train_step(ref.mse, tx)(other, x, x)
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-6)


class Counts(nnx.Module):
    """Counts its calls in floats, and holds a constant behind a transformation."""

    def __init__(self):
        self.calls = nnx.Variable(jnp.zeros(()))
        self.constant = nnx.Variable(jnp.asarray([0.1, 1.7, 3.3]))
        self.linear = nnx.Linear(5, 4, rngs=nnx.Rngs(0))

    def __call__(self, x):
        self.calls[...] += 1
        scaled = nnx.remat(lambda own, x: own.linear(x) * own.constant[...].sum())
        return scaled(self, x)


@pytest.mark.parametrize("num_microbatches", [1, 3, 7])
def test_the_mean_of_equal_values_is_that_value(num_microbatches):
    x, targets = ref.regression(10)
    tx = optax.sgd(1e-4)
    layer = Counts()
    pipe = jpipe.pipeline([layer, ref.dense(4)], num_microbatches)
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    step = pipe.train_step(ref.mse, tx)
    for _ in range(20):
        state, _ = step(state, x, targets)
    held = state.model_state[0]["variable"]
    assert held["calls"] == 20
    np.testing.assert_array_equal(held["constant"], layer.constant[...])


def test_what_flax_overwrites_with_gradients_is_refused():
    x, targets = ref.regression(8)
    tx = optax.sgd(0.1)
    layer = nn.Dense(4, dot_general_cls=nn.Fp8DirectDotGeneralOp)
    pipe = jpipe.pipeline([layer, ref.dense(4)], 2)
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    pipe.apply(state.variables, x)
    with pytest.raises(ValueError, match="Dense holds the collection _overwrite_with"):
        pipe.train_step(ref.mse, tx)(state, x, targets)


class Writes(nn.Module):
    """Writes what a function makes of its input."""

    function: Any
    first: Any = 0.0

    @nn.compact
    def __call__(self, x, train):
        held = self.variable(
            "state", "held", lambda: jax.tree.map(jnp.asarray, self.first)
        )
        if train:
            held.value = self.function(x, held.value)
        return nn.Dense(4)(x)


def written(function, first=0.0):
    """What two micro-batches have made of a state, whose inputs begin with 0 and 1."""
    x = jnp.arange(8.0)[:, None] * jnp.ones(4)
    tx = optax.sgd(0.1)
    pipe = jpipe.pipeline([Writes(function, first), ref.dense(4)], 2)
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    state, _ = pipe.train_step(ref.mse, tx)(state, x, x)
    return state.model_state[0]["state"]["held"]


@pytest.mark.parametrize("values", [(np.inf, 1), (1, np.inf), (-np.inf, -5)])
def test_a_mean_with_an_infinity_is_one(values):
    held = written(lambda x, _: jnp.where(x.min() == 0, *map(float, values)))
    assert held == next(value for value in values if np.isinf(value))


@struct.dataclass
class Counted:
    """An array, and a count that JAX takes for a part of the structure."""

    mean: jax.Array
    count: int = struct.field(pytree_node=False, default=0)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, held: Counted(held.mean, held.count + 1),
        lambda x, held: None,
        lambda x, held: {},
    ],
)
def test_a_structure_that_a_call_changes_is_refused(function):
    """Its arrays would be kept in the structure of before."""
    more = written(lambda x, held: held.replace(mean=held.mean + 1), Counted(0.0))
    assert more.mean == 1
    with pytest.raises(ValueError, match=r"the structure of .*, state/held"):
        written(function, Counted(0.0))


def test_a_mean_of_large_values_does_not_overflow():
    assert written(lambda x, _: jnp.where(x.min() == 0, 3e38, -3e38)) == 0


def test_a_key_that_a_layer_moves_on_is_refused():
    with pytest.raises(ValueError, match="all micro-batches would draw the same"):
        written(lambda _, key: jax.random.split(key)[0], jax.random.key(3))


def normed(batch=8):
    x, targets = ref.regression(batch)
    norms = [nn.BatchNorm(), nnx.BatchNorm(5, rngs=nnx.Rngs(0))]
    layers = [norms[0], jnp.tanh, norms[1], ref.dense(4)]
    pipe = jpipe.pipeline(layers, 3, balance=[2, 2])
    return pipe, pipe.init(jax.random.key(0), x), x, targets


def test_a_loop_of_ones_own_has_the_state_that_a_step_keeps():
    pipe, variables, x, targets = normed(10)
    tx = optax.sgd(0.1)
    state = pipe.init_train_state(jax.random.key(0), x, tx, variables=variables)
    find = pipe.value_and_grad(ref.mse, has_state=True)
    with_aux = pipe.value_and_grad(
        lambda y, t: (ref.mse(y, t), y), has_aux=True, has_state=True, aux_axes=0
    )
    update = pipe.optimizer(tx)
    params, opt_state = state.params, update.init(state.params)
    step = pipe.train_step(ref.mse, tx, donate=False)
    for _ in range(2):
        state, metrics = step(state, x, targets)
        (_, y, same), _ = with_aux(variables, x, targets)
        (loss, new), grads = find(variables, x, targets)
        ref.assert_equal(new, same)
        assert y.shape == targets.shape
        ref.assert_close(loss, metrics["loss"], ref.FLOAT32)
        updates, opt_state = update.update(grads, opt_state, params)
        params = pipe.jit(optax.apply_updates)(params, updates)
        variables = [
            {**own, **held, "params": p} if "params" in own else {**own, **held}
            for own, held, p in zip(variables, new, params, strict=True)
        ]
        ref.assert_close(new, state.model_state, ref.FLOAT32)
        ref.assert_close(params, state.params, ref.FLOAT32)


def test_what_value_and_grad_leaves_is_said_once():
    pipe, variables, x, targets = normed()
    find = pipe.value_and_grad(ref.mse)
    says = r"variables\[0\]\['batch_stats'\], .*\[2\].*has_state=True"
    find(variables, x, targets, train=False)
    with pytest.warns(UserWarning, match=says) as told:
        find(variables, x, targets)
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        find(variables, x, targets)


def test_a_forward_pass_says_what_it_leaves_in_training():
    pipe, variables, x, _ = normed()
    says = r"apply leaves variables\[0\]\['batch_stats'\], .*\[2\].*has_state=True"
    pipe.apply(variables, x)
    with pytest.warns(UserWarning, match=says) as told:
        pipe.apply(variables, x, train=True)
    assert told[0].filename == __file__
