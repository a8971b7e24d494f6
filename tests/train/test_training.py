"""Training steps, against plain optax on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import jpipe

from .. import reference as ref


def train(pipe, tx, x, targets, count, **options):
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    step = pipe.train_step(ref.mse, tx, **options)
    losses = []
    for _ in range(count):
        state, metrics = step(state, x, targets)
        losses.append(float(metrics["loss"]))
    return state, losses


# The others: with all transformations of optax, in `test_optimizers`.
OPTIMIZERS = {
    "adamw with a schedule": optax.adamw(optax.cosine_decay_schedule(1e-2, 10)),
    # Looks at all gradients at once, wherever they are.
    "clipped adam": optax.chain(optax.clip_by_global_norm(0.05), optax.adam(1e-2)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_equal_optax_on_the_whole_batch(double, name):
    tx = OPTIMIZERS[name]
    layers = ref.mlp(jnp.float64)
    x, targets = ref.regression(10, jnp.float64)
    pipe = jpipe.pipeline(layers, 4, balance=[2, 1, 3])
    params = ref.params_of(pipe.init(jax.random.key(0), x))
    expected = ref.optax_steps(layers, params, x, targets, tx, 4)
    state, losses = train(pipe, tx, x, targets, 4)
    assert int(state.step) == 4
    # Adam divides by the root of a second moment: an error in a tiny gradient grows.
    ref.assert_close((state.params, state.opt_state), expected[:2], 1e-9)
    np.testing.assert_allclose(losses, expected[2], rtol=1e-11)


def test_steps_equal_multi_steps_over_the_micro_batches(double):
    layers = ref.mlp(jnp.float64)
    x, targets = ref.regression(8, jnp.float64)
    pipe = jpipe.pipeline(layers, 4, balance=[3, 3])
    tx = optax.sgd(0.1, momentum=0.9)
    state, _ = train(pipe, tx, x, targets, 3)
    params = ref.params_of(pipe.init(jax.random.key(0), x))
    # Its accumulator is of single precision unless told otherwise.
    multi = optax.MultiSteps(tx, 4, accumulator_dtype=jnp.float64)
    multi_state = multi.init(params)
    step, update = ref.gradient(layers), jax.jit(multi.update)
    for _ in range(3):
        for x_part, t_part in zip(jnp.split(x, 4), jnp.split(targets, 4), strict=True):
            _, grads = step(params, x_part, t_part)
            updates, multi_state = update(grads, multi_state, params)
            params = optax.apply_updates(params, updates)
    ref.assert_close(state.params, params, ref.FLOAT64)


def test_schedules_train_to_the_same_bits():
    x, targets = ref.regression(8)
    tx = optax.adamw(1e-2)
    states = [
        train(
            jpipe.pipeline(ref.mlp(), 4, balance=[2, 2, 2], schedule=schedule),
            tx,
            x,
            targets,
            3,
        )[0]
        for schedule in ("gpipe", "1f1b")
    ]
    ref.assert_equal(states[0], states[1])


def test_state_continues_in_a_pipeline_of_another_balance(double):
    """State is keyed by layer: four stages go on as two, or as one."""
    layers = ref.mlp(jnp.float64)
    x, targets = ref.regression(8, jnp.float64)
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
    expected, _ = train(jpipe.sequential(layers), tx, x, targets, 4)
    state, _ = train(jpipe.pipeline(layers, 2, balance=[1, 2, 1, 2]), tx, x, targets, 2)
    for balance in ([4, 2], [6]):
        pipe = jpipe.pipeline(
            layers, 4, balance=balance, devices=jax.devices()[4 : 4 + len(balance)]
        )
        state = pipe.place(jax.device_get(state))
        state, _ = pipe.train_step(ref.mse, tx)(state, x, targets)
    ref.assert_close(state.params, expected.params, 1e-9)
    ref.assert_close(state.opt_state, expected.opt_state, 1e-9)
    assert int(state.step) == 4


def test_a_new_state_is_that_of_init_and_of_optax():
    x, _ = ref.regression(8)
    pipe = jpipe.pipeline(ref.mlp(), 4, balance=[2, 4])
    tx = optax.adam(1e-2)
    state = pipe.init_train_state(jax.random.key(5), x, tx)
    params = ref.params_of(pipe.init(jax.random.key(5), x))
    ref.assert_equal(state.params, params)
    ref.assert_equal(state.opt_state, tx.init(params))
    momentum = state.opt_state[0].mu
    for layer in range(6):
        device = {pipe.devices[0 if layer < 2 else 1]}
        for leaf in jax.tree.leaves((state.params[layer], momentum[layer])):
            assert leaf.devices() == device


def test_without_donation_a_state_can_be_used_again():
    x, targets = ref.regression(8)
    pipe = jpipe.pipeline(ref.mlp(), 4, balance=[2, 4])
    tx = optax.adam(1e-2)
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    kept = pipe.train_step(ref.mse, tx, donate=False)
    first, _ = kept(state, x, targets)
    ref.assert_equal(kept(state, x, targets)[0], first)
    donated, _ = pipe.train_step(ref.mse, tx)(state, x, targets)
    ref.assert_equal(donated, first)
    with pytest.raises(ValueError, match="go on with the state that it returned"):
        kept(state, x, targets)


def test_metrics_of_a_step():
    x, targets = ref.regression(8)
    pipe = jpipe.pipeline(ref.mlp(), 4, balance=[2, 4])
    tx = optax.sgd(0.1)

    def loss_fn(y, t):
        return jnp.sum((y - t) ** 2), jnp.float32(y.size)

    state = pipe.init_train_state(jax.random.key(0), x, tx)
    _, metrics = pipe.train_step(loss_fn, tx, reduction="weighted", donate=False)(
        state, x, targets
    )
    assert metrics.keys() == {"loss"}
    weighted = metrics["loss"]
    _, metrics = pipe.train_step(
        lambda y, t: (ref.mse(y, t), y.mean()), tx, has_aux=True
    )(state, x, targets)
    np.testing.assert_allclose(metrics["loss"], weighted, rtol=1e-5)
    assert metrics["aux"].shape == (4,)


class TestRandomness:
    """Dropout depends on step, micro-batch and layer; on nothing else."""

    layers = staticmethod(
        lambda: [ref.dense(16), nn.Dropout(0.5), ref.dense(4), nn.Dropout(0.3)]
    )

    def grads(self, rngs, pipe):
        x, targets = ref.regression(8)
        variables = pipe.init(jax.random.key(0), x)
        return pipe.value_and_grad(ref.mse)(variables, x, targets, rngs=rngs)

    def test_masks_do_not_depend_on_placement_schedule_or_remat(self):
        rngs = {"dropout": jax.random.key(9)}
        expected = self.grads(rngs, jpipe.sequential(self.layers(), 4))
        for options in (
            {"balance": [1, 1, 1, 1]},
            {"balance": [2, 2], "schedule": "gpipe", "remat": "none"},
            {"balance": [1, 3], "remat": "except_last", "devices": jax.devices()[4:6]},
        ):
            pipe = jpipe.pipeline(self.layers(), 4, **options)
            ref.assert_close(self.grads(rngs, pipe), expected, ref.FLOAT32)

    def test_masks_differ_between_micro_batches_layers_and_steps(self):
        pipe = jpipe.pipeline([nn.Dropout(0.5), nn.Dropout(0.5)], 2)
        ones = jnp.ones((8, 64))
        variables = pipe.init(jax.random.key(0), ones)
        y = pipe.apply(variables, ones, rngs=jax.random.key(1), train=True)
        first, second = np.split(np.asarray(y), 2)
        assert not np.array_equal(first, second)
        # Two equal masks would keep half, two independent ones a quarter.
        assert 0.15 < np.mean(np.asarray(y) != 0) < 0.35
        again = pipe.apply(variables, ones, rngs=jax.random.key(1), train=True)
        np.testing.assert_array_equal(again, y)
        other = pipe.apply(variables, ones, rngs=jax.random.key(2), train=True)
        assert not np.array_equal(other, y)

    def test_evaluation_drops_nothing(self):
        pipe = jpipe.pipeline([nn.Dropout(0.5), jnp.sin], 2)
        x = jnp.ones((4, 3))
        variables = pipe.init(jax.random.key(0), x)
        np.testing.assert_array_equal(pipe.apply(variables, x), jnp.sin(x))

    def test_training_draws_anew_in_each_step(self):
        tx = optax.sgd(0.0)
        x, targets = ref.regression(8)
        pipe = jpipe.pipeline(self.layers(), 2)
        _, losses = train(pipe, tx, x, targets, 3)
        assert len(set(losses)) == 3
        _, again = train(jpipe.sequential(self.layers(), 2), tx, x, targets, 3)
        np.testing.assert_allclose(again, losses, rtol=1e-5)


def test_collections_are_committed_once_per_mini_batch(double):
    """Running means become those that the whole batch gives."""
    layers = [
        ref.dense(6, jnp.float64),
        nn.BatchNorm(momentum=0.9, param_dtype=jnp.float64, dtype=jnp.float64),
        ref.dense(4, jnp.float64),
    ]
    x, targets = ref.regression(10, jnp.float64)
    tx = optax.sgd(0.0)
    pipe = jpipe.pipeline(layers, 4)
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    step = pipe.train_step(ref.mse, tx)
    hidden = layers[0].apply({"params": ref.params_of(state.variables)[0]}, x)
    state, _ = step(state, x, targets)
    mean = np.asarray(state.model_state[1]["batch_stats"]["mean"])
    # Flax makes running statistics in single precision, and so they stay.
    assert mean.dtype == np.float32
    np.testing.assert_allclose(mean, 0.1 * np.mean(hidden, axis=0), rtol=1e-6)
    twin = jpipe.sequential(layers, 4)
    twin_state = twin.init_train_state(jax.random.key(0), x, tx)
    twin_state, _ = twin.train_step(ref.mse, tx)(twin_state, x, targets)
    ref.assert_close(state.model_state, twin_state.model_state, ref.FLOAT32)
    # Without a train step nothing is committed, and evaluation reads what was.
    evaluated = pipe.apply(state.variables, x)
    again = pipe.apply(state.variables, x)
    np.testing.assert_array_equal(evaluated, again)
