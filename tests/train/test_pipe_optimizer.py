"""`pipe.optimizer`: optax's own loop, where the parameters are.

That it gives the update of every optimizer is told in the catalogue of
`test_optimizers`; here are those that ask for more than a train step gives.
"""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from optax import contrib

import jpipe

from .. import reference as ref
from .test_optimizers import REFUSED, Scale, model

RATE = 1e-2


def parabola(params):
    """What an optimizer may ask for, as a function of the parameters alone."""
    return sum(jnp.sum((leaf - 0.5) ** 2) for leaf in jax.tree.leaves(params))


def by_value(loss, grads):
    return {"value": loss}


def by_function(loss, grads):
    return {"obj_fn": parabola}


# The optimizer, and what it is given by name.
ASKING = {
    "polyak_sgd": (lambda: optax.polyak_sgd(RATE), by_value),
    "contrib.momo": (lambda: contrib.momo(RATE), by_value),
    "contrib.momo_adam": (lambda: contrib.momo_adam(RATE), by_value),
    "contrib.reduce_on_plateau": (
        lambda: optax.chain(
            optax.adam(RATE), contrib.reduce_on_plateau(patience=1, rtol=0.9)
        ),
        by_value,
    ),
    "contrib.sophia": (lambda: contrib.sophia(RATE), by_function),
    "contrib.hutchinson_estimator_diag_hessian": (
        contrib.hutchinson_estimator_diag_hessian,
        by_function,
    ),
    "monitor": (lambda: optax.monitor({"norm": optax.tree.norm}), by_value),
    # The state of the object itself, which is not a transformation.
    "MultiSteps": (
        lambda: optax.MultiSteps(optax.adam(RATE), 2, accumulator_dtype=jnp.float64),
        lambda loss, grads: {},
    ),
    # What does not ask for it does not mind.
    "adam": (lambda: optax.adam(RATE), by_value),
}


def test_all_that_train_steps_refuse_is_here():
    below = {"lbfgs, with line search", "lookahead"}
    # It needs the gradient of every example; a pipeline adds them up.
    never = {"contrib.differentially_private_aggregate"}
    assert set(REFUSED) - never <= set(ASKING) | below


def loop(tx, extra, update, params, gradient):
    state = tx.init(params)
    for _ in range(3):
        loss, grads = gradient(params)
        updates, state = update(grads, state, params, **extra(loss, grads))
        params = optax.apply_updates(params, updates)
    return params, state


def jitted(tx):
    """The update of an optimizer on one device, with functions among its options."""
    compiled = jax.jit(tx.update, static_argnames="obj_fn")
    known = isinstance(tx, optax.GradientTransformationExtraArgs | optax.MultiSteps)
    return lambda *args, **extra: compiled(*args, **(extra if known else {}))


@pytest.mark.parametrize("name", ASKING)
def test_what_asks_for_more_is_given_it(double, name):
    make, extra = ASKING[name]
    gradient = model().gradient
    x, targets = model().x, model().targets

    def on_one_device(params):
        return gradient(params, x, targets)

    value_and_grad = model().pipe.value_and_grad(ref.mse)

    def in_the_pipeline(params):
        return value_and_grad([{"params": own} for own in params], x, targets)

    tx = model().pipe.optimizer(make())
    placed = model().pipe.place(model().params)
    actual = loop(tx, extra, tx.update, placed, in_the_pipeline)
    expected = loop(make(), extra, jitted(make()), model().params, on_one_device)
    ref.assert_close(actual, expected, ref.FLOAT64)
    for new, old in zip(*map(jax.tree.leaves, (actual[0], placed)), strict=True):
        assert new.devices() == old.devices()


def test_a_line_search_is_given_a_function_of_the_parameters(double):
    search = optax.scale_by_backtracking_linesearch(5)
    tx = optax.lbfgs(memory_size=2, linesearch=search)
    value_and_grad = model().pipe.jit(jax.value_and_grad(parabola))
    results = []
    spread = model().pipe.optimizer(tx)
    for init, update, place in (
        (tx.init, jax.jit(tx.update, static_argnames="value_fn"), jax.device_get),
        (spread.init, spread.update, model().pipe.place),
    ):
        params = place(model().params)
        state = init(params)
        for _ in range(2):
            value, grads = jax.device_get(value_and_grad(params))
            grads = place(grads)
            given = {"value": value, "grad": grads, "value_fn": parabola}
            updates, state = update(grads, state, params, **given)
            params = optax.apply_updates(params, updates)
        results.append((params, state))
    ref.assert_close(*results, ref.FLOAT64)
    assert devices_of(results[1][0]) == devices_of(model().pipe.place(model().params))


def test_lookahead_has_parameters_of_two_speeds(double):
    tx = optax.lookahead(optax.sgd(RATE, momentum=0.9), 2, 0.5)
    start = optax.LookaheadParams.init_synced
    placed = model().pipe.place(model().params)
    results = []
    for optimizer, params in (
        (tx, start(model().params)),
        (model().pipe.optimizer(tx), start(placed)),
    ):
        state = optimizer.init(params)
        for _ in range(3):
            grads = jax.tree.map(lambda p: 2 * p, params.fast)
            updates, state = optimizer.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        results.append((params, state))
    expected, actual = results
    ref.assert_close(actual, expected, ref.FLOAT64)
    for tree in (actual[0].fast, actual[0].slow, actual[1].fast_state[0].trace):
        assert devices_of(tree) == devices_of(placed)


def devices_of(tree):
    return [leaf.devices() for leaf in jax.tree.leaves(tree)]


CLIPPED = optax.chain(optax.clip_by_global_norm(0.05), optax.adamw(RATE))


@pytest.fixture(scope="module")
def three():
    """A pipeline of three stages, the second without parameters."""
    layers = [ref.dense(12), jnp.tanh, ref.dense(4)]
    pipe = jpipe.pipeline(layers, 2)
    x, targets = ref.regression(8)
    variables = pipe.init(jax.random.key(0), x)
    params = tuple(entry.get("params", {}) for entry in variables)
    _, grads = pipe.value_and_grad(ref.mse)(variables, x, targets)
    return SimpleNamespace(
        pipe=pipe, x=x, targets=targets, variables=variables, params=params, grads=grads
    )


def test_a_state_is_that_of_a_train_state(three):
    state = three.pipe.init_train_state(
        jax.random.key(0), three.x, CLIPPED, variables=three.variables
    )
    mine = three.pipe.optimizer(CLIPPED).init(three.params)
    ref.assert_equal(mine, state.opt_state)
    assert devices_of(mine) == devices_of(state.opt_state)
    ref.assert_equal(mine, CLIPPED.init(ref.on_host(three.params)))


def test_updates_are_those_of_a_train_step_but_for_the_sum(three):
    """The step adds updates and parameters in the same program: an ulp apart."""
    tx = three.pipe.optimizer(CLIPPED)
    state = three.pipe.init_train_state(
        jax.random.key(0), three.x, CLIPPED, variables=three.variables
    )
    updates, mine = tx.update(three.grads, tx.init(three.params), three.params)
    step = three.pipe.train_step(ref.mse, CLIPPED)
    state, _ = step(state, three.x, three.targets)
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
    trees = three.params, three.grads, updates, state
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(trees))
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(trees)]
    assert len(set(pointers)) == len(pointers)


def test_a_state_from_elsewhere_is_brought_home(three):
    tx = three.pipe.optimizer(CLIPPED)
    state = tx.init(three.params)
    expected = tx.update(three.grads, state, three.params)
    for place in (np.asarray, lambda leaf: jax.device_put(leaf, jax.devices()[7])):
        given = jax.tree.map(place, state)
        actual = tx.update(three.grads, given, three.params)
        ref.assert_close(actual, expected, 2e-7)
        assert devices_of(actual) == devices_of(expected)


def test_train_states_of_flax(three):
    state = TrainState.create(
        apply_fn=three.pipe.apply,
        params=three.params,
        tx=three.pipe.optimizer(CLIPPED),
    )
    gradient = three.pipe.value_and_grad(ref.mse)
    plain = TrainState.create(
        apply_fn=None, params=jax.device_put(three.params, jax.devices()[0]), tx=CLIPPED
    )
    for _ in range(2):
        variables = [{"params": own} for own in state.params]
        _, grads = gradient(variables, three.x, three.targets)
        state = state.apply_gradients(grads=grads)
        plain = plain.apply_gradients(grads=jax.device_put(grads, jax.devices()[0]))
    ref.assert_close(state.params, plain.params, 1e-6)
    assert devices_of(state.params) == devices_of(three.params)


def test_integers_are_no_parameters(three):
    """`jax.grad` gives them gradients of float0, an optimizer no state."""
    params = tuple(
        {**own, "n": jax.device_put(jnp.arange(3), own["bias"].device)} if own else {}
        for own in three.params
    )
    params = ({**params[0], "none": None}, *params[1:])
    grads = tuple(
        {**own, "n": np.zeros(3, jax.dtypes.float0)} if own else {}
        for own in three.grads
    )
    grads = ({**grads[0], "none": None}, *grads[1:])
    tx = three.pipe.optimizer(CLIPPED)
    state = tx.init(params)
    assert state[1][0].mu[0]["n"] is None
    updates, state = tx.update(grads, state, params)
    plain, _ = tx.update(three.grads, tx.init(three.params), three.params)
    for given in (updates, tx.update(grads, tx.init(params), params)[0]):
        for i in (0, 2):
            leaves = {name: given[i][name] for name in plain[i]}
            ref.assert_close(leaves, plain[i], 2e-7)
            assert given[i]["n"].devices() == params[i]["n"].devices()
    new = optax.apply_updates(params, updates)
    ref.assert_equal([new[i]["n"] for i in (0, 2)], [np.arange(3, dtype=np.int32)] * 2)
    assert new[0]["none"] is None
    tx = three.pipe.optimizer(optax.sgd(RATE))
    with pytest.raises(ValueError, match="give the parameters too"):
        tx.update(grads, tx.init(params))


def test_an_optimizer_inside_of_a_function_overwrites_what_is_donated(three):
    tx = three.pipe.optimizer(CLIPPED)

    def update(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    copies = jax.tree.map(jnp.copy, (three.params, tx.init(three.params)))
    expected = update(*copies, three.grads)
    actual = three.pipe.jit(update, donate_argnums=(0, 1))(*copies, three.grads)
    ref.assert_close(actual, expected, 2e-7)
    assert devices_of(actual) == devices_of(expected)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(copies))


def test_errors_name_what_to_type(three):
    tx = three.pipe.optimizer(optax.polyak_sgd())
    with pytest.raises(TypeError, match="'value'") as error:
        tx.update(three.grads, tx.init(three.params), three.params)
    assert "tx.update(grads, state, params, value=loss)" in error.value.__notes__[0]
    with pytest.raises(TypeError, match=re.escape("optax.adamw(1e-3)")):
        three.pipe.optimizer(optax.sgd)


def test_names_of_layers_may_repeat():
    """Momenta are where their parameters are, though all layers have equal paths."""
    pipe = jpipe.pipeline([Scale(), Scale(), Scale()], 2)
    params = ref.params_of(pipe.init(jax.random.key(0), np.ones((2, 1))))
    placed = pipe.place(params)
    state = pipe.optimizer(optax.adam(RATE)).init({"net": placed})
    assert devices_of(state[0].mu["net"]) == devices_of(placed)
