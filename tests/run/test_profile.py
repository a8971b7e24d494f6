"""A measured timeline of a step, which it leaves as it was."""

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
from ..schedules.orders import TRAINING


class TestProfile:
    def state_and_pipe(self, name="zb_v"):
        pipe = jpipe.pipeline([ref.dense(6) for _ in range(4)], 4, schedule=name)
        x = jnp.ones((8, 6))
        tx = optax.sgd(0.1)
        return pipe, pipe.init_train_state(jax.random.key(0), x, tx), x, tx

    @pytest.mark.parametrize("name", TRAINING)
    def test_is_a_timeline_of_the_same_schedule(self, name):
        stages = schedules.BY_NAME[name](2, 4).num_stages
        layers = [ref.Residual(6) for _ in range(stages)]
        pipe = jpipe.pipeline(layers, 4, schedule=name)
        x = jnp.ones((8, 6))
        state = pipe.init_train_state(jax.random.key(0), x, optax.sgd(0.1))
        measured = pipe.profile_step(state, (x, x), ref.mse)
        assert measured.rows == pipe.schedule.rows
        assert set(measured.start) == {a for row in measured.rows for a in row}
        needs = measured.needs()
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
        predicted = pipe.schedule.simulate(measured.costs)
        assert predicted.makespan > 0
        assert predicted.peak_bytes == measured.peak_bytes
        assert measured.peak_bytes == tuple(n for _, n in pipe.plan.peak_bytes)
        # Each rank ends with its weights and sums, on the last one the loss.
        last = {event.rank: event.bytes for event in measured.memory}
        for rank, size in last.items():
            own = [s for s in range(stages) if measured.placement[s] == rank]
            params = sum(
                x.nbytes for s in own for x in jax.tree.leaves(state.params[s])
            )
            assert size >= 2 * params
            assert size <= 2 * params + 64

    def test_changes_nothing_and_finds_the_loss_of_the_step(self):
        pipe, state, x, tx = self.state_and_pipe()
        before = ref.on_host(state.params)
        with pytest.raises(ValueError, match=r"no step was built yet .* give loss_fn="):
            pipe.profile_step(state, (x, x))
        step = pipe.train_step(ref.mse, tx)
        pipe.profile_step(state, (x, x))
        ref.assert_equal(state.params, before)
        state, _ = step(state, x, x)

    def test_refuses_what_is_no_pair(self):
        pipe, state, x, _ = self.state_and_pipe()
        with pytest.raises(TypeError, match=r"needs the pair \(x, targets\)"):
            pipe.profile_step(state, x, ref.mse)

    def test_an_error_in_one_rank_ends_the_others(self):
        pipe, state, x, _ = self.state_and_pipe("gpipe")
        pipe.profile_step(state, (x, x), ref.mse)
        program = pipe._cache.training.program

        def broken(*args):
            raise RuntimeError("broken on purpose")

        number = next(
            n
            for n, i in enumerate(program.instructions)
            if str(i.label) == "1B2" and i.source is None
        )
        program.steps[number] = program.steps[number]._replace(run=broken)
        with pytest.raises(RuntimeError, match="broken on purpose"):
            pipe.profile_step(state, (x, x), ref.mse)


def test_costs_are_numbers_that_numpy_and_json_understand():
    pipe = jpipe.pipeline([ref.dense(6), ref.dense(6)], 2)
    x = jnp.ones((4, 6))
    state = pipe.init_train_state(jax.random.key(0), x, optax.sgd(0.1))
    costs = pipe.profile_step(state, (x, x), ref.mse).costs
    assert costs is not None
    assert np.shape(costs.residual_bytes) == (2, 2)
    assert np.shape(costs.forward) == (2,)


SETTINGS = {
    "precision": lambda: jax.default_matmul_precision("bfloat16"),
    "x64": lambda: jax.enable_x64(True),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_profile_runs_the_programs_of_the_step_around_it(name, monkeypatch):
    """A `with` block says nothing to the threads that time them."""
    pipe = jpipe.pipeline([ref.dense(4), ref.dense(4)], 2)
    x, targets = ref.regression(4)
    with SETTINGS[name]():
        state = pipe.init_train_state(jax.random.key(0), x, optax.sgd(0.1))
        pipe.profile_step(state, (x, targets), ref.mse)
    program = pipe._cache.training.program
    calls = zip(program.instructions, program.steps, strict=True)
    run = [step.run for instruction, step in calls if instruction.source is None]
    assert all(isinstance(program, jax.stages.Compiled) for program in run)


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
    state = pipe.init_train_state(jax.random.key(0), x, optax.sgd(0.1))
    assert pipe.profile_step(state, (x, targets), ref.mse).makespan > 0
