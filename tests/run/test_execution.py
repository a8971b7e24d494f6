"""How a step runs: nothing twice, nothing kept, nothing waited for."""

import time

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

import jpipe
from jpipe._functions._objective import Objective

from .. import reference as ref


def step_and_state(pipe, x, tx=None, **options):
    tx = tx or optax.adam(1e-2)
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    return pipe.train_step(ref.mse, tx, **options), state


class TestNothingTwice:
    def test_the_second_step_traces_and_compiles_nothing(self, caplog):
        traces = []

        def counted(x):
            traces.append(x.shape)
            return jnp.tanh(x)

        layers = [ref.dense(8), counted, ref.dense(4)]
        pipe = jpipe.pipeline(layers, 4, balance=[2, 1], schedule="gpipe")
        x, targets = ref.regression(8)
        step, state = step_and_state(pipe, x)
        state, _ = step(state, x, targets)
        before = len(traces)
        with jax.log_compiles(), caplog.at_level("WARNING"):
            for _ in range(2):
                state, _ = step(state, x, targets)
        assert len(traces) == before
        assert not [r for r in caplog.records if "ompil" in r.getMessage()]

    def test_the_log_that_the_test_above_reads_does_tell(self, caplog):
        with jax.log_compiles(), caplog.at_level("WARNING"):
            jax.jit(lambda x: x * 3 + 1)(jnp.ones(17))
        assert [r for r in caplog.records if "ompil" in r.getMessage()]

    def test_at_most_two_shapes_are_traced_per_batch_size(self):
        shapes = []

        def counted(x):
            shapes.append(x.shape)
            return x

        pipe = jpipe.pipeline([counted, ref.dense(4)], 4)
        x, targets = ref.regression(10)
        variables = pipe.init(jax.random.key(0), x)
        shapes.clear()
        gradient = pipe.value_and_grad(ref.mse)
        for _ in range(2):
            gradient(variables, x, targets)
        assert sorted(shapes) == [(2, 5), (3, 5)]

    def test_a_new_wrapper_of_the_same_loss_compiles_nothing(self):
        traces = []

        def loss_fn(y, t):
            traces.append(1)
            return ref.mse(y, t)

        pipe = jpipe.pipeline([ref.dense(4)], 2)
        x, targets = ref.regression(4)
        variables = pipe.init(jax.random.key(0), x)
        pipe.value_and_grad(loss_fn)(variables, x, targets)
        before = len(traces)
        pipe.value_and_grad(loss_fn)(variables, x, targets)
        assert len(traces) == before


class TestNothingKept:
    def test_fifty_steps_leave_no_array_behind(self):
        pipe = jpipe.pipeline(ref.mlp(), 4, balance=[2, 2, 2])
        x, targets = ref.regression(10)
        step, state = step_and_state(pipe, x)
        state, metrics = step(state, x, targets)
        count = len(jax.live_arrays())
        for _ in range(50):
            state, metrics = step(state, x, targets)
        jax.block_until_ready((state, metrics))
        assert len(jax.live_arrays()) == count

    def test_the_arrays_of_the_caller_survive(self):
        for microbatches in (1, 2):
            pipe = jpipe.pipeline([ref.dense(5), ref.dense(4)], microbatches)
            x, targets = ref.regression(4)
            x = jax.device_put(x, pipe.devices[0])
            targets = jax.device_put(targets, pipe.devices[-1])
            step, state = step_and_state(pipe, x)
            step(state, x, targets)
            assert not x.is_deleted()
            assert not targets.is_deleted()


class TestResiduals:
    """What passes from a forward to its backward."""

    def cut(self, layer, x, remat):
        pipe = jpipe.pipeline([layer, ref.dense(4)], 1, remat=remat, schedule="gpipe")
        variables = pipe.init(jax.random.key(0), x)
        find = pipe._library.gradients(Objective(ref.mse))
        targets = jnp.ones((x.shape[0], 4))
        gradient = find(variables, x, targets, None, True)
        return gradient.program.rows[0][0].programs.derivatives.cut, variables[0][
            "params"
        ]

    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
    def test_no_copy_of_the_weights_whatever_the_dtype(self, dtype):
        """A cast of the weights is made again, not carried."""
        layer = nn.Sequential([nn.Dense(256, dtype=dtype), nn.Dense(256, dtype=dtype)])
        cut, params = self.cut(layer, jnp.ones((2, 256)), "none")
        shapes = {leaf.shape for leaf in jax.tree.leaves(params) if leaf.ndim == 2}
        assert shapes == {(256, 256)}
        assert not [spec for spec in cut.carried if spec.shape in shapes]

    def test_nothing_that_is_an_input_is_carried(self):
        cut, _ = self.cut(ref.dense(64), jnp.ones((2, 32)), "none")
        assert cut.kept == (0,)
        assert cut.carried == []

    def test_an_input_that_the_backward_does_not_read_is_not_kept(self):
        layer = nn.Sequential([jnp.sin, ref.dense(4)])
        cut, _ = self.cut(layer, jnp.ones((2, 8)), "none")
        assert cut.kept == ()
        assert [spec.shape for spec in cut.carried] in ([(2, 8)], [(2, 8), (2, 8)])

    def test_a_policy_carries_what_it_names(self):
        policy = jax.checkpoint_policies.save_only_these_names("kept")

        def named(x):
            return checkpoint_name(jnp.sin(x), "kept") ** 2

        layer = nn.Sequential([ref.dense(8), named, ref.dense(8), jnp.tanh])
        cut, _ = self.cut(layer, jnp.ones((2, 8)), policy)
        assert [spec.shape for spec in cut.carried] == [(2, 8)]

    def test_offloaded_residuals_are_in_host_memory(self):
        policy = jax.checkpoint_policies.offload_dot_with_no_batch_dims(
            "device", "pinned_host"
        )
        layer = nn.Sequential([ref.dense(8), jnp.sin, ref.dense(8), jnp.tanh])
        x = jnp.ones((2, 8))
        cut, params = self.cut(layer, x, policy)
        leaves = jax.tree.leaves(params)
        _, _, carried = jax.jit(cut.forward)(leaves, [x], [])
        assert {leaf.sharding.memory_kind for leaf in carried} == {"pinned_host"}


def test_dispatch_returns_before_the_work_is_done():
    """Python issues all actions of a step without waiting for any of them."""
    width = 1024
    pipe = jpipe.pipeline([ref.dense(width), ref.dense(width)], 2)
    x = jnp.ones((512, width))
    step, state = step_and_state(pipe, x, optax.sgd(1e-3))
    for _ in range(2):
        state, metrics = step(state, x, x)
    jax.block_until_ready((state, metrics))
    dispatch, done = [], []
    for _ in range(3):
        start = time.perf_counter()
        state, metrics = step(state, x, x)
        dispatch.append(time.perf_counter() - start)
        jax.block_until_ready((state, metrics))
        done.append(time.perf_counter() - start)
    assert min(dispatch) < 0.5 * min(done)


def test_an_error_while_running_names_the_action():
    class Broken(Exception):
        pass

    def observe(step, live):
        if step is not None and str(step.action) == "0B1":
            raise Broken

    layers = [*[ref.dense(4)] * 9, jnp.tanh]
    pipe = jpipe.pipeline(layers, 2, balance=[9, 1])
    x = targets = jnp.ones((4, 4))
    variables = pipe.init(jax.random.key(0), x)
    gradient = pipe._library.gradients(Objective(ref.mse))(
        variables, x, targets, None, True
    )
    weights = gradient.program.layout.take(jax.tree.leaves(variables))
    with pytest.raises(Broken) as caught:
        gradient(weights, [x], [targets], [], observe)
    (note,) = caught.value.__notes__
    layers = "layers 0 to 8 (Dense x 9)"
    assert note == f"raised in action 0B1 on cpu:0: {layers}"


def test_what_is_not_a_number_is_blamed_on_a_stage():
    def bad(x):
        return jnp.log(-jnp.abs(x) - 1)

    pipe = jpipe.pipeline([ref.dense(4), ref.dense(4), bad, ref.dense(4)], 2)
    x, targets = ref.regression(4)
    variables = pipe.init(jax.random.key(0), x)
    with jax.debug_nans(True), pytest.raises(FloatingPointError) as caught:
        pipe.value_and_grad(ref.mse)(variables, x, targets)
    assert caught.value.__notes__[-1].endswith("on cpu:2: layers 2 to 2 (bad)")


def test_stages_of_one_rank_hand_arrays_over(moved):
    """Neighbours on one device move nothing, and their gradients are right."""
    layers = [ref.dense(8), jnp.tanh, ref.dense(4)]
    pipe = jpipe.pipeline(layers, 4, devices=[jax.devices()[0]] * 3)
    x, targets = ref.regression(8)
    variables = pipe.init(jax.random.key(0), x)
    gradient = pipe.value_and_grad(ref.mse)
    gradient(variables, x, targets)
    moved.clear()
    value = gradient(variables, x, targets)
    assert len(moved) == 2  # the input and the targets of the mini-batch
    expected = ref.value_and_grad(layers, ref.params_of(variables), x, targets)
    ref.assert_close(value, expected, ref.FLOAT32)


def test_print_says_who_runs_what():
    pipe = jpipe.pipeline(ref.mlp(), 4, balance=[2, 2, 2])
    assert "parameters" not in str(pipe)
    x, targets = ref.regression(8)
    variables = pipe.init(jax.random.key(0), x)
    assert "Dense, tanh" in str(pipe)
    assert "rank 1 |.  F0 F1" in str(pipe)
    total = sum(leaf.size for leaf in jax.tree.leaves(variables))
    assert sum(stage.num_params for stage in pipe.plan.stages) == total
    pipe.value_and_grad(ref.mse)(variables, x, targets)
    assert "peak of a step" in str(pipe)
    assert repr(pipe) == "<jpipe.Pipeline: 6 layers in 3 stages, 4 micro-batches, 1f1b>"


def test_a_batch_of_another_size_compiles_no_second_optimizer():
    updates = []

    def counted(updates_, state, params=None):
        updates.append(1)
        return updates_, state

    tx = optax.GradientTransformation(lambda params: optax.EmptyState(), counted)
    pipe = jpipe.pipeline([ref.dense(4)], 2)
    state = pipe.init_train_state(jax.random.key(0), ref.regression(4)[0], tx)
    before = len(updates)
    step = pipe.train_step(ref.mse, tx)
    for batch in (4, 7, 4):
        state, _ = step(state, *ref.regression(batch))
    assert len(updates) - before == 1


@pytest.mark.parametrize(
    "remat", ["full", "none", jax.checkpoint_policies.dots_saveable]
)
def test_a_layer_may_print_what_it_computes(remat, capfd):
    def printing(x):
        jax.debug.print("mean {}", x.mean())
        return x

    layers = [ref.dense(4), printing, ref.dense(4)]
    pipe = jpipe.pipeline(layers, 2, remat=remat, schedule="gpipe")
    x, targets = ref.regression(4)
    variables = pipe.init(jax.random.key(0), x)
    value = pipe.value_and_grad(ref.mse)(variables, x, targets)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("mean") >= 2
    layers[1] = jnp.positive
    expected = ref.value_and_grad(layers, ref.params_of(variables), x, targets)
    ref.assert_close(value, expected, ref.FLOAT32)
