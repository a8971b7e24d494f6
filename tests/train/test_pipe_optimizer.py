"""`pipe.optimizer`: a custom training loop of optax, where the parameters are.

That it gives the update of every optimizer is in `test_optimizers`; here are those
that ask for more than a train step gives, and what such a loop does with the result.
"""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import jpipe

from .. import reference as ref
from .test_optimizers import Scale, model

RATE = 1e-2
CLIPPED = optax.chain(optax.clip_by_global_norm(0.05), optax.adamw(RATE))


def devices_of(tree):
    return [leaf.devices() for leaf in jax.tree.leaves(tree)]


def parabola(params):
    """What an optimizer may ask for, as a function of the parameters alone."""
    return sum(jnp.sum((leaf - 0.5) ** 2) for leaf in jax.tree.leaves(params))


# The optimizer, and what it is given by name, of a loss and a gradient.
ASKING = {
    "polyak_sgd": (lambda: optax.polyak_sgd(RATE), lambda loss, _: {"value": loss}),
    "sophia": (lambda: contrib.sophia(RATE), lambda *_: {"obj_fn": parabola}),
    "lbfgs": (
        lambda: optax.lbfgs(
            memory_size=2, linesearch=optax.scale_by_backtracking_linesearch(5)
        ),
        lambda loss, grad: {"value": loss, "grad": grad, "value_fn": parabola},
    ),
    # Its state has another structure after the first update.
    "monitor": (lambda: optax.monitor({"norm": optax.tree.norm}), lambda *_: {}),
}


@pytest.mark.parametrize("name", ASKING)
def test_an_optimizer_is_given_by_name_what_it_asks_for(double, name):
    make, extra = ASKING[name]
    tx, pipe = make(), model().pipe
    on_one = jax.jit(tx.update, static_argnames=("obj_fn", "value_fn"))
    spread, gradient = pipe.optimizer(tx), jax.jit(jax.value_and_grad(parabola))
    results = []
    for init, update, place in (
        (spread.init, spread.update, pipe.place),
        (tx.init, on_one, lambda tree: tree),
    ):
        params = place(model().params)
        state = init(params)
        for _ in range(2):
            loss, grads = gradient(jax.device_get(params))
            loss, grads = float(loss), place(jax.device_get(grads))
            updates, state = update(grads, state, params, **extra(loss, grads))
            params = optax.apply_updates(params, updates)
        results.append((params, state))
    ref.assert_close(*results, ref.FLOAT64)
    (params, _), _ = results
    assert devices_of(params) == devices_of(pipe.place(model().params))
    assert len(set().union(*devices_of(params))) == 3


@pytest.fixture(scope="module")
def three():
    """A pipeline of three stages, the second without parameters."""
    pipe = jpipe.pipeline([ref.dense(12), jnp.tanh, ref.dense(4)], 2)
    batch = ref.regression(8)
    variables = pipe.init(jax.random.key(0), batch[0])
    params = tuple(entry.get("params", {}) for entry in variables)
    _, grads = pipe.value_and_grad(ref.mse)(variables, *batch)
    tx = pipe.optimizer(CLIPPED)
    return SimpleNamespace(
        pipe=pipe, batch=batch, variables=variables, params=params, grads=grads, tx=tx
    )


def test_state_and_updates_are_those_of_a_train_step(three):
    """The step adds updates and parameters in the same program: an ulp apart."""
    state = three.pipe.init_train_state(
        jax.random.key(0), three.batch[0], CLIPPED, variables=three.variables
    )
    mine = three.tx.init(three.params)
    ref.assert_equal(mine, state.opt_state)
    assert devices_of(mine) == devices_of(state.opt_state)
    updates, mine = three.tx.update(three.grads, mine, three.params)
    state, _ = three.pipe.train_step(ref.mse, CLIPPED)(state, *three.batch)
    ref.assert_close(mine, state.opt_state, 2e-7)
    ref.assert_close(optax.apply_updates(three.params, updates), state.params, 2e-7)


def test_the_second_update_traces_and_overwrites_nothing(three):
    calls = []

    def update(grads, state, params=None):
        calls.append(1)
        return grads, state

    tx = three.pipe.optimizer(optax.GradientTransformation(lambda p: p, update))
    state = tx.init(three.params)
    for _ in range(3):
        updates, state = tx.update(three.grads, state, three.params)
    assert len(calls) == 1
    leaves = jax.tree.leaves((three.params, three.grads, updates, state))
    assert not any(leaf.is_deleted() for leaf in leaves)
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


def test_errors_of_a_pipe_optimizer_say_what_to_type(three):
    tx = three.pipe.optimizer(optax.polyak_sgd())
    with pytest.raises(TypeError, match="'value'") as error:
        tx.update(three.grads, tx.init(three.params), three.params)
    assert "tx.update(grads, state, params, value=loss)" in error.value.__notes__[0]
    with pytest.raises(TypeError, match=re.escape("optax.adamw(1e-3)")):
        three.pipe.optimizer(optax.sgd)


def test_momenta_of_layers_with_equal_paths_are_where_their_parameters_are():
    pipe = jpipe.pipeline([Scale(), Scale(), Scale()], 2)
    variables = pipe.init(jax.random.key(0), np.ones((2, 1)))
    params = [entry["params"] for entry in variables]
    state = pipe.optimizer(optax.adam(RATE)).init({"net": params})
    assert devices_of(state[0].mu["net"]) == devices_of(params)
