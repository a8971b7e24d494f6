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
from flax.training import train_state

import jpipe

from .model import KEY, TARGETS, Unlucky, X, mse, on_host, rows, says, two_stages


@pytest.mark.parametrize(
    ("tx", "match"),
    [
        ("adam", "tx is 'adam'; needs an optax optimizer, such as optax.adamw(1e-3)"),
        (mse, "tx is <function mse ... needs an optax optimizer, such as"),
        (
            optax.sgd,
            "tx=optax.sgd ... makes an optimizer: call it, as in optax.adamw(1e-3)",
        ),
    ],
)
def test_objects_in_place_of_optimizers_are_refused(pipe, tx, match):
    match = says(match)
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


def test_array_that_is_twice_in_a_state_is_named(pipe):
    tx = optax.trace(0.9)
    state = pipe.init_train_state(KEY, X, tx)
    state = state.replace(opt_state=optax.TraceState(trace=state.params))
    match = says(
        "stands twice",
        "pipe.jit(lambda tree: tree)",
        "donate=False",
        "* state.",
        " and state.",
    )
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


def call(x=X, targets=TARGETS, change=lambda state: state):
    """A step on another batch, or of another state."""
    return lambda pipe, step, state: step(change(state), x, targets)


def changed(change):
    return call(change=change)


def of(tx: optax.GradientTransformation) -> Any:
    """A step with the optimizer state of another optimizer."""
    return lambda pipe, step, state: step(
        with_optimizer_state(pipe, state, tx), X, TARGETS
    )


def other_step(loss_fn, tx) -> Any:
    return lambda pipe, step, state: pipe.train_step(loss_fn, tx)(state, X, TARGETS)


def moved(state):
    """As after placing the parameters of a checkpoint, but not the rest of it."""
    elsewhere = jax.device_put(state.opt_state, jax.devices()[7])
    return dataclasses.replace(state, opt_state=elsewhere)


def as_state_of_flax(state):
    params = {"w": jnp.ones(3)}
    return train_state.TrainState.create(apply_fn=mse, params=params, tx=ADAM)


def in_half(state):
    """Parameters of another dtype than those for which the rest was made."""
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state.params)
    return dataclasses.replace(state, params=params)


BAD_CALLS = {
    TypeError: {
        "state is a tuple ... init_train_state": changed(lambda state: state.params),
        "a step returns two: type state, metrics = step(state, x, targets)": (
            changed(lambda state: (state, {"loss": 0.0}))
        ),
        "is a flax.training.train_state.TrainState; needs the jpipe.TrainState": (
            changed(as_state_of_flax)
        ),
        "jnp.asarray ... x is": call("x"),
    },
    ValueError: {
        "x is float32[4,2] ... fit float32[4,3] ... x before": call(TARGETS, X),
        "['bias'] has shape (4,)": changed(lambda s: with_bias(s, jnp.zeros(4))),
        "pipe.place(": changed(lambda s: with_bias(s, np.zeros(5, np.float32))),
        "not in place ... pipe.place(": changed(moved),
        "2 entries ... model_state 3": changed(
            lambda s: s.replace(params=s.params[:2])
        ),
        "state.params is a list ... tuple": changed(
            lambda s: dataclasses.replace(s, params=list(s.params))
        ),
        # The leaves are as many and of the same shapes: only their meaning differs.
        "not that of the optimizer of this step": of(optax.adabelief(0.1)),
        "made for parameters of another dtype ... make a new state, state = pipe": (
            changed(in_half)
        ),
        "opt_state": other_step(mse, optax.sgd(0.1, momentum=0.9)),
    },
    Unlucky: {"no luck in losses": other_step(unlucky_loss, ADAM)},
}


@pytest.mark.parametrize(("bad_call", "error", "match"), rows(BAD_CALLS))
def test_bad_call_leaves_the_state_as_it_was(
    pipe, step, first_state, second_state, bad_call, error, match
):
    state = copy(first_state)
    with pytest.raises(error, match=match):
        bad_call(pipe, step, state)
    assert_same(step(state, X, TARGETS)[0], second_state)


def test_state_of_another_balance_is_refused_until_it_is_placed(
    pipe, step, second_state
):
    other = jpipe.pipeline(two_stages(), 2)
    state = other.init_train_state(KEY, X, ADAM)
    match = says("state: not in place; type state = pipe.place(state)", "stage 1")
    with pytest.raises(ValueError, match=match):
        step(state, X, TARGETS)
    with pytest.raises(ValueError, match=match):
        step.profile(state, X, TARGETS)
    assert_same(step(pipe.place(state), X, TARGETS)[0], second_state)


def test_parameters_of_another_dtype_train_in_a_new_state(pipe, first_state):
    step = pipe.train_step(mse, ADAM)
    variables = in_half(first_state).variables
    state = pipe.init_train_state(KEY, X, ADAM, variables=variables)
    _, metrics = step(state, X, TARGETS)
    assert jnp.isfinite(metrics["loss"])


def test_old_parameters_read_after_a_step_raise_as_the_page_on_errors_says(pipe):
    state = pipe.init_train_state(KEY, X, ADAM)
    params = state.params
    pipe.train_step(mse, ADAM)(state, X, TARGETS)
    with pytest.raises(RuntimeError, match="Array has been deleted"):
        jnp.sum(params[0]["kernel"])


def no_biases(params: Any) -> Any:
    flat = traverse_util.flatten_dict(params)
    return traverse_util.unflatten_dict({path: path[-1] != "bias" for path in flat})


def test_mask_of_one_entry_is_answered_with_a_mask_of_all(pipe):
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
