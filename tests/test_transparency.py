"""A pipeline gives the numbers of one device: every leaf, against plain Flax."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import jpipe
from jpipe.schedules import Action, Schedule

from . import reference as ref

BALANCES = {1: [6], 2: [2, 4], 3: [1, 4, 1], 4: [2, 1, 2, 1], 6: None}
DOTS = jax.checkpoint_policies.dots_saveable
OFFLOAD = jax.checkpoint_policies.offload_dot_with_no_batch_dims(
    "device", "pinned_host"
)


def compare(pipe, layers, x, targets, relative, loss_fn=ref.mse):
    variables = pipe.init(jax.random.key(0), x)
    loss, grads = pipe.value_and_grad(loss_fn)(variables, x, targets)
    expected = ref.value_and_grad(layers, ref.params_of(variables), x, targets, loss_fn)
    ref.assert_close((loss, grads), expected, relative)
    return variables, grads


# Every pair of values of two factors stands together in some row.
MATRIX = [
    (stages, microbatches, schedule, remat)
    for i, (stages, (microbatches, (schedule, remat))) in enumerate(
        itertools.product(
            [1, 2, 4],
            zip(
                [1, 2, 4, 8, 3, 5],
                [
                    ("1f1b", "full"),
                    ("gpipe", "none"),
                    ("1f1b", "except_last"),
                    ("gpipe", DOTS),
                    ("1f1b", "none"),
                    ("gpipe", "full"),
                ],
                strict=True,
            ),
        )
    )
]


@pytest.mark.parametrize(("stages", "microbatches", "schedule", "remat"), MATRIX)
def test_gradients_equal_one_device_in_double_precision(
    double, stages, microbatches, schedule, remat
):
    layers = ref.mlp(jnp.float64)
    x, targets = ref.regression(8, jnp.float64)
    pipe = jpipe.pipeline(
        layers,
        microbatches,
        balance=BALANCES[stages],
        schedule=schedule,
        remat=remat,
    )
    compare(pipe, layers, x, targets, ref.FLOAT64)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("remat", ["full", "none", OFFLOAD])
def test_gradients_equal_one_device_in_single_precision(schedule, remat):
    layers = ref.mlp()
    x, targets = ref.regression(12)
    pipe = jpipe.pipeline(layers, 3, balance=[2, 1, 3], schedule=schedule, remat=remat)
    compare(pipe, layers, x, targets, ref.FLOAT32)


@pytest.mark.parametrize("remat", ["full", "none"])
def test_bfloat16_computes_what_bfloat16_computes_on_one_device(remat):
    layers = ref.mlp(jnp.bfloat16)
    x, targets = ref.regression(8, jnp.bfloat16)
    pipe = jpipe.pipeline(layers, 2, balance=[3, 3], remat=remat)
    # Eight bits of mantissa; gradients are summed over micro-batches in bfloat16.
    compare(pipe, layers, x, targets, 2**-4)


def test_one_stage_of_remat_per_stage(double):
    layers = ref.mlp(jnp.float64)
    x, targets = ref.regression(8, jnp.float64)
    pipe = jpipe.pipeline(
        layers, 4, balance=[2, 2, 2], remat=["none", DOTS, "except_last"]
    )
    compare(pipe, layers, x, targets, ref.FLOAT64)


def test_forward_equals_one_device(double):
    layers = ref.mlp(jnp.float64)
    x, _ = ref.regression(10, jnp.float64)
    for microbatches in (1, 4):
        pipe = jpipe.pipeline(layers, microbatches, balance=[3, 2, 1])
        variables = pipe.init(jax.random.key(0), x)
        expected = ref.compose(layers, ref.params_of(variables), x)
        ref.assert_close(pipe.apply(variables, x), expected, ref.FLOAT64)


@settings(deadline=None, max_examples=12, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_stacks_of_random_sizes(double, data):
    """Layers, balance, batch, micro-batches, schedule and remat drawn at random."""
    kinds = st.sampled_from(["dense", "residual", "tanh", "relu"])
    names = data.draw(st.lists(kinds, min_size=1, max_size=5), label="layers")
    make = {
        "dense": lambda: ref.dense(5, jnp.float64),
        "residual": lambda: ref.Residual(5, jnp.float64),
        "tanh": lambda: jnp.tanh,
        "relu": lambda: nn.relu,
    }
    layers = [make[name]() for name in names] + [ref.dense(4, jnp.float64)]
    cuts = data.draw(
        st.lists(st.booleans(), min_size=len(names), max_size=len(names)),
        label="cut after layer",
    )
    balance = [1]
    for cut in cuts:
        if cut:
            balance.append(1)
        else:
            balance[-1] += 1
    microbatches = data.draw(st.integers(1, 5), label="micro-batches")
    batch = data.draw(st.integers(microbatches, 11), label="batch")
    pipe = jpipe.pipeline(
        layers,
        microbatches,
        balance=balance,
        schedule=data.draw(st.sampled_from(["gpipe", "1f1b"]), label="schedule"),
        remat=data.draw(
            st.sampled_from(["full", "none", "except_last", DOTS]), label="remat"
        ),
    )
    x, targets = ref.regression(batch, jnp.float64)
    compare(pipe, layers, x, targets, ref.FLOAT64)


class TestSameBits:
    """Where the same executables run, the bits are the same."""

    layers = staticmethod(ref.mlp)

    def grads(self, **options):
        x, targets = ref.regression(8)
        pipe = jpipe.pipeline(self.layers(), 4, balance=[2, 2, 2], **options)
        variables = pipe.init(jax.random.key(0), x)
        return pipe.value_and_grad(ref.mse)(variables, x, targets)

    def user_order(self):
        """1F1B with one more forward of warm-up on the first rank."""
        return Schedule.from_text(
            "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3\n"
            "1F0 1F1 1F2 1B0 1B1 1F3 1B2 1B3\n"
            "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"
        )

    def test_full_remat_gives_the_same_bits_under_every_schedule(self):
        expected = self.grads(schedule="gpipe")
        ref.assert_equal(self.grads(schedule="1f1b"), expected)
        ref.assert_equal(self.grads(schedule=self.user_order()), expected)

    def test_kept_residuals_give_the_same_bits_where_the_same_programs_run(self):
        # The last stage of 1F1B and of the user's order runs F and B fused.
        fused = self.grads(schedule="1f1b", remat="none")
        ref.assert_equal(self.grads(schedule=self.user_order(), remat="none"), fused)
        # GPipe's runs them apart: another program on that stage, a few ulps.
        apart = self.grads(schedule="gpipe", remat="none")
        ref.assert_close(apart, fused, ref.FLOAT32)

    def test_devices_do_not_change_a_bit(self):
        cpu = jax.devices()
        expected = self.grads()
        ref.assert_equal(self.grads(devices=[cpu[5], cpu[2], cpu[7]]), expected)
        ref.assert_equal(self.grads(devices=[cpu[0]] * 3), expected)
        ref.assert_equal(self.grads(devices=[cpu[1], cpu[0], cpu[1]]), expected)

    def test_twice_in_a_row_gives_the_same_bits(self):
        ref.assert_equal(self.grads(), self.grads())

    @pytest.mark.parametrize("remat", ["none", "except_last", DOTS])
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


class TestBatches:
    """Batches that do not divide, of another size, of any structure."""

    @pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
    @pytest.mark.parametrize("remat", ["full", "none", "except_last"])
    def test_uneven_batch_has_exact_weights(self, double, schedule, remat):
        layers = ref.mlp(jnp.float64)
        pipe = jpipe.pipeline(layers, 4, balance=[3, 3], schedule=schedule, remat=remat)
        x, targets = ref.regression(10, jnp.float64)
        compare(pipe, layers, x, targets, ref.FLOAT64)

    def test_later_batch_of_another_size(self, double):
        layers = ref.mlp(jnp.float64)
        pipe = jpipe.pipeline(layers, 4, balance=[3, 3])
        for batch in (10, 4, 13, 10):
            x, targets = ref.regression(batch, jnp.float64, seed=batch)
            compare(pipe, layers, x, targets, ref.FLOAT64)

    def test_more_stages_than_microbatches_and_one_of_everything(self, double):
        layers = ref.mlp(jnp.float64)
        x, targets = ref.regression(1, jnp.float64)
        compare(jpipe.pipeline(layers, 1), layers, x, targets, ref.FLOAT64)
        single = [ref.dense(4, jnp.float64)]
        compare(jpipe.pipeline(single, 1), single, x, targets, ref.FLOAT64)

    def test_a_model_without_parameters(self):
        x = jnp.arange(6.0)
        pipe = jpipe.pipeline([jnp.sin, jnp.cos], 3)
        variables = pipe.init(jax.random.key(0), x)
        loss, grads = pipe.value_and_grad(ref.mse)(variables, x, x)
        assert grads == ({}, {})
        np.testing.assert_allclose(loss, ref.mse(jnp.cos(jnp.sin(x)), x), rtol=1e-6)

    def test_any_pytree_at_every_boundary(self, double):
        """Dictionaries, tuples, integers and booleans between stages and in targets."""
        f64 = jnp.float64

        class Embed(nn.Module):
            @nn.compact
            def __call__(self, batch):
                h = nn.Embed(11, 6, param_dtype=f64, dtype=f64)(batch["tokens"])
                return {"h": h, "mask": batch["mask"], "ids": batch["tokens"]}

        class Mix(nn.Module):
            @nn.compact
            def __call__(self, carry):
                h = ref.dense(6, f64)(carry["h"])
                h = jnp.where(carry["mask"][..., None], jnp.tanh(h), 0.0)
                return (h, carry["ids"]), carry["mask"]

        class Head(nn.Module):
            @nn.compact
            def __call__(self, carry):
                (h, ids), mask = carry
                return {"logits": ref.dense(11, f64)(h) + ids[..., None], "mask": mask}

        layers = [Embed(), Mix(), Head()]
        rng = np.random.default_rng(0)
        x = {
            "tokens": rng.integers(0, 11, (6, 5)).astype(np.int32),
            "mask": rng.random((6, 5)) < 0.7,
        }
        targets = (rng.integers(0, 11, (6, 5)).astype(np.int32), rng.random((6, 5)))

        def loss_fn(outputs, targets):
            labels, weight = targets
            losses = optax.softmax_cross_entropy_with_integer_labels(
                outputs["logits"], labels
            )
            return jnp.mean(losses * weight * outputs["mask"])

        for remat, schedule in [("full", "1f1b"), ("none", "gpipe")]:
            pipe = jpipe.pipeline(layers, 3, remat=remat, schedule=schedule)
            compare(pipe, layers, x, targets, ref.FLOAT64, loss_fn)

    @pytest.mark.parametrize("remat", ["full", "none"])
    def test_in_axes_as_vmap_has_it(self, double, remat):
        f64 = jnp.float64

        class Attend(nn.Module):
            @nn.compact
            def __call__(self, inputs):
                query, memory = inputs  # time first; every micro-batch the same memory
                scores = jnp.einsum("tbd,kd->tbk", query, memory)
                return ref.dense(4, f64)(nn.softmax(scores) @ memory)

        layers = [Attend(), jnp.tanh, ref.dense(4, f64)]
        query = jax.random.normal(jax.random.key(1), (3, 7, 5), f64)
        memory = jax.random.normal(jax.random.key(2), (6, 5), f64)
        targets = jax.random.normal(jax.random.key(3), (3, 7, 4), f64)
        pipe = jpipe.pipeline(
            layers, 3, in_axes=(1, None), target_axes=1, out_axes=1, remat=remat
        )
        x = (query, memory)
        variables, _ = compare(pipe, layers, x, targets, ref.FLOAT64)
        expected = ref.compose(layers, ref.params_of(variables), x)
        ref.assert_close(pipe.apply(variables, x), expected, ref.FLOAT64)
        # What every micro-batch was given whole still belongs to the caller.
        assert not memory.is_deleted()


class TestUnusualLeaves:
    """Frozen, unused and integer leaves; stages without parameters."""

    class Odd(nn.Module):
        @nn.compact
        def __call__(self, x):
            width = x.shape[-1]
            used = self.param("used", nn.initializers.normal(1.0), (width, 3), x.dtype)
            frozen = self.param("frozen", nn.initializers.ones, (width,), x.dtype)
            self.param("unused", nn.initializers.ones, (2, 2), x.dtype)
            shift = self.param("shift", lambda key: jnp.arange(3))
            return (x * jax.lax.stop_gradient(frozen)) @ used + shift

    @pytest.mark.parametrize("remat", ["full", "none"])
    @pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
    def test_gradients(self, double, remat, schedule):
        f64 = jnp.float64
        layers = [jnp.sin, self.Odd(), jnp.tanh, self.Odd(), ref.dense(4, f64)]
        pipe = jpipe.pipeline(layers, 2, remat=remat, schedule=schedule)
        x, targets = ref.regression(6, f64)
        _, grads = compare(pipe, layers, x, targets, ref.FLOAT64)
        assert not np.any(np.asarray(grads[1]["frozen"]))
        assert not np.any(np.asarray(grads[1]["unused"]))
        assert grads[1]["shift"].dtype == jax.dtypes.float0

    def test_training_leaves_integers_alone(self):
        layers = [self.Odd(), jnp.tanh, ref.dense(4)]
        pipe = jpipe.pipeline(layers, 2)
        x, targets = ref.regression(6)
        tx = optax.adamw(0.1, weight_decay=0.5)
        state = pipe.init_train_state(jax.random.key(0), x, tx)
        step = pipe.train_step(ref.mse, tx)
        for _ in range(2):
            state, _ = step(state, x, targets)
        np.testing.assert_array_equal(state.params[0]["shift"], np.arange(3))


class TestReductions:
    def grads(self, loss_fn, microbatches, reduction, **options):
        layers = ref.mlp(jnp.float64)
        x, targets = ref.regression(9, jnp.float64)
        pipe = jpipe.pipeline(layers, microbatches, balance=[3, 3], **options)
        variables = pipe.init(jax.random.key(0), x)
        value = pipe.value_and_grad(loss_fn, reduction=reduction)
        return (
            value(variables, x, targets),
            layers,
            ref.params_of(variables),
            x,
            targets,
        )

    @pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
    def test_sum(self, double, schedule):
        def total(y, t):
            return jnp.sum((y - t) ** 2)

        actual, *model = self.grads(total, 4, "sum", schedule=schedule)
        ref.assert_close(actual, ref.value_and_grad(*model, total), ref.FLOAT64)

    @pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
    def test_weighted_by_a_mask_that_empties_a_microbatch(self, double, schedule):
        def masked(y, t):
            mask = (t[:, :1] > 0.3).astype(y.dtype)
            return jnp.sum(mask * (y - t) ** 2), jnp.sum(mask)

        def whole(y, t):
            total, weight = masked(y, t)
            return total / weight

        # With nine micro-batches of one example some have no weight at all.
        actual, *model = self.grads(masked, 9, "weighted", schedule=schedule)
        ref.assert_close(actual, ref.value_and_grad(*model, whole), ref.FLOAT64)

    @pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
    @pytest.mark.parametrize("remat", ["full", "none"])
    def test_aux_is_stacked_over_microbatches(self, schedule, remat):
        x, targets = ref.regression(8)
        pipe = jpipe.pipeline(
            ref.mlp(), 4, balance=[3, 3], schedule=schedule, remat=remat
        )
        variables = pipe.init(jax.random.key(0), x)

        def with_aux(y, t):
            return ref.mse(y, t), {"y": y, "n": jnp.int32(y.shape[0])}

        value = pipe.value_and_grad(with_aux, has_aux=True)
        (loss, aux), grads = value(variables, x, targets)
        ref.assert_equal(
            (loss, grads), pipe.value_and_grad(ref.mse)(variables, x, targets)
        )
        assert aux["y"].shape == (4, 2, 4)
        np.testing.assert_array_equal(aux["n"], [2, 2, 2, 2])
        y = pipe.apply(variables, x)
        np.testing.assert_allclose(aux["y"].reshape(8, 4), y, rtol=1e-5, atol=1e-6)


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
    compare(pipe, layers, x, targets, ref.FLOAT64)
