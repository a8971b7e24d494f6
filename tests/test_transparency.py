"""A pipeline gives the numbers of one device: every leaf, against plain Flax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import jpipe
from jpipe.schedules import Action, Schedule

from . import reference as ref

DOTS = jax.checkpoint_policies.dots_saveable


OFFLOAD = jax.checkpoint_policies.offload_dot_with_no_batch_dims(
    "device", "pinned_host"
)


def test_what_is_offloaded_may_be_of_the_shape_of_sums():
    """Sums of statistics are donated, on the device; what is offloaded is not there."""
    layers = [ref.dense(3), nn.BatchNorm()]
    x, targets = ref.regression(6)

    def loss_fn(y, t):
        return jnp.mean((y @ jnp.arange(3, dtype=y.dtype) - t[:, 0]) ** 2)

    def run(remat):
        pipe = jpipe.pipeline(layers, 2, schedule="gpipe", remat=remat)
        variables = pipe.init(jax.random.key(0), x)
        return pipe.value_and_grad(loss_fn)(variables, x, targets)

    ref.assert_close(run(OFFLOAD), run("full"), ref.FLOAT32)


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

    @pytest.mark.parametrize("remat", ["full", "none", "except_last", DOTS])
    def test_another_remat_is_another_program_a_few_ulps_away(self, remat):
        ref.assert_close(self.grads(remat=remat), self.grads(), ref.FLOAT32)


def test_init_depends_on_key_layer_and_shape_only():
    x, _ = ref.regression(8)
    layers = ref.mlp()
    expected = ref.on_host(jpipe.sequential(layers).init(jax.random.key(3), x))
    for balance, schedule in [([2, 4], "gpipe"), (None, "1f1b")]:
        pipe = jpipe.pipeline(layers, 4, balance=balance, schedule=schedule)
        variables = pipe.init(jax.random.key(3), x)
        ref.assert_equal(variables, expected)
        wide = pipe.init(jax.random.key(3), jax.ShapeDtypeStruct((99, 5), jnp.float32))
        ref.assert_equal(wide, expected)
    other = ref.on_host(jpipe.sequential(layers).init(jax.random.key(4), x))
    assert not np.array_equal(
        other[0]["params"]["kernel"], expected[0]["params"]["kernel"]
    )


def test_every_layer_is_on_the_device_of_its_stage():
    x, targets = ref.regression(8)
    cpu = jax.devices()
    pipe = jpipe.pipeline(ref.mlp(), 2, balance=[2, 2, 2], devices=cpu[3:6])
    variables = pipe.init(jax.random.key(0), x)
    loss, grads = pipe.value_and_grad(ref.mse)(variables, x, targets)
    for layer in range(6):
        device = {cpu[3 + layer // 2]}
        for leaf in jax.tree.leaves((variables[layer], grads[layer])):
            assert leaf.devices() == device
    assert loss.devices() == {cpu[5]}


def looped(num_ranks: int, num_microbatches: int) -> Schedule:
    """A builder of the user's own: two stages per rank, breadth first."""

    def row(rank: int) -> tuple[Action, ...]:
        numbers = range(num_microbatches)
        stages = (rank, rank + num_ranks)
        forwards = [Action("F", s, m) for s in stages for m in numbers]
        backwards = [Action("B", s, m) for s in stages[::-1] for m in numbers]
        return (*forwards, *backwards)

    return Schedule(
        "looped",
        2 * num_ranks,
        num_microbatches,
        (*range(num_ranks), *range(num_ranks)),
        tuple(map(row, range(num_ranks))),
    )


@pytest.mark.parametrize("remat", ["full", "none"])
def test_a_builder_with_several_stages_per_rank(double, monkeypatch, remat):
    """To add a schedule is to name a builder: nothing else knows of schedules."""
    monkeypatch.setitem(jpipe.schedules.BY_NAME, "looped", looped)
    layers = ref.mlp(jnp.float64)
    x, targets = ref.regression(6, jnp.float64)
    pipe = jpipe.pipeline(
        layers, 3, balance=[2, 1, 2, 1], schedule="looped", remat=remat
    )
    assert pipe.devices == (*jax.devices()[:2], *jax.devices()[:2])
    ref.compare(pipe, layers, x, targets, ref.FLOAT64)
