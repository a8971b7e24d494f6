"""A training state: made from variables or anew, placed, stepped, donated.

That steps are those of optax on one device, for each schedule, remat and reduction, is
in the rows of `tests.matrix`.
"""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import serialization

import jpipe
from jpipe._arguments import _cache

from .. import reference as ref
from ..listing import program_of

# Its programs are tried once: XLA need not optimize them.
pytestmark = pytest.mark.usefixtures("quick")

# Its state has keys, too.
NOISE = optax.add_noise(1e-3, 0.5, jax.random.key(3))
TX = optax.chain(optax.clip_by_global_norm(0.1), NOISE, optax.adamw(1e-2))
X, TARGETS = ref.regression(8)
KEY = jax.random.key(3)


def layers():
    """With tied parameters, statistics, and something to draw."""
    again, drop = ref.dense(5), nn.Dropout(0.2, deterministic=False)
    return [again, jnp.tanh, again, drop, nn.BatchNorm(), ref.dense(4)]


@pytest.fixture(scope="module")
def pipe():
    return jpipe.pipeline(layers(), 2, balance=[1, 2, 3])


@pytest.fixture(scope="module")
def other():
    return jpipe.pipeline(layers(), 2, balance=[4, 2], devices=jax.devices()[4:6])


@pytest.fixture
def state(pipe):
    return pipe.init_train_state(KEY, X, TX)


@pytest.fixture(scope="module")
def small():
    """One layer, whose programs are small."""
    return jpipe.pipeline([ref.dense(4)], 2)


def test_a_folder_without_a_state_cannot_be_restored(state):
    saved = serialization.to_state_dict(state)
    del saved["step"]
    with pytest.raises(ValueError, match="no TrainState was saved here"):
        serialization.from_state_dict(state, saved)
    with pytest.raises(TypeError, match="stop"):
        state.replace(stop=1)


def test_a_donated_state_is_refused_wherever_it_is_used(small):
    state = small.init_train_state(KEY, X, TX)
    variables = state.variables
    step = small.train_step(ref.mse, TX)
    step(state, X, TARGETS)
    for use in (
        lambda: small.apply(variables, X),
        lambda: small.place(state),
        lambda: small.place(variables),
        lambda: step.profile(state, X, TARGETS),
        lambda: small.value_and_grad(ref.mse)(variables, X, TARGETS),
        lambda: small.init_train_state(KEY, X, TX, variables=variables),
    ):
        with pytest.raises(ValueError, match="donated: it was given to an earlier"):
            use()


class TestGivenVariables:
    def test_training_starts_from_copies_of_them(self, pipe, other, state):
        """Whether they are here, on the host, or in another pipeline."""
        given = state.variables
        ref.assert_equal(given, pipe.init(KEY, X))
        params = ref.params_of(given)
        ref.assert_equal(state.opt_state, TX.init(params))
        for layer, device in ((0, 0), (5, 2)):
            trees = state.params[layer], state.opt_state[2][0].mu[layer]
            found = [leaf.device for leaf in jax.tree.leaves(trees)]
            assert set(found) == {pipe.devices[device]}
        for variables in (given, jax.device_get(given), other.place(given)):
            started = pipe.init_train_state(KEY, X, TX, variables=variables)
            ref.assert_equal(started, state)
        started = pipe.init_train_state(KEY, X, TX, variables=given)
        pipe.train_step(ref.mse, TX)(started, X, TARGETS)
        ref.assert_equal(given, pipe.init(KEY, X))

    def test_memory_of_numpy_may_be_filled_anew(self, small):
        """JAX shares it with NumPy if it begins at a multiple of 64 bytes."""
        raw = np.empty(4 * 20 + 64, np.uint8)
        start = -raw.ctypes.data % 64
        kernel = raw[start : start + 80].view(np.float32).reshape(5, 4)
        kernel[:] = 1
        given = [{"params": {"kernel": kernel, "bias": np.zeros(4, np.float32)}}]
        state = small.init_train_state(KEY, X, TX, variables=given)
        placed = small.place(given)
        jax.block_until_ready((state.params, placed))
        kernel[:] = 9
        assert state.params[0]["kernel"].max() == 1
        assert placed[0]["params"]["kernel"].max() == 1

    def test_integers_are_refused_and_half_precision_stays(self, small):
        given = [{"params": {"kernel": np.ones((5, 4), int), "bias": np.zeros(4)}}]
        with pytest.raises(ValueError, match=r"'kernel'\] .* of int64, the model"):
            small.init_train_state(KEY, X, TX, variables=given)
        given[0]["params"]["kernel"] = np.ones((5, 4), np.float16)
        state = small.init_train_state(KEY, X, TX, variables=given)
        assert state.params[0]["kernel"].dtype == jnp.float16

    def test_weak_types_make_no_second_program(self, small):
        """A parameter, and a hyperparameter, that began as a number of Python."""
        traced, tx = [], optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
        given = small.init(KEY, X)
        given[0]["params"]["bias"] = jnp.broadcast_to(jnp.asarray(2.0), (4,))
        assert given[0]["params"]["bias"].weak_type
        state = small.init_train_state(KEY, X, tx, variables=given)

        def loss_fn(y, t):
            traced.append(1)
            return ref.mse(y, t)

        step = small.train_step(loss_fn, tx)
        state, _ = step(state, X, TARGETS)
        count = len(traced)
        state, _ = step(state, X, TARGETS)
        assert len(traced) == count
        state.opt_state.hyperparams["learning_rate"] = 0.05
        message = r"learning_rate'\]: given a Python float, needs float32\[\]"
        with pytest.raises(ValueError, match=message):
            step(state, X, TARGETS)
        state.opt_state.hyperparams["learning_rate"] = jnp.asarray(0.05)
        step(state, X, TARGETS)


def test_a_state_keeps_neither_the_step_nor_its_programs():
    def trained():
        pipe = jpipe.pipeline([ref.dense(8), ref.dense(4)], 2)
        tx = optax.sgd(1e-2)
        step = pipe.train_step(ref.mse, tx)
        state, _ = step(pipe.init_train_state(KEY, X, tx), X, TARGETS)
        return state, weakref.ref(step), weakref.ref(pipe)

    state, step, pipe = trained()
    gc.collect()
    assert (step(), pipe()) == (None, None)
    other = jpipe.pipeline([ref.dense(8), ref.dense(4)], 2)
    state, _ = other.train_step(ref.mse, optax.sgd(1e-2))(state, X, TARGETS)
    assert int(state.step) == 2


def test_a_step_of_many_sizes_keeps_the_programs_of_the_newest(small, monkeypatch):
    monkeypatch.setattr(_cache, "MAX_ENTRIES", 2)
    tx = optax.sgd(0.1)
    state, step = small.init_train_state(KEY, X, tx), small.train_step(ref.mse, tx)
    sizes = range(2, 7)
    programs = [
        weakref.ref(program_of(step, state, X[:size], TARGETS[:size])) for size in sizes
    ]
    gc.collect()
    assert [program() is not None for program in programs] == [False] * 3 + [True] * 2
    state, metrics = step(state, X[:2], TARGETS[:2])
    assert jnp.isfinite(metrics["loss"])


def test_leaves_of_a_state_that_are_one_array_are_donated_as_two():
    """The first moment of novograd starts as the first update; so do copies."""
    copies = optax.GradientTransformation(
        lambda params: (params, params),
        lambda grads, state, params=None: (grads, (grads, state[1])),
    )
    tx = optax.chain(copies, optax.novograd(1e-2))
    model = [ref.dense(8), ref.dense(4)]
    pipe = jpipe.pipeline(model, 2)
    state = pipe.init_train_state(KEY, X, tx)
    params = ref.params_of(state.variables)
    expected = ref.optax_steps(model, params, X, TARGETS, tx, 3)
    step = pipe.train_step(ref.mse, tx)
    for _ in range(3):
        state, _ = step(state, X, TARGETS)
    ref.assert_close((state.params, state.opt_state), expected[:2], 1e-4)


def test_an_update_writes_each_new_leaf_over_its_old_one_and_copies_none():
    """XLA copies an old value away where another new one takes its memory."""
    tx = optax.adamw(1e-2)
    pipe = jpipe.pipeline([ref.dense(64), ref.dense(64), ref.dense(4)], 2)
    state = pipe.init_train_state(KEY, X, tx)
    largest_bytes = max(leaf.nbytes for leaf in jax.tree.leaves(state.params))
    report = pipe.train_step(ref.mse, tx).compile(state, X, TARGETS)
    updates = [x for x in report.programs if "optimizer_update" in x.name]
    assert updates
    assert all(x.workspace_bytes < largest_bytes for x in updates)
