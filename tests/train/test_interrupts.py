"""A step that is interrupted leaves the state before it, or the one after it."""

import signal
import sys

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn

import jpipe

from .. import reference as ref

# Its programs are tried once: XLA need not optimize them.
pytestmark = pytest.mark.usefixtures("quick")

X, TARGETS = ref.regression(8)


@pytest.fixture
def terminated():
    """How often SIGTERM was handled; the handler of SIGINT raises, as it does.

    Workers of pytest-xdist ignore Ctrl-C.
    """
    seen = []
    handlers = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: lambda number, frame: seen.append(number),
    }
    before = {number: signal.signal(number, h) for number, h in handlers.items()}
    yield seen
    found = {number: signal.signal(number, h) for number, h in before.items()}
    assert found == handlers


def interrupted(call, number):
    """Sends both signals when Python enters or leaves its so-many-th function.

    Returns:
      How many there are, if it ended before that; else zero.
    """
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += 1
        if count == number:
            sys.setprofile(None)
            try:
                signal.raise_signal(signal.SIGINT)
            finally:
                signal.raise_signal(signal.SIGTERM)

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count if count < number else 0


@pytest.mark.parametrize("donate", [True, False])
def test_an_interrupt_at_any_time_leaves_one_state_or_the_other(donate, terminated):
    """And each signal reaches its handler, though the one before it raises."""
    layers = [ref.dense(6), nn.BatchNorm(), ref.dense(4)]
    pipe = jpipe.pipeline(layers, 4)
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))
    state = pipe.init_train_state(jax.random.key(0), X, tx)
    step = pipe.train_step(ref.mse, tx, donate=donate)
    state, _ = step(state, X, TARGETS)  # which compiles
    following, _ = step(jax.tree.map(jnp.copy, state), X, TARGETS)
    ends, seen = [ref.on_host(state), ref.on_host(following)], set()

    def call():
        step(given, X, TARGETS)

    given = jax.tree.map(jnp.copy, state)
    total = interrupted(call, sys.maxsize)
    assert total > 100
    # Among them the last ones, when the next state was made already; but for those in
    # which what the step returns is in the hands of its caller, as Python sees it.
    numbers = {*range(1, total - 3, total // 60), *range(total - 12, total - 3)}
    for number in sorted(numbers):
        given = jax.tree.map(jnp.copy, state)
        # Where it comes while JAX compares two keys of a cache, JAX raises an error of
        # its own that quotes it.
        with pytest.raises((KeyboardInterrupt, ValueError)) as caught:
            interrupted(call, number)
        assert "KeyboardInterrupt" in f"{caught.type} {caught.value}"
        taken = int(given.step) - int(state.step)
        ref.assert_equal(given, ends[taken])
        seen.add(taken)
        assert terminated.pop() == signal.SIGTERM
        again, _ = step(given, X, TARGETS)  # training goes on from either
        assert int(again.step) == int(ends[taken].step) + 1
    assert seen == ({0, 1} if donate else {0})


def test_a_gradient_that_is_not_a_number_leaves_the_state():
    """Under `jax.debug_nans` nothing is overwritten: the update may fail half-way."""

    def bad(updates, state, params=None):
        first, second = updates
        return (first, jax.tree.map(lambda g: g / jnp.zeros(()), second)), state

    init = lambda params: optax.EmptyState()  # noqa: E731
    tx = optax.chain(optax.GradientTransformation(init, bad), optax.sgd(0.1))
    pipe = jpipe.pipeline([ref.dense(6), ref.dense(4)], 2)
    with jax.debug_nans(True):
        state = pipe.init_train_state(jax.random.key(0), X, tx)
        before = ref.on_host(state)
        step = pipe.train_step(lambda y, t: 0.0 * ref.mse(y, t), tx)
        with pytest.raises(FloatingPointError):
            step(state, X, TARGETS)
        ref.assert_equal(state, before)
