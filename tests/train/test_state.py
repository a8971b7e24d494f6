"""The state of training: begun with given variables, saved, restored, overwritten."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import serialization

import jpipe

from .. import reference as ref

TX = optax.adamw(0.1)


def model(balance=None):
    """With tied parameters, statistics, and something to draw."""
    again = ref.dense(5)
    drop = nn.Dropout(0.2, deterministic=False)
    layers = [again, nn.BatchNorm(), again, drop, ref.dense(4)]
    return jpipe.pipeline(layers, 2, balance=balance)


def steps(pipe, state, number=2):
    step = pipe.train_step(ref.mse, TX)
    for _ in range(number):
        state, metrics = step(state, *ref.regression(8))
    return jax.device_get((state.variables, metrics))


def copied(state):
    return jax.tree.map(jnp.copy, state)


class TestGivenVariables:
    @pytest.mark.parametrize("come_from", ["here", "the host", "another balance"])
    def test_training_starts_from_them(self, come_from):
        x, _ = ref.regression(8)
        pipe = model()
        trained = pipe.init_train_state(jax.random.key(3), x, TX)
        given = trained.variables
        if come_from == "the host":
            given = jax.device_get(given)
        if come_from == "another balance":
            given = model([5]).place(given)
        state = pipe.init_train_state(jax.random.key(3), x, TX, variables=given)
        ref.assert_equal(jax.device_get(state.params), jax.device_get(trained.params))
        ref.assert_equal(steps(pipe, state), steps(pipe, trained))

    def test_they_are_copied(self):
        x, _ = ref.regression(8)
        pipe = model()
        given = pipe.init(jax.random.key(3), x)
        before = jax.device_get(given)
        state = pipe.init_train_state(jax.random.key(4), x, TX, variables=given)
        steps(pipe, state)
        ref.assert_equal(jax.device_get(given), before)

    def test_what_an_optimizer_copies_it_copies_from_them(self):
        x, _ = ref.regression(8)
        pipe = jpipe.pipeline([ref.dense(5), ref.dense(4)], 2)
        given = pipe.init(jax.random.key(3), x)
        tx = optax.contrib.schedule_free(optax.sgd(0.1), 0.1)
        state = pipe.init_train_state(jax.random.key(4), x, tx, variables=given)
        ref.assert_equal(jax.device_get(state.opt_state.z), ref.params_of(given))

    def test_a_number_of_python_makes_no_second_program(self):
        class Scale(nn.Module):
            @nn.compact
            def __call__(self, x):
                return x * self.param("scale", lambda key: jnp.float32(1))

        x, targets = ref.regression(8)
        pipe = jpipe.pipeline([Scale(), ref.dense(4)], 2)
        given = list(pipe.init(jax.random.key(3), x))
        given[0] = {"params": {"scale": jnp.asarray(2.0)}}
        assert given[0]["params"]["scale"].weak_type
        state = pipe.init_train_state(jax.random.key(4), x, TX, variables=given)
        step = pipe.train_step(ref.mse, TX)
        for _ in range(2):
            state, _ = step(state, x, targets)
        assert len(step._compiled) == 1

    def test_memory_of_numpy_may_be_filled_anew(self):
        """JAX shares it with NumPy if it begins at a multiple of 64 bytes."""
        raw = np.empty(4 * 20 + 64, np.uint8)
        start = -raw.ctypes.data % 64
        kernel = raw[start : start + 80].view(np.float32).reshape(5, 4)
        kernel[:] = 1
        given = [{"params": {"kernel": kernel, "bias": np.zeros(4, np.float32)}}]
        pipe, x = jpipe.pipeline([ref.dense(4)], 2), ref.regression(8)[0]
        state = pipe.init_train_state(jax.random.key(4), x, TX, variables=given)
        jax.block_until_ready(state.params)
        kernel[:] = 9
        assert state.params[0]["kernel"].max() == 1

    def test_a_key_of_another_kind_is_another_program(self):
        x, targets = ref.regression(8)
        pipe = jpipe.pipeline([ref.dense(4)], 2)
        state = pipe.init_train_state(jax.random.key(4), x, TX)
        step = pipe.train_step(ref.mse, TX, donate=False)
        losses = [
            step(state.replace(rng=key), x, targets)[1]["loss"]
            for key in (state.rng, jax.random.PRNGKey(3), jax.random.key(3, impl="rbg"))
        ]
        assert len(set(map(float, losses))) == 1

    def test_integers_are_no_floats(self):
        x, _ = ref.regression(8)
        pipe = jpipe.pipeline([ref.dense(5)], 2)
        given = [{"params": {"kernel": np.eye(5, dtype=int), "bias": np.zeros(5)}}]
        with pytest.raises(ValueError, match=r"'kernel'\] is int64, the model"):
            pipe.init_train_state(jax.random.key(0), x, TX, variables=given)
        given[0]["params"]["kernel"] = np.eye(5, dtype=np.float16)
        state = pipe.init_train_state(jax.random.key(0), x, TX, variables=given)
        assert state.params[0]["kernel"].dtype == jnp.float16
        assert "30" in str(pipe)  # the parameters, as after `init`

    def test_of_another_model_they_are_refused(self):
        x, _ = ref.regression(8)
        with pytest.raises(ValueError, match="not those of this model") as refusal:
            model().init_train_state(
                jax.random.key(0), x, TX, variables=[{}, {}, {}, {}, {"params": {}}]
            )
        assert r"missing: variables[0]['params']['kernel'] (5, 5)" in str(refusal.value)


class TestSaved:
    @pytest.mark.parametrize("impl", ["threefry2x32", "rbg", None])
    def test_by_flax_and_restored_into_another_pipeline(self, impl):
        x, _ = ref.regression(8)
        key = jax.random.PRNGKey(3) if impl is None else jax.random.key(3, impl=impl)
        pipe, other = model(), model([2, 3])
        state = pipe.init_train_state(key, x, TX)
        saved = serialization.to_bytes(state)
        like = other.init_train_state(key, x, TX)
        restored = other.place(serialization.from_bytes(like, saved))
        assert restored.rng.dtype == state.rng.dtype
        assert jax.tree.structure(restored) == jax.tree.structure(state)
        mine, theirs = steps(pipe, state), steps(other, restored)
        ref.assert_close(theirs, mine, 1e-4)

    def test_keys_in_an_optimizer_are_saved_too(self):
        x, targets = ref.regression(8)
        tx = optax.add_noise(0.1, 0.5, jax.random.key(3))
        pipe = jpipe.pipeline([ref.dense(5), ref.dense(4)], 2)
        state = pipe.init_train_state(jax.random.key(0), x, tx)
        like = jax.tree.map(jnp.copy, state)
        saved = serialization.to_bytes(state)
        restored = pipe.place(serialization.from_bytes(like, saved))
        step = pipe.train_step(ref.mse, tx)
        ours, theirs = (step(s, x, targets)[0].params for s in (state, restored))
        ref.assert_equal(jax.device_get(theirs), jax.device_get(ours))

    def test_what_is_no_state_is_refused(self):
        x, _ = ref.regression(8)
        state = model().init_train_state(jax.random.key(0), x, TX)
        saved = serialization.to_state_dict(state)
        del saved["step"]
        with pytest.raises(ValueError, match="no TrainState was saved here"):
            serialization.from_state_dict(state, saved)

    def test_replace(self):
        x, _ = ref.regression(8)
        state = model().init_train_state(jax.random.key(0), x, TX)
        other = state.replace(step=jnp.int32(7))
        assert int(other.step) == 7
        assert other.params is state.params
        with pytest.raises(TypeError, match="stop"):
            state.replace(stop=1)


@pytest.mark.parametrize(
    "use",
    [
        lambda pipe, state, x: pipe.apply(state.variables, x),
        lambda pipe, state, x: pipe.place(state),
        lambda pipe, state, x: pipe.place(state.variables),
        lambda pipe, state, x: pipe.profile_step(state, (x, x), ref.mse),
        lambda pipe, state, x: pipe.value_and_grad(ref.mse)(state.variables, x, x),
        lambda pipe, state, x: pipe.init_train_state(
            state.rng, x, TX, variables=state.variables
        ),
    ],
)
def test_what_a_step_has_overwritten_is_said_to_be(use):
    x = jnp.ones((4, 5))
    pipe = jpipe.pipeline([ref.dense(5), ref.dense(5)], 2)
    state = pipe.init_train_state(jax.random.key(0), x, TX)
    kept = copied(state)
    pipe.train_step(ref.mse, TX)(state, x, x)
    with pytest.raises(ValueError, match="donated: it was given to an earlier step"):
        use(pipe, state, x)
    use(pipe, kept, x)


def test_numpy_leaves_can_be_put_in_place():
    x, _ = ref.regression(8)
    pipe = model()
    state = pipe.init_train_state(jax.random.key(0), x, TX)
    host = jax.tree.map(np.asarray, state.replace(rng=jax.random.PRNGKey(0)))
    placed = pipe.place(host)
    assert {leaf.device for leaf in jax.tree.leaves(placed.params[4])} == {
        pipe.devices[4]
    }


def test_place_can_be_traced():
    x, _ = ref.regression(8)
    pipe = jpipe.pipeline([ref.dense(5), ref.dense(4)], 2)
    state = pipe.init_train_state(jax.random.key(0), x, TX)
    shapes = jax.eval_shape(pipe.place, state)
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, state)


def test_a_state_that_a_step_returned_is_copied_and_pickled():
    pipe, (x, targets) = jpipe.pipeline([ref.dense(4)], 2), ref.regression(4)
    tx = optax.adam(1e-2)
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    step = pipe.train_step(ref.mse, tx, donate=False)
    state, _ = step(state, x, targets)
    plain = state.replace(rng=jax.random.key_data(state.rng))
    for other in (copy.deepcopy(plain), pickle.loads(pickle.dumps(plain))):
        ref.assert_equal(other, plain)
    ref.assert_equal(step(copy.copy(state), x, targets), step(state, x, targets))


@pytest.mark.parametrize("number", [7, np.int64(7), jnp.asarray(7), np.int32(7)])
def test_the_number_of_a_step_may_be_set(number):
    pipe, (x, targets) = jpipe.pipeline([ref.dense(4)], 2), ref.regression(4)
    tx = optax.adam(1e-2)
    step = pipe.train_step(ref.mse, tx)
    for double in (False, True):
        with jax.enable_x64(double):
            state = pipe.init_train_state(jax.random.key(0), x, tx)
            state, _ = step(state.replace(step=number), x, targets)
            assert int(state.step) == 8
            state, _ = step(state, x, targets)
            assert int(state.step) == 9


def test_what_is_placed_does_not_share_the_memory_of_numpy():
    pipe, (x, _) = jpipe.pipeline([ref.dense(4)], 2), ref.regression(4)
    variables = pipe.init(jax.random.key(0), x)
    given = jax.tree.map(lambda leaf: np.array(leaf), variables)
    placed = pipe.place(given)
    for leaf in jax.tree.leaves(given):
        leaf[:] = 0
    ref.assert_equal(placed, variables)
