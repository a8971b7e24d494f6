"""A measured timeline of a step, which it leaves as it was."""

import dataclasses
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import jpipe
from jpipe import schedules
from jpipe.schedules import Schedule

from .. import reference as ref

# They need a few of the devices that there are.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.* runs \\d+ stages per rank:UserWarning"
)

TX = optax.sgd(0.1)
X = jnp.ones((10, 6))
RUNS = [("1f1b", "none"), ("zb_v", "full")]
SCALES = np.arange(6, dtype=np.float32)  # a constant of all stages


def profiled(name, remat):
    """A step of stages with residuals, its state, and what is measured."""
    stages = schedules.BY_NAME[name](2, 4).num_stages
    pairs = [(lambda x: nn.relu(x) * SCALES, ref.dense(6)) for _ in range(stages)]
    layers = [layer for pair in pairs for layer in pair]
    pipe = jpipe.pipeline(layers, 4, balance=[2] * stages, schedule=name, remat=remat)
    state = pipe.init_train_state(jax.random.key(0), X, TX)
    step = pipe.train_step(ref.mse, TX)
    return step, state, step.profile(state, X, X)


@pytest.mark.parametrize(("name", "remat"), RUNS)
def test_a_profile_is_a_timeline_of_the_schedule_and_predicts_its_bytes(name, remat):
    step, state, measured = profiled(name, remat)
    schedule = step.plan.schedule
    assert measured.rows == schedule.rows
    assert set(measured.start) == {a for row in measured.rows for a in row}
    needs = measured.needs
    for row in measured.rows:
        for before, after in pairwise(row):
            assert measured.end[before] <= measured.start[after]
        for action in row:
            assert measured.start[action] <= measured.end[action]
            if measured.start[action] < measured.end[action]:
                for need in needs(action):
                    assert measured.end[need] <= measured.start[action]
    assert measured.makespan > 0
    # Until something runs, nothing counts: not what splits the mini-batch either.
    ran = [a for a in measured.start if measured.start[a] < measured.end[a]]
    assert min(measured.start[action] for action in ran) == 0.0
    # Each rank ends with its weights and sums, on the last one the loss.
    last = {event.rank: event.bytes for event in measured.memory}
    for rank, size in last.items():
        own = [s for s, at in enumerate(measured.placement) if at == rank]
        layers = [state.params[2 * s + i] for s in own for i in range(2)]
        params = sum(x.nbytes for x in jax.tree.leaves(layers))
        assert 2 * params <= size <= 2 * params + 64
    # The peaks that are predicted, whatever times are.
    costs = measured.costs
    stages = len(measured.placement)
    assert np.shape(costs.forward) == (stages,)
    slow = [1.0 + 7 * (s % 2) for s in range(stages)]
    uneven = dataclasses.replace(costs, forward=slow, backward=[*reversed(slow)])
    peaks = tuple(n for _, n in step.plan.peak_bytes)
    assert measured.peak_bytes == peaks
    for some in costs, uneven, dataclasses.replace(costs, latency=0.7):
        assert schedule.simulate(some).peak_bytes == peaks


def mean_of_weights(y, targets):
    weights = jnp.asarray(targets > 0.5, y.dtype)
    return jnp.sum(weights * (y - targets) ** 2), jnp.sum(weights)


def test_the_sum_of_weights_is_among_the_predicted_bytes():
    pipe = jpipe.pipeline([ref.dense(6), ref.dense(6)], 4, schedule="1f1b")
    state = pipe.init_train_state(jax.random.key(0), X, TX)
    step = pipe.train_step(mean_of_weights, TX, reduction="weighted")
    measured = step.profile(state, X, X)
    predicted = pipe.schedule.simulate(measured.costs).peak_bytes
    assert predicted == measured.peak_bytes
    assert measured.costs.shared_bytes == [0, 4]


def test_a_profile_changes_nothing():
    pipe = jpipe.pipeline([ref.dense(6) for _ in range(4)], 4, schedule="zb_v")
    state = pipe.init_train_state(jax.random.key(0), X, TX)
    before = ref.on_host(state.params)
    step = pipe.train_step(ref.mse, TX)
    step.profile(state, X, X)
    ref.assert_equal(state.params, before)
    # A `with` block says nothing to the threads that time programs.
    with jax.default_matmul_precision("bfloat16"), jax.enable_x64(True):
        assert step.profile(state, X, X).makespan > 0
    step(state, X, X)


def test_gradients_are_profiled_as_a_step_is():
    """Those of a pipeline, and those of a loss function."""
    layers = [ref.dense(6), nn.tanh, ref.dense(6)]
    pipe = jpipe.pipeline(layers, 4, balance=[2, 1])
    variables = pipe.init(jax.random.key(0), X)
    measured = pipe.value_and_grad(ref.mse).profile(variables, X, X)
    assert measured.rows == pipe.schedule.rows
    assert measured.peak_bytes == pipe.schedule.simulate(measured.costs).peak_bytes

    def loss_fn(variables, x, targets):
        h = jnp.tanh(layers[0].apply(variables[0], x))
        return ref.mse(layers[2].apply(variables[2], jpipe.boundary(h)), targets)

    grad_fn = jpipe.value_and_grad(loss_fn, 4)
    placed = grad_fn.place(jax.device_get(variables), X, X)
    before = ref.on_host(placed)
    measured = grad_fn.profile(placed, X, targets=X)
    assert measured.rows == grad_fn.plan.schedule.rows
    peaks = grad_fn.plan.schedule.simulate(measured.costs).peak_bytes
    assert measured.peak_bytes == peaks
    ref.assert_equal(placed, before)


def test_a_profile_does_not_wait_for_what_it_does_not_read():
    def first(x):
        jpipe.stash("x", x)
        return jnp.argmax(x, -1)

    def last(x):
        return x + jpipe.pop("x")[:, :4]

    order = Schedule.from_text(
        """
        0F0 0F1 0B0 0F2 0B1 0B2
        1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2
        2F0 2B0 2F1 2B1 2F2 2B2
        """
    )
    layers = [ref.dense(6), first, nn.Embed(6, 4), last, ref.dense(4)]
    pipe = jpipe.pipeline(layers, 3, balance=[2, 1, 2], schedule=order)
    x, targets = ref.regression(6)
    state = pipe.init_train_state(jax.random.key(0), x, TX)
    assert pipe.train_step(ref.mse, TX).profile(state, x, targets).makespan > 0


def test_a_profile_holds_no_more_than_a_step():
    def live_bytes():
        return sum(x.nbytes for x in jax.live_arrays() if not x.is_deleted())

    held = []

    def observed(x):
        jax.debug.callback(lambda: held.append(live_bytes()))
        return x

    layers = [ref.dense(64), nn.tanh, ref.dense(64), nn.tanh, observed, ref.dense(4)]
    pipe = jpipe.pipeline(layers, 16, balance=[5, 1], remat="none")
    x, targets = jnp.ones((256, 64)), jnp.ones((256, 4))
    state = pipe.init_train_state(jax.random.key(0), x, TX)
    before = live_bytes()
    measured = pipe.train_step(ref.mse, TX).profile(state, x, targets)
    assert len(held) == 2 * 16  # it runs once before it measures
    assert max(held) - before <= sum(measured.peak_bytes)


class Long(nn.Module):
    """A model with a long skip connection."""

    @nn.compact
    def __call__(self, x):
        first = h = nn.tanh(nn.Dense(6)(x))
        for _ in range(4):
            h = nn.tanh(nn.Dense(6)(h))
        return nn.Dense(6)(h + first)


def test_a_model_as_it_is_is_profiled_too():
    pipe = jpipe.pipeline(Long(), 4, num_stages=3, schedule="gpipe")
    state = pipe.init_train_state(jax.random.key(0), X, TX)
    measured = pipe.train_step(ref.mse, TX).profile(state, X, X)
    assert measured.rows == pipe.schedule.rows
    assert {a for row in measured.rows for a in row} == set(measured.start)
    (skip,) = measured.costs.skips
    assert (skip.source, skip.target) == (0, 2)
    # But for the loss itself, which is not kept.
    predicted = pipe.schedule.simulate(measured.costs).peak_bytes
    assert predicted == pytest.approx(measured.peak_bytes, abs=8)


def test_a_model_holds_what_its_list_of_layers_holds():
    pairs = [[nn.Dense(6), nn.tanh] for _ in range(3)]
    layers = [layer for pair in pairs for layer in pair]
    ends = [[*pair, jpipe.boundary] for pair in pairs[:2]]
    model = nn.Sequential([*ends[0], *ends[1], *pairs[2]])
    peaks = []
    for pipe in (
        jpipe.pipeline(layers, 4, balance=[2, 2, 2]),
        jpipe.pipeline(model, 4),
    ):
        state = pipe.init_train_state(jax.random.key(0), X, TX)
        step = pipe.train_step(ref.mse, TX)
        peaks.append(step.profile(state, X, X).peak_bytes)
    assert peaks[0] == peaks[1]
