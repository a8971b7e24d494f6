"""How a step runs: nothing twice, nothing kept, nothing waited for."""

import time

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

import jpipe

from .. import reference as ref
from .held import gradient_of


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
        # One of them for the shapes of variables, where the gradient was built.
        assert sorted(shapes) == [(2, 5), (3, 5), (3, 5)]


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

    def passed(self, layer, x, remat):
        """What the first stage hands to its backward, and its weights.

        Of its weights and its input the positions of what the backward reads; the
        specs of what the forward carries to it beside these.
        """
        pipe = jpipe.pipeline([layer, ref.dense(4)], 1, remat=remat, schedule="gpipe")
        gradient, _ = gradient_of(pipe, x, jnp.ones((x.shape[0], 4)))
        works = gradient.works
        made, task = works.derivatives(0, 0, works.mode(0, 0)), works.task(0)
        first = len(task.weights.specs) + len(task.x) + len(task.extra_specs)
        results = list(made.forward.results)[task.num_results :]
        reads = made.backward.reads
        carried = [results[i - first] for i in reads if 0 <= i - first < len(results)]
        given = [i for i in reads if i < first]
        return given, carried, task.weights.specs

    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
    def test_no_copy_of_the_weights_whatever_the_dtype(self, dtype):
        """A cast of the weights is made again, not carried."""
        layer = nn.Sequential([nn.Dense(256, dtype=dtype), nn.Dense(256, dtype=dtype)])
        _, carried, weights = self.passed(layer, jnp.ones((2, 256)), "none")
        shapes = {leaf.shape for leaf in weights if leaf.ndim == 2}
        assert shapes == {(256, 256)}
        assert carried
        assert not [spec for spec in carried if spec.shape in shapes]

    def test_nothing_that_is_an_input_is_carried(self):
        given, carried, weights = self.passed(ref.dense(64), jnp.ones((2, 32)), "none")
        assert given == [len(weights)]  # the input
        assert carried == []

    def test_an_input_that_the_backward_does_not_read_is_not_kept(self):
        layer = nn.Sequential([jnp.sin, ref.dense(4)])
        given, carried, _ = self.passed(layer, jnp.ones((2, 8)), "none")
        assert given == []
        assert [spec.shape for spec in carried] == [(2, 8)]

    def test_a_policy_carries_what_it_names(self):
        policy = jax.checkpoint_policies.save_only_these_names("kept")

        def named(x):
            return checkpoint_name(jnp.sin(x), "kept") ** 2

        layer = nn.Sequential([ref.dense(8), named, ref.dense(8), jnp.tanh])
        _, carried, _ = self.passed(layer, jnp.ones((2, 8)), policy)
        assert [spec.shape for spec in carried] == [(2, 8)]

    def test_offloaded_residuals_are_in_host_memory(self):
        policy = jax.checkpoint_policies.offload_dot_with_no_batch_dims(
            "device", "pinned_host"
        )
        layer = nn.Sequential([ref.dense(8), jnp.sin, ref.dense(8), jnp.tanh])
        pipe = jpipe.pipeline([layer, ref.dense(4)], 2, remat=policy, schedule="gpipe")
        gradient, leaves = gradient_of(pipe, jnp.ones((4, 8)), jnp.ones((4, 4)))
        kinds = set()

        def observe(instruction, slots):
            if str(instruction.label) in ("0F0", "0F1") and instruction.source is None:
                # One that leaves the stage, and one that waits for the backward.
                _, *carried = (slots[slot] for slot in instruction.writes)
                kinds.update(leaf.sharding.memory_kind for leaf in carried)

        gradient.program(leaves, observe)
        assert kinds == {"pinned_host"}


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

    def observe(instruction, slots):
        if str(instruction.label) == "0B1":
            raise Broken

    layers = [*[ref.dense(4)] * 9, jnp.tanh]
    pipe = jpipe.pipeline(layers, 2, balance=[9, 1])
    x = targets = jnp.ones((4, 4))
    gradient, leaves = gradient_of(pipe, x, targets)
    with pytest.raises(Broken) as caught:
        gradient.program(leaves, observe)
    (note,) = caught.value.__notes__
    layers = "layers 0 to 8 (Dense x 9)"
    assert note == f"raised in action 0B1 on cpu:0: {layers}"


def not_a_number(x):
    return jnp.log(-jnp.abs(x) - 1)


@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_not_a_number_is_blamed_on_a_stage(compiled):
    layers = [ref.dense(4), ref.dense(4), not_a_number, ref.dense(4)]
    pipe = jpipe.pipeline(layers, 2)
    x, targets = ref.regression(4)
    variables = pipe.init(jax.random.key(0), x)
    gradient = pipe.value_and_grad(ref.mse)
    if compiled:
        gradient(variables, x, targets)
    with jax.debug_nans(True), pytest.raises(FloatingPointError) as caught:
        gradient(variables, x, targets)
    assert caught.value.__notes__[-1].endswith("on cpu:2: layers 2 to 2 (not_a_number)")


def test_so_it_is_where_memory_is_given_away():
    """JAX runs the program again, on arguments that are still there."""
    pipe = jpipe.pipeline([ref.dense(4), ref.dense(4)], 2)
    x, targets = ref.regression(4)
    variables = pipe.init(jax.random.key(0), x)

    def by_itself(y, t):
        return not_a_number(ref.mse(y, t)), 1.0

    gradient = pipe.value_and_grad(by_itself, reduction="weighted")
    with jax.debug_nans(True), pytest.raises(FloatingPointError) as caught:
        gradient(variables, x, targets)
    assert "stage1_forward_add_results_backward_add_grads" in str(caught.value)
    note = "raised in action 1B0 on cpu:1: layers 1 to 1 (Dense)"
    assert caught.value.__notes__[-1] == note


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
