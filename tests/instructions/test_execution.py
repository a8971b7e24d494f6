"""How a step runs: nothing twice, nothing kept, nothing waited for."""

import gc
import re
import time
import weakref
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import jpipe

from .. import reference as ref
from ..listing import gradient_of, plan_of_gradient

OFFLOAD = jax.checkpoint_policies.offload_dot_with_no_batch_dims(
    "device", "pinned_host"
)


def step_and_state(pipe, x, tx=None):
    tx = tx or optax.adam(1e-2)
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    return pipe.train_step(ref.mse, tx), state


def test_a_batch_of_another_size_compiles_no_second_optimizer():
    updates = []

    def counted(updates_, state, params=None):
        updates.append(1)
        return updates_, state

    tx = optax.GradientTransformation(lambda params: optax.EmptyState(), counted)
    pipe = jpipe.pipeline([ref.dense(4)], 2)
    step, state = step_and_state(pipe, ref.regression(4)[0], tx)
    before = len(updates)
    for batch in (4, 7, 4):
        state, _ = step(state, *ref.regression(batch))
    assert len(updates) - before == 1


def test_many_steps_leave_no_array_behind():
    pipe = jpipe.pipeline(ref.mlp(), 4, balance=[2, 2, 2])
    x, targets = ref.regression(10)
    step, state = step_and_state(pipe, x)
    state, metrics = step(state, x, targets)
    count = len(jax.live_arrays())
    for _ in range(20):
        state, metrics = step(state, x, targets)
    jax.block_until_ready((state, metrics))
    assert len(jax.live_arrays()) == count


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_step_donates_no_batch_of_the_caller(microbatches):
    pipe = jpipe.pipeline([ref.dense(5), ref.dense(4)], microbatches)
    x, targets = ref.regression(4)
    x = jax.device_put(x, pipe.devices[0])
    targets = jax.device_put(targets, pipe.devices[-1])
    step, state = step_and_state(pipe, x)
    step(state, x, targets)
    assert not x.is_deleted()
    assert not targets.is_deleted()


def named(x):
    return checkpoint_name(jnp.sin(x), "kept") ** 2


NAMED = jax.checkpoint_policies.save_only_these_names("kept")
HALF = nn.Sequential([nn.Dense(256, dtype=jnp.bfloat16) for _ in range(2)])


@pytest.mark.parametrize(
    ("layer", "remat", "width", "held"),
    [
        # What is cast is the input and what is between, not the weights.
        (HALF, "none", 256, 2 * (2 * 256 * 2)),
        (nn.Sequential([ref.dense(8), named, ref.dense(8)]), NAMED, 8, 2 * 2 * 8 * 4),
    ],
    ids=["casts of weights", "a policy"],
)
def test_a_forward_stores_the_documented_residual_bytes(layer, remat, width, held):
    pipe = jpipe.pipeline([layer, ref.dense(4)], 1, remat=remat, schedule="gpipe")
    plan = plan_of_gradient(pipe, jnp.ones((2, width)), jnp.ones((2, 4)))
    assert plan.stages[0].residual_bytes == held


def test_offloaded_residuals_are_in_host_memory():
    layer = nn.Sequential([ref.dense(8), jnp.sin, ref.dense(8), jnp.tanh])
    pipe = jpipe.pipeline([layer, ref.dense(4)], 2, remat=OFFLOAD, schedule="gpipe")
    program, leaves = gradient_of(pipe, jnp.ones((4, 8)), jnp.ones((4, 4)))
    kinds = set()

    def observe(instruction, slots):
        if str(instruction.label) in ("0F0", "0F1") and not instruction.is_move:
            # One that leaves the stage, and one that waits for the backward.
            _, *carried = (slots[slot] for slot in instruction.writes)
            kinds.update(leaf.sharding.memory_kind for leaf in carried)

    program(leaves, observe=observe)
    assert kinds == {"pinned_host"}


def test_dispatch_returns_before_the_work_is_done():
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


def not_a_number(x):
    return jnp.log(-jnp.abs(x) - 1)


def test_debug_nans_finds_a_nan_though_arguments_are_donated():
    """JAX runs the program again, on arguments that are still there."""
    pipe = jpipe.pipeline([ref.dense(4), ref.dense(4)], 2)
    x, targets = ref.regression(4)
    variables = pipe.init(jax.random.key(0), x)

    def by_itself(y, t):
        return not_a_number(ref.mse(y, t)), 1.0

    gradient = pipe.value_and_grad(by_itself, reduction="weighted")
    with jax.debug_nans(True), pytest.raises(FloatingPointError) as caught:
        gradient(variables, x, targets)
    note = "raised in action 1B0 on cpu:1: layers 1 to 1 (Dense)"
    assert caught.value.__notes__[-1] == note


def root(x):
    return jnp.sqrt(x * 0)


# Where a NaN is made: the layer in the middle, the loss, and the action that fails.
INVALID = {
    "layer": (lambda x: jnp.log(x * 0 - 1), ref.mse, "1F0"),
    "loss": (jnp.tanh, lambda y, t: jnp.log(ref.mse(y, t) * 0 - 1), "2B0"),
    "backward": (root, ref.mse, "1B0"),
}


@pytest.mark.parametrize("name", INVALID)
def test_an_operation_that_makes_a_nan_is_named_as_by_jit(name):
    middle, loss_fn, action = INVALID[name]
    layers = [ref.dense(4), middle, ref.dense(4)]
    x, targets = ref.regression(4)
    pipe = jpipe.pipeline(layers, 2)
    variables = pipe.init(jax.random.key(0), x)
    params = ref.params_of(variables)
    tx = optax.sgd(0.1)
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    step = pipe.train_step(loss_fn, tx)

    def whole(params, x, targets):
        return loss_fn(ref.compose(layers, params, x), targets)

    grad_fn = jpipe.value_and_grad(whole, 2, num_stages=2)
    placed = grad_fn.place(params, x, targets)
    with jax.debug_nans(True):
        with pytest.raises(FloatingPointError) as plain:
            jax.jit(jax.value_and_grad(whole))(params, x, targets)
        for call in (
            lambda: pipe.value_and_grad(loss_fn)(variables, x, targets),
            lambda: step(state, x, targets),
            lambda: grad_fn(placed, x, targets),
        ):
            with pytest.raises(FloatingPointError) as caught:
                call()
            line = r", at .*test_execution\.py:\d+.*"
            assert re.fullmatch(re.escape(str(plain.value)) + line, str(caught.value))
            assert "raised in action" in caught.value.__notes__[-1]
        with pytest.raises(FloatingPointError) as caught:
            step(state, x, targets)
        assert f"action {action} " in caught.value.__notes__[-1]
    pipe.apply(state.variables, x)  # nothing of it was overwritten


@pytest.fixture
def debug_nans_everywhere():
    """The setting as JAX documents it, for all threads, not in a `with`."""
    jax.config.update("jax_debug_nans", True)
    yield
    jax.config.update("jax_debug_nans", False)


def sqrt(x):
    return jnp.sqrt(x + 1)


def nan_like(tree):
    return jax.tree.map(
        lambda x: jax.device_put(np.full_like(x, np.nan), x.sharding), tree
    )


# What is set to a bad value in the fourth step -> what the error says of it.
ORIGINS = {
    "x": r"\(nan\) encountered in x\['image'\], an argument of the call: no operation",
    "targets": r"\(nan\) encountered in targets, an argument",
    "state": r"\(nan\) encountered in state.params\[2\]\['kernel'\], an argument",
    "layer": r"\(nan\) encountered in sqrt, at .*test_execution\.py:\d+:\d+ \(sqrt\)",
}


@pytest.mark.parametrize("origin", ORIGINS)
def test_debug_nans_says_after_good_steps_where_a_nan_comes_from(
    origin, debug_nans_everywhere
):
    layers = [lambda inputs: inputs["image"], sqrt, nn.Dense(3)]
    x, targets = ref.regression(4)
    x, targets = {"image": abs(x)}, targets[:, :3]
    pipe = jpipe.pipeline(layers, 2, balance=[2, 1])
    tx = optax.sgd(0.1)
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    step = pipe.train_step(ref.mse, tx)
    for _ in range(3):
        state, metrics = step(state, x, targets)
    assert metrics["loss"] > 0

    batch = {"x": x, "targets": targets}
    if origin in batch:
        batch[origin] = nan_like(batch[origin])
    elif origin == "layer":
        batch["x"] = {"image": -3 - x["image"]}
    else:
        *layers_before, last = state.params
        last = {**last, "kernel": nan_like(last["kernel"])}
        state = state.replace(params=(*layers_before, last))
    with pytest.raises(FloatingPointError, match=ORIGINS[origin]) as caught:
        step(state, **batch)
    assert caught.value.__notes__[-1].startswith("raised in ")


def test_debug_nans_names_the_argument_of_a_loss_function(debug_nans_everywhere):
    def loss(params, batch):
        return jnp.mean(jnp.tanh(batch["image"] @ params["first"]) @ params["last"])

    params = {"first": jnp.ones((4, 4)), "last": jnp.ones((4, 2))}
    batch = {"image": jnp.ones((4, 4))}
    grad_fn = jpipe.value_and_grad(loss, 1, num_stages=2)
    params = grad_fn.place(params, batch)
    grad_fn(params, batch)
    with pytest.raises(FloatingPointError, match=r"in batch\['image'\], an "):
        grad_fn(params, nan_like(batch))
    params["last"] = nan_like(params["last"])
    with pytest.raises(FloatingPointError, match=r"in params\['last'\], an argument"):
        grad_fn(params, batch)


def of_each_kind():
    norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
    return [nn.Dense(4), nn.LayerNorm(), nnx.Linear(4, 4, rngs=nnx.Rngs(0)), norm]


def used():
    """Makes a pipeline, does with it all that there is, and drops it."""
    pipe, tx, x = jpipe.pipeline(of_each_kind(), 2), optax.adam(0.1), jnp.ones((4, 4))
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    step = pipe.train_step(ref.mse, tx)
    for _ in range(2):
        state, _ = step(state, x, x)
    pipe.value_and_grad(ref.mse)(state.variables, x, x)
    pipe.apply(state.variables, x)
    pipe.optimizer(tx).init(state.params)
    pipe.jit(lambda params: jax.tree.map(jnp.sin, params))(state.params)
    print(pipe, step)
    leaf = jax.tree.leaves(state.params)[0]
    held = {"pipe": pipe, "step": step, "leaf": leaf}
    return {name: weakref.ref(value) for name, value in held.items()}


def library_objects():
    """The number of objects of each class of the library."""
    classes = map(type, gc.get_objects())
    return Counter(x for x in classes if str(x.__module__).startswith("jpipe."))


# What becomes of the statistics is not its subject.
@pytest.mark.filterwarnings("ignore:value_and_grad leaves:UserWarning")
def test_a_pipeline_that_is_dropped_is_gone_at_once():
    gc.collect()
    gc.disable()
    try:
        found = used()
        assert [name for name, held in found.items() if held() is not None] == []
        # What JAX keeps, such as traces of jitted functions, holds nothing of it.
        before = library_objects()
        used()
        assert library_objects() == before
    finally:
        gc.enable()
