"""A step that is interrupted leaves the state before it, or the one after it."""

import signal

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn

import jpipe
from jpipe._instructions._interrupts import Interrupts

from .. import reference as ref

X, TARGETS = ref.regression(8)


def started(donate=True):
    layers = [ref.dense(6), nn.BatchNorm(), ref.dense(4)]
    pipe = jpipe.pipeline(layers, 4)
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))
    state = pipe.init_train_state(jax.random.key(0), X, tx)
    step = pipe.train_step(ref.mse, tx, donate=donate)
    state, _ = step(state, X, TARGETS)  # which compiles
    return step, state


def program_of(step):
    (known,) = step._compiled.values()
    return known.program


def after(number, act):
    """Steps of the loop of which one does something more, once it has run."""

    def wrapped(program):
        run = program.steps[number].run

        def with_more(*given):
            results = run(*given)
            act()
            return results

        steps = list(program.steps)
        steps[number] = steps[number]._replace(run=with_more)
        return steps

    return wrapped


@pytest.fixture(params=[signal.SIGINT, signal.SIGALRM])
def press(request):
    """Ctrl-C, which workers of pytest-xdist ignore, or what a time limit sends."""
    before = signal.signal(request.param, signal.default_int_handler)
    yield lambda: signal.raise_signal(request.param)
    after = signal.signal(request.param, before)
    assert after is signal.default_int_handler


@pytest.mark.parametrize("donate", [True, False])
def test_an_interrupt_after_any_instruction(donate, press):
    step, state = started(donate)
    program, kept = program_of(step), ref.on_host(state)
    following, _ = step(jax.tree.map(jnp.copy, state), X, TARGETS)
    following, steps = ref.on_host(following), program.steps
    seen = set()
    for number in range(len(steps)):
        given = jax.tree.map(jnp.copy, state)
        program.steps = after(number, press)(program)
        with pytest.raises(KeyboardInterrupt):
            step(given, X, TARGETS)
        program.steps = steps
        expected = [kept, following][int(given.step) - int(state.step)]
        ref.assert_equal(given, expected)
        seen.add(int(given.step) - int(state.step))
        again, _ = step(given, X, TARGETS)  # training goes on from either
        assert int(again.step) == int(ref.on_host(expected.step)) + 1
    assert seen == ({0, 1} if donate else {0})


def test_each_signal_that_waits_reaches_its_handler():
    def ends(number, frame):
        raise TimeoutError

    seen = []
    handlers = {signal.SIGALRM: ends, signal.SIGTERM: lambda n, frame: seen.append(n)}
    before = {number: signal.signal(number, h) for number, h in handlers.items()}

    def held():
        with Interrupts() as interrupts:
            interrupts.hold()
            signal.raise_signal(signal.SIGALRM)
            signal.raise_signal(signal.SIGTERM)
            assert not seen

    try:
        with pytest.raises(TimeoutError):
            held()
        assert seen == [signal.SIGTERM]
        assert {n: signal.getsignal(n) for n in handlers} == handlers
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_an_exception_before_anything_is_overwritten_changes_nothing():
    class Broken(Exception):
        pass

    def fail():
        raise Broken

    step, state = started()
    program, kept = program_of(step), ref.on_host(state)
    steps = program.steps
    first = program._overwrites
    assert 0 < first < len(steps)
    for number in range(first):
        program.steps = after(number, fail)(program)
        with pytest.raises(Broken):
            step(state, X, TARGETS)
        program.steps = steps
        ref.assert_equal(state, kept)
    step(state, X, TARGETS)


def test_what_is_not_a_number_leaves_the_state():
    """Under `jax.debug_nans` nothing is overwritten: the update may fail half-way."""
    layers = [ref.dense(6), ref.dense(4)]
    pipe = jpipe.pipeline(layers, 2)

    def bad(updates, state, params=None):
        first, second = updates
        return (first, jax.tree.map(lambda g: g / jnp.zeros(()), second)), state

    tx = optax.chain(
        optax.GradientTransformation(lambda params: optax.EmptyState(), bad),
        optax.sgd(0.1),
    )
    with jax.debug_nans(True):
        state = pipe.init_train_state(jax.random.key(0), X, tx)
        kept = ref.on_host(state)
        step = pipe.train_step(lambda y, t: 0.0 * ref.mse(y, t), tx)
        with pytest.raises(FloatingPointError):
            step(state, X, TARGETS)
        ref.assert_equal(state, kept)
