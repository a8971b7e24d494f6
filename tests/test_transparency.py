"""A pipeline gives the numbers of one device: every leaf, against plain Flax."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn

import jpipe
from jpipe.schedules import Costs, Schedule, ScheduleBuilder, gpipe

from . import reference as ref
from .house.pages import read_blocks
from .programs import ROOT
from .schedules.orders import TORCH_LOOPED_BFS


class TestSameBits:
    """Where the same executables run, the bits are the same."""

    # 1F1B with one more forward of warm-up on the first rank.
    own_order = Schedule.from_text(
        "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3\n"
        "1F0 1F1 1F2 1B0 1B1 1F3 1B2 1B3\n"
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"
    )

    @staticmethod
    @functools.cache
    def grads(schedule="1f1b", remat="min_cut", numbers=(0, 1, 2)):
        x, targets = ref.regression(8)
        devices = [jax.devices()[number] for number in numbers]
        options = {"schedule": schedule, "remat": remat, "devices": devices}
        pipe = jpipe.pipeline(ref.mlp(), 4, balance=[2, 2, 2], **options)
        variables = pipe.init(jax.random.key(0), x)
        return pipe.value_and_grad(ref.mse)(variables, x, targets)

    def test_full_remat_gives_the_same_bits_under_every_schedule(self):
        expected = self.grads(schedule="gpipe", remat="full")
        ref.assert_equal(self.grads(schedule="1f1b", remat="full"), expected)
        ref.assert_equal(self.grads(schedule=self.own_order, remat="full"), expected)

    def test_backwards_that_descend_give_the_same_bits_in_every_such_schedule(self):
        # The first rank runs its backwards as late as it can.
        own_order = Schedule.from_text(
            "0F0 0F1 0F2 0F3 0B3 0B2 0B1 0B0\n"
            "1F0 1F1 1F2 1F3 1B3 1B2 1B1 1B0\n"
            "2F0 2F1 2F2 2F3 2I3 2W3 2I2 2W2 2I1 2W1 2B0"
        )
        descending = functools.partial(gpipe, descending=True)
        expected = self.grads(schedule=descending, remat="full")
        ascending = self.grads(schedule="gpipe", remat="full")
        ref.assert_close(ascending, expected, ref.FLOAT32)
        found = self.grads(schedule=own_order, remat="full")
        ref.assert_equal(found[1][:4], expected[1][:4])  # of stages without halves
        ref.assert_close(found, expected, ref.FLOAT32)
        last = self.grads(schedule=descending, remat="except_last")
        ref.assert_close(last, expected, ref.FLOAT32)

    def test_a_csv_file_of_torch_gives_the_numbers_of_one_device(self):
        layers, (x, targets) = ref.mlp(), ref.regression(9)
        schedule = Schedule.from_text(TORCH_LOOPED_BFS)
        devices = jax.devices()[:2]
        pipe = jpipe.pipeline(
            layers, 3, balance=[2, 2, 1, 1], schedule=schedule, devices=devices
        )
        variables = pipe.init(jax.random.key(0), x)
        found = pipe.value_and_grad(ref.mse)(variables, x, targets)
        params = ref.params_of(variables)
        expected = ref.value_and_grad(layers, params, x, targets)
        ref.assert_close(found, expected, ref.FLOAT32)

    def test_kept_residuals_give_the_same_bits_where_the_same_programs_run(self):
        # The last stage of 1F1B and of the user's order runs F and B fused.
        fused = self.grads(schedule="1f1b", remat="none")
        ref.assert_equal(self.grads(schedule=self.own_order, remat="none"), fused)
        # GPipe's runs them apart: another program on that stage, a few ulps.
        apart = self.grads(schedule="gpipe", remat="none")
        ref.assert_close(apart, fused, ref.FLOAT32)

    def test_devices_do_not_change_a_bit(self):
        for numbers in ((5, 2, 7), (0, 0, 0), (1, 0, 1)):
            ref.assert_equal(self.grads(numbers=numbers), self.grads())


class TestBuildersOfThePage:
    """Chimera and Hanayo, as the page on schedules shows them."""

    page = (ROOT / "docs" / "schedules.md").read_text()

    @staticmethod
    @functools.cache
    def builder(name: str) -> ScheduleBuilder:
        names: dict[str, Any] = {}
        exec(read_blocks("docs/schedules.md", containing="def chimera"), names)
        return names[name]

    @pytest.mark.usefixtures("double")
    @pytest.mark.parametrize(
        ("name", "options", "num_ranks", "balance", "num_microbatches"),
        [
            ("chimera", {}, 4, [2, 2, 2, 2], 6),
            ("hanayo", {"num_waves": 1}, 4, None, 5),
            ("hanayo", {"num_waves": 2}, 2, None, 4),
        ],
    )
    def test_they_give_the_gradients_of_one_device(
        self, name, options, num_ranks, balance, num_microbatches
    ):
        layers = [ref.dense(6, jnp.float64) for _ in range(8)]
        builder = functools.partial(self.builder(name), **options)
        pipe = jpipe.pipeline(
            layers,
            num_microbatches,
            balance=balance,
            schedule=builder,
            devices=jax.devices()[:num_ranks],
        )
        assert pipe.schedule == builder(num_ranks, num_microbatches)
        x = jax.random.normal(jax.random.key(1), (12, 6), jnp.float64)
        ref.compare(pipe, layers, x, jnp.sin(x), ref.FLOAT64)

    def test_no_rank_waits_in_the_middle_of_a_step(self):
        """Every further micro-batch takes a rank a forward and a backward."""
        for name, num_ranks in (("chimera", 4), ("hanayo", 3)):
            spans = []
            for num_microbatches in (4 * num_ranks, 5 * num_ranks):
                schedule = self.builder(name)(num_ranks, num_microbatches)
                costs = Costs(1, 1).per_chunk(schedule.num_stages // num_ranks)
                spans.append(schedule.simulate(costs).makespan)
            assert spans[1] - spans[0] == 2 * num_ranks

    def test_chimera_has_two_replicas_of_each_stage(self):
        schedule = self.builder("chimera")(4, 4)
        assert schedule.replicas == ((0, 3), (1, 2), (1, 2), (0, 3))
        assert f"```text\n{schedule}\n```" in self.page


def test_a_step_draws_with_a_key_that_no_layer_and_no_other_step_has():
    layers = [ref.dense(4), nn.Dropout(0.5, deterministic=False)]
    pipe, tx = jpipe.pipeline(layers, 2, balance=[1, 1]), optax.sgd(0.0)
    x, targets = ref.regression(8)
    state = pipe.init_train_state(jax.random.key(3), x, tx)
    of_layers = [jax.random.fold_in(jax.random.key(3), layer) for layer in (0, 1)]
    assert not any(key == state.rng for key in of_layers)
    step = pipe.train_step(ref.mse, tx)
    state, first = step(state, x, targets)
    _, second = step(state, x, targets)
    assert first["loss"] != second["loss"]  # of the same parameters


def test_an_optimizer_that_begins_with_copies_of_the_parameters():
    pipe = jpipe.pipeline(ref.mlp(), 2, balance=[2, 2, 2])
    x, targets = ref.regression(8)
    tx = optax.contrib.schedule_free_sgd(0.1)
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    params = ref.params_of(state.variables)
    step = pipe.train_step(ref.mse, tx)
    for _ in range(2):  # which overwrite what they are given
        state, _ = step(state, x, targets)
    *expected, _ = ref.optax_steps(ref.mlp(), params, x, targets, tx, 2)
    ref.assert_close([state.params, state.opt_state], expected, ref.FLOAT32)


def test_a_hyperparameter_with_the_name_of_a_parameter_is_on_the_first_device():
    class Scaled(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x * self.param("learning_rate", nn.initializers.ones, ())

    pipe = jpipe.pipeline([ref.dense(4), Scaled()], 2, balance=[1, 1])
    tx = optax.inject_hyperparams(optax.adam)(0.1)
    state = pipe.init_train_state(jax.random.key(0), ref.regression(8)[0], tx)
    own = [
        state.opt_state.hyperparams["learning_rate"],
        state.opt_state.inner_state[0].mu[1]["learning_rate"],
    ]
    assert [leaf.devices() for leaf in own] == [{each} for each in jax.devices()[:2]]
