"""Errors of train steps: the state is left as it was."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import traverse_util

import jpipe

from .model import KEY, TARGETS, Unlucky, X, fragile, mse, on_host, says, two_stages


@pytest.mark.parametrize("tx", [0.1, "adam", optax.sgd, None])
def test_optimizer_that_is_no_optimizer(pipe, tx):
    match = says(f"is a {type(tx).__name__}", "optax optimizer", "optax.adamw(1e-3)")
    with pytest.raises(TypeError, match=match):
        pipe.train_step(mse, tx)
    with pytest.raises(TypeError, match=match):
        pipe.init_train_state(KEY, X, tx)


ADAM = optax.adam(0.1)


@pytest.fixture(scope="module")
def step(pipe):
    return pipe.train_step(mse, ADAM)


@pytest.fixture(scope="module")
def first_state(pipe):
    """The state at step 0. A step donates what it is given: it gets a `copy`."""
    return pipe.init_train_state(KEY, X, ADAM)


@pytest.fixture(scope="module")
def second_state(step, first_state):
    """What one step makes of it."""
    return on_host(step(copy(first_state), X, TARGETS)[0])


def copy(state: jpipe.TrainState) -> jpipe.TrainState:
    return jax.tree.map(jnp.copy, state)


def assert_same(state: jpipe.TrainState, expected: jpipe.TrainState) -> None:
    """The same bits in every leaf."""
    actual = on_host(state)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, e, strict=True)


@pytest.mark.parametrize("state", [None, {"params": ()}, (1, 2)], ids=str)
def test_state_that_is_no_state(step, state):
    match = says(f"state is a {type(state).__name__}", "init_train_state")
    with pytest.raises(TypeError, match=match):
        step(state, X, TARGETS)


@pytest.mark.parametrize(
    "tx",
    [
        pytest.param(optax.sgd(0.1), id="sgd"),
        pytest.param(optax.sgd(0.1, momentum=0.9), id="momentum"),
        pytest.param(ADAM, id="adam"),
        pytest.param(
            optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)), id="clip"
        ),
    ],
)
def test_donated_state_cannot_be_used_again(pipe, tx):
    step = pipe.train_step(mse, tx)
    state = pipe.init_train_state(KEY, X, tx)
    step(state, X, TARGETS)
    match = says("earlier step", "the state that it returned", "donate=False")
    with pytest.raises(ValueError, match=match):
        step(state, X, TARGETS)


def test_state_that_was_not_donated_can_be_used_again(pipe, first_state, second_state):
    step = pipe.train_step(mse, ADAM, donate=False)
    state = copy(first_state)
    for _ in range(2):
        assert_same(step(state, X, TARGETS)[0], second_state)


def test_an_array_that_stands_twice_in_a_state_is_named(pipe):
    tx = optax.trace(0.9)
    state = pipe.init_train_state(KEY, X, tx)
    state = state.replace(opt_state=optax.TraceState(trace=state.params))
    match = says("stands twice", "jnp.copy", "donate=False", "* state.", " and state.")
    with pytest.raises(ValueError, match=match):
        pipe.train_step(mse, tx)(state, X, TARGETS)
    pipe.train_step(mse, tx, donate=False)(state, X, TARGETS)


def with_bias(state: jpipe.TrainState, bias: Any) -> jpipe.TrainState:
    first = {**state.params[0], "bias": bias}
    return dataclasses.replace(state, params=(first, *state.params[1:]))


def with_optimizer_state(
    pipe: jpipe.Pipeline, state: jpipe.TrainState, tx: optax.GradientTransformation
) -> jpipe.TrainState:
    other = pipe.init_train_state(KEY, X, tx).opt_state
    return dataclasses.replace(state, opt_state=other)


def unlucky_loss(outputs, targets):
    raise Unlucky("no luck in losses")


# What each call must raise, and the call: of a pipe, its compiled step and a state.
BAD_CALLS = {
    "no state": (TypeError, lambda pipe, step, state: step(state.params, X, TARGETS)),
    "too few examples": (
        ValueError,
        lambda pipe, step, state: step(state, X[:1], TARGETS[:1]),
    ),
    "unequal sizes": (
        ValueError,
        lambda pipe, step, state: step(state, X, TARGETS[:3]),
    ),
    "no array": (TypeError, lambda pipe, step, state: step(state, "x", TARGETS)),
    "another width": (
        ValueError,
        lambda pipe, step, state: step(state, X[:, :2], TARGETS),
    ),
    "targets that do not fit": (
        TypeError,
        lambda pipe, step, state: step(state, X, X),
    ),
    "parameters of another shape": (
        ValueError,
        lambda pipe, step, state: step(with_bias(state, jnp.zeros(4)), X, TARGETS),
    ),
    "parameters on the host": (
        ValueError,
        lambda pipe, step, state: step(
            with_bias(state, np.zeros(5, np.float32)), X, TARGETS
        ),
    ),
    "parameters on another device": (
        ValueError,
        lambda pipe, step, state: step(
            with_bias(state, jax.device_put(jnp.zeros(5), jax.devices()[7])),
            X,
            TARGETS,
        ),
    ),
    "optimizer state with fewer leaves": (
        ValueError,
        lambda pipe, step, state: step(
            with_optimizer_state(pipe, state, optax.sgd(0.1)), X, TARGETS
        ),
    ),
    "optimizer state of another kind": (
        ValueError,
        lambda pipe, step, state: step(
            with_optimizer_state(pipe, state, optax.adabelief(0.1)), X, TARGETS
        ),
    ),
    "step of another optimizer": (
        ValueError,
        lambda pipe, step, state: pipe.train_step(mse, optax.sgd(0.1))(
            state, X, TARGETS
        ),
    ),
    "loss that raises": (
        Unlucky,
        lambda pipe, step, state: pipe.train_step(unlucky_loss, ADAM)(
            state, X, TARGETS
        ),
    ),
    "layer that raises": (
        Unlucky,
        lambda pipe, step, state: fragile("always").train_step(mse, ADAM)(
            state, X, TARGETS
        ),
    ),
}


@pytest.mark.parametrize(("error", "bad_call"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_bad_call_leaves_the_state_as_it_was(
    pipe, step, first_state, second_state, error, bad_call
):
    state = copy(first_state)
    with pytest.raises(error):
        bad_call(pipe, step, state)
    assert_same(step(state, X, TARGETS)[0], second_state)


@pytest.mark.parametrize(
    "tx",
    [
        pytest.param(optax.sgd(0.1), id="fewer leaves"),
        pytest.param(optax.sgd(0.1, momentum=0.9), id="other leaves"),
        # The leaves are as many and of the same shapes: only their meaning differs.
        pytest.param(optax.adabelief(0.1), id="another kind"),
    ],
)
def test_state_of_another_optimizer(pipe, step, first_state, tx):
    other = pipe.init_train_state(KEY, X, tx)
    match = says("opt_state", "init_train_state")
    with pytest.raises(ValueError, match=match):
        step(other, X, TARGETS)
    with pytest.raises(ValueError, match=match):
        pipe.train_step(mse, tx)(copy(first_state), X, TARGETS)


def test_state_of_another_balance_is_refused_until_it_is_placed(
    pipe, step, second_state
):
    other = jpipe.pipeline(two_stages(), 2)
    state = other.init_train_state(KEY, X, ADAM)
    match = says("state: not in place; type state = pipe.place(state)", "stage 1")
    with pytest.raises(ValueError, match=match):
        step(state, X, TARGETS)
    with pytest.raises(ValueError, match=match):
        pipe.profile_step(state, (X, TARGETS), mse)
    assert_same(step(pipe.place(state), X, TARGETS)[0], second_state)


def test_input_and_targets_that_are_swapped(step, first_state):
    with pytest.raises(ValueError, match=says("for x of float32[4,2]; one of the two")):
        step(first_state, TARGETS, X)


def failing(error: str) -> optax.GradientTransformation:
    def update(grads, state, params=None):
        raise TypeError(error)

    return optax.GradientTransformation(lambda params: (), update)


@pytest.mark.parametrize(
    ("tx", "is_missing"),
    [
        pytest.param(failing("no luck"), False, id="another error"),
        pytest.param(optax.contrib.reduce_on_plateau(), True, id="missing"),
    ],
)
def test_advice_on_optimizers_that_need_more_arguments(pipe, tx, is_missing):
    placed, variables = pipe.optimizer(tx), pipe.init(KEY, X)
    params = tuple(entry.get("params", {}) for entry in variables)

    def update():
        placed.update(params, placed.init(params), params)

    for call, advice in (
        (lambda: pipe.init_train_state(KEY, X, tx), "loop of your own"),
        (update, "tx.update(grads, state, params, value=loss)"),
    ):
        with pytest.raises(TypeError) as refusal:
            call()
        assert is_missing == any(advice in text for text in refusal.value.__notes__)


def no_biases(params: Any) -> Any:
    flat = traverse_util.flatten_dict(params)
    return traverse_util.unflatten_dict({path: path[-1] != "bias" for path in flat})


def test_a_mask_of_a_dict(pipe):
    def make(mask: Any) -> jpipe.TrainState:
        return pipe.init_train_state(KEY, X, optax.adamw(0.1, mask=mask))

    def make_by_hand(mask: Any) -> Any:
        return pipe.optimizer(optax.adamw(0.1, mask=mask)).init(make(True).params)

    for call in (make, make_by_hand):
        with pytest.raises(AssertionError) as refusal:
            call(no_biases)
        (typed,) = [
            found[1]
            for text in refusal.value.__notes__
            if (found := re.search("mask=(lambda .*)$", text))
        ]
        # What it says to type works when it is typed.
        call(eval(typed, {"mask_of_entry": no_biases}))


def test_optimizer_state_on_another_device_is_refused(pipe, step, first_state):
    # As after placing the parameters of a checkpoint, but not the rest of it.
    moved = jax.device_put(first_state.opt_state, jax.devices()[7])
    state = dataclasses.replace(copy(first_state), opt_state=moved)
    with pytest.raises(ValueError, match=says("not in place", "pipe.place(")):
        step(state, X, TARGETS)
