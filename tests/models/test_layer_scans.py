"""Models that scan over their layers: what their users see, and what devices hold.

That they compute what they should is in `test_unchanged_models`.
"""

import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import serialization

import jpipe

from .. import reference as ref
from ..listing import program_of
from ..slow import slow
from .scanned_models import ScannedMLP
from .small_models import WIDTH, BatchNorm, Dense

pytestmark = pytest.mark.usefixtures("double")

KEY = jax.random.key(0)
X = np.random.default_rng(0).normal(size=(8, 6))
TARGETS = np.random.default_rng(1).normal(size=(8, 3))
TX = optax.adamw(1e-2)


def mean_square(y: jax.Array, targets: jax.Array) -> jax.Array:
    return jnp.mean((y - targets) ** 2)


def build(layers: int = 4, **options: Any) -> jpipe.Pipeline:
    options.setdefault("num_stages", 4)
    return jpipe.pipeline(ScannedMLP(layers), 2, **options)


@functools.cache
def plain_function(layers: int) -> Any:
    """``parameters -> (loss, gradients)`` without jpipe."""

    def loss(params: Any) -> jax.Array:
        return mean_square(ScannedMLP(layers).apply({"params": params}, X), TARGETS)

    return jax.jit(jax.value_and_grad(loss))


def plain_gradient(layers: int, variables: Any) -> Any:
    return plain_function(layers)(variables["params"])


def on_host(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)


# ------------------------------------------------------------------- places and shapes


def test_equal_layers_of_stages_are_one_sharded_array() -> None:
    variables = build(8).init(KEY, X)
    kernel = variables["params"]["layers"]["Feedforward_0"]["Dense_0"]["kernel"]
    assert isinstance(kernel, jax.Array)
    shapes = {shard.data.shape for shard in kernel.addressable_shards}
    assert shapes == {(2, WIDTH, 2 * WIDTH)}
    assert len(kernel.devices()) == 4


def test_unequal_layers_of_stages_are_a_stacked_leaf() -> None:
    _, state, _ = trained()
    kernel = state.params["layers"]["Feedforward_0"]["Dense_0"]["kernel"]
    assert isinstance(kernel, jpipe.Stacked)
    assert kernel.shape == (7, WIDTH, 2 * WIDTH)


def test_no_device_holds_a_stack_when_variables_are_made(tmp_path: Any) -> None:
    """Every program that JAX compiles is written down, and searched for the shape."""
    jax.config.update("jax_dump_ir_to", str(tmp_path))
    try:
        build(12).init(KEY, X)
        ScannedMLP(12).init(KEY, X)
    finally:
        jax.config.update("jax_dump_ir_to", "")
    texts = {path.name: path.read_text() for path in tmp_path.glob("*.mlir")}
    piece = f"tensor<3x{WIDTH}x{2 * WIDTH}xf64>"
    whole = f"tensor<12x{WIDTH}x{2 * WIDTH}xf64>"
    drawn = [text for name, text in texts.items() if "_draw_" in name]
    assert any(piece in text for text in drawn)
    assert not any(whole in text for text in drawn)
    # Flax alone makes the whole of it, which is found.
    assert any(whole in text for text in texts.values())


def test_no_instruction_of_a_step_has_a_stack() -> None:
    pipe = build(8)
    state = pipe.init_train_state(KEY, X, TX)
    step = pipe.train_step(mean_square, TX)
    program = program_of(step, state, X, TARGETS)
    shapes = {tuple(spec.shape) for spec in program.specs}
    assert (2, WIDTH, 2 * WIDTH) in shapes
    assert not any(8 in shape[:1] and len(shape) == 3 for shape in shapes)


class DrawnAtOnce(nn.Module):
    """A stack whose layers are drawn by one call."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def draw(key: jax.Array) -> jax.Array:
            keys = jax.random.split(key, 4)
            normal = functools.partial(jax.random.normal, shape=(6, 6), dtype=float)
            return jax.vmap(normal)(keys)

        def layer(x: jax.Array, kernel: jax.Array) -> Any:
            return jnp.tanh(x @ kernel), None

        return Dense(3)(jax.lax.scan(layer, x, self.param("kernel", draw))[0])


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_layers_drawn_at_once_are_those_of_flax(impl: str) -> None:
    """By some generators an array of keys draws what its first key draws."""
    key = jax.random.key(0, impl=impl)
    variables = jpipe.pipeline(DrawnAtOnce(), 2, num_stages=2).init(key, X)
    ref.assert_equal(variables, jax.jit(DrawnAtOnce().init)(key, X))


def test_variables_of_another_model_are_not_placed() -> None:
    pipe = build(4)
    variables = on_host(pipe.init(KEY, X))
    others = on_host(ScannedMLP(5).init(KEY, X))
    with pytest.raises(ValueError, match=r"in pieces of 1, 1, 1, 1 .* needs 4 there"):
        pipe.place(others)
    del variables["params"]["layers"]
    with pytest.raises(ValueError, match="have 4 arrays, those of the model 10;"):
        pipe.place(variables)


# --------------------------------------------------------------------------- training

OPTIMIZERS = {
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=2),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
    "lamb": lambda: optax.lamb(1e-2),
}


# An optimizer of norms of each stack, and one of the norm of all; pieces that are
# unequal, and equal.
@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("adafactor", 7),
        ("clipped", 8),
        slow("adafactor", 8),
        slow("clipped", 7),
        slow("lamb", 7),
        slow("lamb", 8),
    ],
)
def test_steps_are_those_of_optax_on_whole_stacks(name: str, layers: int) -> None:
    tx = OPTIMIZERS[name]()
    pipe = build(layers)
    state = pipe.init_train_state(KEY, X, tx)
    step = pipe.train_step(mean_square, tx)
    params = on_host(state.params)
    opt_state = tx.init(params)
    update = jax.jit(tx.update)
    for _ in range(3):
        state = pipe.place(state, X)
        state, metrics = step(state, X, TARGETS)
        loss, grads = plain_gradient(layers, {"params": params})
        updates, opt_state = update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        ref.assert_close(metrics["loss"], loss, ref.FLOAT64)
    # Roots and quotients of small gradients, three times.
    ref.assert_close(on_host(state.params), on_host(params), 1e-8)
    ref.assert_close(on_host(state.opt_state), on_host(opt_state), 1e-8, 1e-6)


def test_a_step_overwrites_its_state() -> None:
    pipe = build(8)
    state = pipe.init_train_state(KEY, X, TX)
    step = pipe.train_step(mean_square, TX)
    new_state, _ = step(state, X, TARGETS)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))
    with pytest.raises(ValueError, match="this state was donated"):
        step(state, X, TARGETS)
    kept = pipe.train_step(mean_square, TX, donate=False)
    kept(new_state, X, TARGETS)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(new_state.params))


SCHEDULES = {
    "interleaved": {"num_stages": 8, "schedule": "interleaved"},
    "v_half": {"num_stages": 8, "schedule": "v_half"},
    "zb_h1": {"schedule": "zb_h1"},
    "replicas": {"num_stages": 3, "replicas": [2, 1, 1]},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_have_the_gradients_of_plain_jax(name: str) -> None:
    pipe = build(8, devices=jax.devices()[:4], **SCHEDULES[name])
    variables = pipe.init(KEY, X)
    grads = pipe.value_and_grad(mean_square)(variables, X, TARGETS)
    expected = plain_gradient(8, on_host(variables))
    ref.assert_close(on_host(grads), expected, ref.FLOAT64)


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["data", "model"])
def test_stages_of_several_devices_have_the_gradients_of_plain_jax(axis: str) -> None:
    devices = np.array(jax.devices()[:8]).reshape(4, 2)
    options: dict[str, Any] = {"mesh": jax.sharding.Mesh(devices, ("stage", axis))}
    if axis == "model":
        spec = jax.sharding.PartitionSpec(None, None, "model")
        options["sharding"] = lambda path, _: (
            spec if path[-2:] == ("Dense_0", "kernel") and "layers" in path else None
        )
    pipe = build(8, **options)
    state = pipe.init_train_state(KEY, X, TX)
    variables = on_host(state.variables)
    grads = pipe.value_and_grad(mean_square)(state.variables, X, TARGETS)
    ref.assert_close(on_host(grads), plain_gradient(8, variables), ref.FLOAT64)
    step = pipe.train_step(mean_square, TX)
    state, metrics = step(state, X, TARGETS)
    ref.assert_close(metrics["loss"], grads[0], ref.FLOAT64)


# -------------------------------------------------------------- what the user reads


def test_printed_stages_say_which_layers_they_run() -> None:
    names = trained()[0].plan.layer_names
    assert names == [
        ["Dense_0", "layer 0"],
        ["layers 1-2"],
        ["layers 3-4"],
        ["layers 5-6", "Dense_1"],
    ]

    class Inside(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return ScannedMLP(8, name="decoder")(x)

    pipe = jpipe.pipeline(Inside(), 2, num_stages=4)
    pipe.init(KEY, X)
    assert "layers 2-3 of decoder" in str(pipe)


@functools.cache
def trained() -> tuple[jpipe.Pipeline, Any, Any]:
    """Seven layers in four stages after a step: on the host, and after the next one."""
    pipe = build(7)
    state = pipe.init_train_state(KEY, X, TX)
    step = pipe.train_step(mean_square, TX, donate=False)
    state, _ = step(state, X, TARGETS)
    after, _ = step(state, X, TARGETS)
    return pipe, state, on_host(after.params)


@pytest.mark.parametrize("stages", [slow(1), slow(2), 3])
def test_a_checkpoint_goes_on_in_other_stages(stages: int, tmp_path: Any) -> None:
    _, state, expected = trained()
    jpipe.checkpoint.save(tmp_path / "state", state)
    if stages == 1:
        pipe = jpipe.sequential(ScannedMLP(7), 2)
    else:
        pipe = build(7, num_stages=stages)
    like = pipe.init_train_state(jax.random.key(1), X, TX)
    restored = jpipe.checkpoint.restore(tmp_path / "state", like)
    after, _ = pipe.train_step(mean_square, TX)(restored, X, TARGETS)
    ref.assert_close(on_host(after.params), expected, ref.FLOAT64)


def test_a_state_of_other_stages_is_placed() -> None:
    _, state, expected = trained()
    pipe = build(7, num_stages=2)
    pipe.init(KEY, X)
    step = pipe.train_step(mean_square, TX, donate=False)
    after, _ = step(pipe.place(state), X, TARGETS)
    ref.assert_close(on_host(after.params), expected, ref.FLOAT64)


class Trained(NamedTuple):
    """A state in pieces after a step, and the parameters after the next one."""

    pipe: jpipe.Pipeline
    model: nn.Module
    state: jpipe.TrainState
    next_params: Any


@functools.cache
def trained_in(pieces: str) -> Trained:
    """In uneven pieces, or in even ones of two devices each."""
    if pieces == "uneven":
        pipe, state, next_params = trained()
        return Trained(pipe, ScannedMLP(7), state, next_params)
    mesh = jax.make_mesh((2, 2), ("stage", "data"), devices=jax.devices()[:4])
    pipe = jpipe.pipeline(ScannedMLP(4), 2, mesh=mesh)
    state = pipe.init_train_state(KEY, X, TX)
    step = pipe.train_step(mean_square, TX, donate=False)
    state, _ = step(state, X, TARGETS)
    after, _ = step(state, X, TARGETS)
    return Trained(pipe, ScannedMLP(4), state, on_host(after.params))


in_pieces = pytest.mark.parametrize("pieces", ["uneven", "mesh"])


@in_pieces
def test_a_state_in_pieces_goes_to_one_device_and_back(pieces: str) -> None:
    pipe, model, state, next_params = trained_in(pieces)
    kinds = {type(leaf) for leaf in jax.tree.leaves((state.params, state.opt_state))}
    assert jpipe.Stacked in kinds

    one = jpipe.sequential(model, 2)
    placed = one.place(state, X)
    for leaf in jax.tree.leaves(placed):
        assert leaf.devices() == {jax.devices()[0]}
    ref.assert_equal(placed, state)
    ref.assert_equal(pipe.place(placed), state)
    taken = one.init_train_state(KEY, X, TX, variables=state.variables)
    ref.assert_equal(taken.variables, state.variables)

    after, _ = one.train_step(mean_square, TX, donate=False)(placed, X, TARGETS)
    ref.assert_close(on_host(after.params), next_params, ref.FLOAT64)


@in_pieces
def test_flax_saves_and_runs_what_was_trained(pieces: str) -> None:
    pipe, model, state, _ = trained_in(pieces)
    y = np.asarray(pipe.apply(state.variables, X))
    host_variables = jax.device_get(state.variables)
    ref.assert_close(y, model.apply(host_variables, X), ref.FLOAT64)
    ref.assert_close(y, pipe.modules(host_variables)(X), ref.FLOAT64)

    data = serialization.to_bytes(state)
    one = jpipe.sequential(model, 2)
    for twin, like in ((pipe, state), (one, one.place(state, X))):
        restored = serialization.from_bytes(like, data)
        ref.assert_equal(twin.place(restored, X), state)


@in_pieces
def test_loops_and_averages_of_ones_own_take_parameters_in_pieces(pieces: str) -> None:
    pipe, _, state, _ = trained_in(pieces)
    average = pipe.jit(lambda params: params)(state.params)
    follow = pipe.jit(
        lambda average, params: optax.incremental_update(params, average, 0.1),
        donate_argnums=0,
    )
    apply_updates = pipe.jit(optax.apply_updates)
    gradient = pipe.value_and_grad(mean_square)
    optimizer = pipe.optimizer(TX)
    params, opt_state = state.params, optimizer.init(state.params)
    host_params, host_state = on_host(params), TX.init(on_host(params))
    host_average = host_params
    for _ in range(2):
        _, grads = gradient({"params": params}, X, TARGETS)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = apply_updates(params, updates)
        average = follow(average, params)

        updates, host_state = TX.update(on_host(grads), host_state, host_params)
        host_params = optax.apply_updates(host_params, updates)
        host_average = optax.incremental_update(host_params, host_average, 0.1)
    ref.assert_close(on_host(params), on_host(host_params), ref.FLOAT64)
    ref.assert_close(on_host(average), on_host(host_average), ref.FLOAT64)


@pytest.mark.parametrize(
    "function",
    [
        lambda params: jax.tree.map(jnp.copy, params),
        lambda params: jax.tree.map(lambda leaf: leaf.copy(), params),
        lambda params: optax.apply_updates(params, params),
        optax.tree.norm,
        jax.jit(optax.tree.norm),
        lambda params: jax.device_put(params, jax.devices()[0]),
    ],
    ids=["copy", "method", "apply_updates", "norm", "jit", "put"],
)
def test_what_takes_no_leaf_in_pieces_says_what_to_type(function: Any) -> None:
    params = trained()[1].params
    says = r"Stacked\(float64\[7,.* lies on several devices; .* pipe\.jit\(f\)\(tree\)"
    with pytest.raises((TypeError, ValueError, AttributeError), match=says):
        function(params)


def test_check_and_profile_take_variables_in_pieces() -> None:
    pipe, state, _ = trained()
    step = pipe.train_step(mean_square, optax.sgd(0.1))
    assert step.check(state, X, TARGETS)
    measured = step.profile(state, jnp.asarray(X), jnp.asarray(TARGETS))
    assert pipe.schedule.simulate(measured.costs).makespan > 0


def test_frozen_layers_have_no_gradient() -> None:
    pipe = build(7)
    variables = pipe.init(KEY, X)
    find = pipe.value_and_grad(mean_square, trainable="Dense_*")
    value, grads = find(variables, X, TARGETS)
    expected_value, expected = plain_gradient(7, on_host(variables))
    assert set(jax.tree.leaves(grads["layers"])) == set()
    del grads["layers"], expected["layers"]
    found = value, on_host(grads)
    ref.assert_close(found, (expected_value, expected), ref.FLOAT64)


# -------------------------------------------------------------------------- refusals


class NormedLayer(nn.Module):
    train: bool

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> Any:
        h = BatchNorm(use_running_average=not self.train)(x)
        return x + Dense(WIDTH)(h), None


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        scanned = nn.scan(
            NormedLayer,
            variable_axes={"params": 0, "batch_stats": 0},
            split_rngs={"params": True},
            length=4,
        )
        x, _ = scanned(train, name="layers")(Dense(WIDTH)(x), None)
        return Dense(3)(x)


def test_batch_norms_in_a_scan_are_evaluated_and_not_trained() -> None:
    pipe = jpipe.pipeline(Normed(), 2, num_stages=2)
    variables = pipe.init(KEY, X)
    y = np.asarray(pipe.apply(variables, X))
    ref.assert_close(y, Normed().apply(on_host(variables), X), ref.FLOAT64)
    with pytest.raises(ValueError, match=r"in a loop such as nn\.scan: a second call"):
        pipe.value_and_grad(mean_square)(variables, X, TARGETS)


class Sorted(nn.Module):
    """A model that sorts a parameter over all layers."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.param("kernel", nn.initializers.normal(1.0, float), (4, 6, 6))

        def layer(x: jax.Array, kernel: jax.Array) -> Any:
            return jnp.tanh(x @ kernel), None

        x, _ = jax.lax.scan(layer, x, kernel)
        return Dense(3)(x) + jax.lax.sort(kernel, 0).mean()


def test_a_model_that_reads_a_whole_stack_is_refused_with_the_line() -> None:
    says = (
        r"(?s)a parameter that a scan goes along is in pieces.*"
        + re.escape("variables['params']['kernel']: sort of Sorted")
        + r".*test_layer_scans\.py:\d+ .*reads all of it, 1\.1 KiB"
    )
    with pytest.raises(ValueError, match=says):
        jpipe.pipeline(Sorted(), 2, num_stages=4).init(KEY, X)
