"""Scans over stacked layers are divided between iterations.

Loss and every gradient are those of plain JAX in float64, whatever reads the stacked
parameters; no device holds a whole stack, and the tree is the user's own.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import jpipe
from jpipe._api._function_gradient import FunctionGradient
from jpipe._jaxprs import _jaxpr

from .. import reference as ref
from ..listing import program_of
from ..slow import slow, slow_except

pytestmark = pytest.mark.usefixtures("double")

LAYERS, WIDTH, BATCH, STAGES = 8, 6, 8, 4
KEY = jax.random.key(0)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def stack(num_layers: int = LAYERS) -> dict[str, np.ndarray]:
    return {
        "bias": normal(2, num_layers, WIDTH) / 9,
        "kernel": normal(1, num_layers, WIDTH, WIDTH) / 4,
    }


X = normal(3, BATCH, WIDTH)


def layer(h: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
    return h + jnp.tanh(h @ w["kernel"] + w["bias"]), None


def layers(w: Any, h: jax.Array, **options: Any) -> jax.Array:
    return jax.lax.scan(layer, h, w, **options)[0]


def mean_square(x: jax.Array) -> jax.Array:
    return jnp.mean(x**2)


# ------------------------------------------------------------------- forms of programs


def several_results(w: Any, x: jax.Array) -> jax.Array:
    """Results of all layers, weighted, indexed, and averaged."""

    def turn(h: jax.Array, w: Any) -> Any:
        new = layer(h, w)[0]
        return new, (new, jnp.mean(h @ w["kernel"]))

    h, (activations, losses) = jax.lax.scan(turn, x, w)
    weights = jnp.arange(1.0, 1 + losses.shape[0])
    total = mean_square(h) + 0.1 * jnp.sum(losses * weights) + losses[3]
    indexed = jnp.mean(activations[2] * activations[-1])
    return total + indexed + mean_square(activations.mean(0))


def weight_norm(w: Any, x: jax.Array) -> jax.Array:
    norms = jnp.linalg.norm(w["kernel"], axis=1, keepdims=True)
    kernel = w["kernel"] / norms * w["scale"][:, None, :]
    return mean_square(layers({"kernel": kernel, "bias": w["bias"]}, x))


def norms_of_all(w: Any, x: jax.Array) -> jax.Array:
    squares = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(w))
    centred = w["kernel"] - w["kernel"].mean(0)
    h = layers({**w, "kernel": centred}, x / jnp.sqrt(squares))
    return mean_square(h) + 1e-3 * squares


def shared_and_tuple_carry(w: Any, x: jax.Array) -> jax.Array:
    def turn(carry: Any, of_layer: Any) -> Any:
        h, decay, count = carry
        h = layer(h, of_layer)[0] + jnp.tanh(h @ w["shared"]) * decay.mean()
        return (h, decay * 0.9, count + 1), None

    init = x, jnp.ones(3), 0
    (h, decay, count), _ = jax.lax.scan(turn, init, w["layers"])
    return mean_square(h) * decay.sum() + 0.0 * count


def rates(w: Any, x: jax.Array) -> jax.Array:
    def turn(h: jax.Array, xs: Any) -> Any:
        of_layer, rate = xs
        return layer(h, of_layer)[0] * (1 - rate), None

    return mean_square(jax.lax.scan(turn, x, (w, jnp.linspace(0, 0.2, LAYERS)))[0])


def rematerialized(policy: Any, w: Any, x: jax.Array) -> jax.Array:
    turn = jax.checkpoint(layer, policy=policy, prevent_cse=False)
    return mean_square(jax.lax.scan(turn, x, w)[0])


def encoder_and_decoder(w: Any, x: jax.Array) -> jax.Array:
    encoded = layers(w["encoder"], x)

    def turn(h: jax.Array, of_layer: Any) -> Any:
        return layer(h, of_layer)[0] + jnp.tanh(encoded @ of_layer["cross"]), None

    return mean_square(jax.lax.scan(turn, x * 2, w["decoder"])[0])


def blocks_of_layers(w: Any, x: jax.Array) -> jax.Array:
    w = jax.tree.map(lambda leaf: leaf.reshape(4, 2, *leaf.shape[1:]), w)
    block = jax.checkpoint(lambda h, of_block: (layers(of_block, h), None))
    return mean_square(jax.lax.scan(block, x, w)[0])


def on_axis_one(w: Any, x: jax.Array) -> jax.Array:
    return mean_square(layers(jax.tree.map(lambda v: jnp.moveaxis(v, 1, 0), w), x))


def along_axis_one() -> Any:
    return jax.tree.map(lambda leaf: np.moveaxis(leaf, 0, 1), stack())


def with_head(w: Any, x: jax.Array) -> jax.Array:
    h = layers(w["layers"], x @ w["embedding"])
    return jnp.mean(jax.nn.logsumexp(h @ w["head"], -1))


def cast(w: Any, x: jax.Array) -> jax.Array:
    return mean_square(layers(jax.tree.map(lambda v: (v * 2).astype(float), w), x))


FORMS: dict[str, tuple[Callable[..., Any], Callable[[], Any]]] = {
    "scan": (lambda w, x: mean_square(layers(w, x)), stack),
    "seven_layers": (lambda w, x: mean_square(layers(w, x)), lambda: stack(7)),
    "along_axis_one": (on_axis_one, along_axis_one),
    "several_results": (several_results, stack),
    "encoder_and_decoder": (
        encoder_and_decoder,
        lambda: {
            "encoder": stack(),
            "decoder": {**stack(4), "cross": normal(8, 4, WIDTH, WIDTH) / 4},
        },
    ),
    "with_head": (
        with_head,
        lambda: {
            "layers": stack(),
            "embedding": normal(5, WIDTH, WIDTH),
            "head": normal(6, WIDTH, 40),
        },
    ),
    "norms_of_all": (norms_of_all, stack),
}
MORE_FORMS: dict[str, tuple[Callable[..., Any], Callable[[], Any]]] = {
    "reversed": (lambda w, x: mean_square(layers(w, x, reverse=True)), stack),
    "unrolled": (lambda w, x: mean_square(layers(w, x, unroll=4)), stack),
    "cast": (cast, stack),
    "weight_norm": (
        weight_norm,
        lambda: {**stack(), "scale": normal(9, LAYERS, WIDTH)},
    ),
    "read_by_index": (lambda w, x: mean_square(layers(w, x) @ w["kernel"][2]), stack),
    "shared_and_tuple_carry": (
        shared_and_tuple_carry,
        lambda: {"layers": stack(), "shared": normal(7, WIDTH, WIDTH) / 4},
    ),
    "rates": (rates, stack),
    "remat": (functools.partial(rematerialized, None), stack),
    "remat_of_products": (
        functools.partial(rematerialized, jax.checkpoint_policies.dots_saveable),
        stack,
    ),
    "remat_around": (lambda w, x: mean_square(jax.checkpoint(layers)(w, x)), stack),
    "jitted": (lambda w, x: mean_square(jax.jit(layers)(w, x)), stack),
    "scanned_twice": (lambda w, x: mean_square(layers(w, layers(w, x))), stack),
    "blocks_of_layers": (blocks_of_layers, stack),
}


def assert_equals_plain_jax(
    loss: Callable[..., Any], params: Any, x: np.ndarray, **options: Any
) -> FunctionGradient:
    options = {"num_microbatches": 2, "num_stages": STAGES} | options
    grad_fn = jpipe.value_and_grad(loss, **options)
    placed = grad_fn.place(params, x)
    found = grad_fn(placed, x)
    expected = jax.jit(jax.value_and_grad(loss))(params, x)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    as_numpy = jax.tree.map(np.asarray, found)
    ref.assert_close(as_numpy, jax.tree.map(np.asarray, expected), ref.FLOAT64)
    for leaf, param in zip(
        jax.tree.leaves(placed), jax.tree.leaves(params), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(leaf), param)
    return grad_fn


def largest_bytes(grad_fn: Any, params: Any, x: np.ndarray) -> int:
    """The largest array on a device of a program."""
    program = program_of(grad_fn, params, x)
    return max(
        num_bytes
        for num_bytes, place in zip(program.nbytes, program.places, strict=True)
        if place >= 0
    )


QUICK = {
    "seven_layers",
    "along_axis_one",
    "several_results",
    "encoder_and_decoder",
    "norms_of_all",
}


@pytest.mark.parametrize("name", slow_except(QUICK, FORMS))
def test_programs_that_scan_over_layers(name: str) -> None:
    loss, params = FORMS[name]
    grad_fn = assert_equals_plain_jax(loss, params(), X)
    assert largest_bytes(grad_fn, params(), X) < 8 * LAYERS * WIDTH * WIDTH


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_FORMS)
def test_more_programs_that_scan_over_layers(name: str) -> None:
    loss, params = MORE_FORMS[name]
    grad_fn = assert_equals_plain_jax(loss, params(), X)
    assert largest_bytes(grad_fn, params(), X) < 8 * LAYERS * WIDTH * WIDTH


OPTIONS = {
    "interleaved": {
        "num_microbatches": 4,
        "num_stages": 8,
        "schedule": "interleaved",
        "devices": 4,
    },
    "zb_h1": {"num_microbatches": 4, "schedule": "zb_h1"},
    "three_sizes": {"num_microbatches": 3},
    "full": {"remat": "full"},
    "v_half": {"num_stages": 8, "schedule": "v_half", "devices": 4},
    "replicas": {"num_stages": 3, "replicas": [2, 1, 1], "num_microbatches": 4},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_scans_under_other_options(name: str) -> None:
    options = dict(OPTIONS[name])
    if "devices" in options:
        options["devices"] = jax.devices()[: options["devices"]]
    loss, params = FORMS["scan"]
    assert_equals_plain_jax(loss, params(), X, **options)


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["data", "model"])
def test_scans_on_meshes(axis: str) -> None:
    devices = np.array(jax.devices()[:8]).reshape(4, 2)
    options: dict[str, Any] = {"mesh": jax.sharding.Mesh(devices, ("stage", axis))}
    if axis == "model":
        spec = jax.sharding.PartitionSpec(None, None, "model")
        options["sharding"] = lambda path, _: spec if path == ("kernel",) else None
    loss, params = FORMS["scan"]
    assert_equals_plain_jax(loss, params(), X, **options)


def test_a_small_scan_stays_whole_so_that_its_parameter_may_be_read_whole() -> None:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(lambda h, w: (h + w, None), x, params["offsets"])
        smallest = jnp.sort(params["offsets"], axis=0)[0]
        return mean_square(layers(params["layers"], x) * smallest)

    params = {"layers": stack(), "offsets": normal(5, 2, WIDTH)}
    grad_fn = jpipe.value_and_grad(loss, 2, num_stages=STAGES)
    found = grad_fn(grad_fn.place(params, X), X)
    ref.assert_close(found, jax.value_and_grad(loss)(params, X), ref.FLOAT64)


def test_loops_over_time_are_stages_of_their_own() -> None:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        for w in params:
            x, _ = jax.lax.scan(
                lambda h, _, w=w: (jnp.tanh(h @ w), None), x, None, length=20
            )
        return mean_square(x)

    params = list(stack(STAGES)["kernel"])
    grad_fn = jpipe.value_and_grad(loss, 2, num_stages=STAGES)
    found = grad_fn(grad_fn.place(params, X), X)
    ref.assert_close(found, jax.value_and_grad(loss)(params, X), ref.FLOAT64)
    works = [stage.work for stage in grad_fn.plan.stages]
    assert works == pytest.approx([1 / STAGES] * STAGES, rel=0.05)


def test_a_scan_in_a_custom_vjp_is_refused() -> None:
    @jax.custom_vjp
    def run(w: Any, x: jax.Array) -> jax.Array:
        return layers(w, x)

    run.defvjp(
        lambda w, x: jax.vjp(layers, w, x),
        lambda pullback, cotangent: pullback(cotangent),
    )
    grad_fn = jpipe.value_and_grad(
        lambda w, x: mean_square(run(w, x)), 2, num_stages=STAGES
    )
    with pytest.raises(
        ValueError, match=r"one operation, custom_vjp.*cannot be divided"
    ):
        grad_fn.place(stack(), X)


class Block(nn.Module):
    """A layer with dropout and a number that is returned."""

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> Any:
        h = nn.LayerNorm(param_dtype=float)(x) * mask
        h = nn.gelu(nn.Dense(2 * WIDTH, param_dtype=float)(h))
        h = nn.Dropout(0.2, deterministic=False)(h)
        return x + nn.Dense(WIDTH, param_dtype=float)(h), jnp.mean(x)


class Model(nn.Module):
    """Blocks scanned as Flax does, their parameters stacked on an axis."""

    axis: int

    @nn.compact
    def __call__(self, x: jax.Array) -> Any:
        blocks = nn.scan(
            nn.remat(Block),
            variable_axes={"params": self.axis},
            split_rngs={"params": True, "dropout": True},
            in_axes=nn.broadcast,
            length=LAYERS,
        )
        x = nn.Dense(WIDTH, param_dtype=float)(x)
        x, means = blocks()(x, jnp.ones(WIDTH))
        return nn.Dense(3, param_dtype=float)(x), means


@pytest.mark.parametrize("axis", [slow(0), 1])
def test_scans_of_flax_with_dropout(axis: int) -> None:
    model = Model(axis)
    rngs = {"params": KEY, "dropout": KEY}
    params = jax.device_get(model.init(rngs, X)["params"])

    def loss(params: Any, x: jax.Array, key: jax.Array) -> jax.Array:
        y, means = model.apply({"params": params}, x, rngs={"dropout": key})
        return mean_square(y) + 0.1 * jnp.sum(means)

    def plain(params: Any) -> jax.Array:
        halves = [
            loss(params, X[4 * m : 4 * m + 4], jpipe.microbatch_key(KEY, m))
            for m in range(2)
        ]
        return sum(halves) / 2

    grad_fn = jpipe.value_and_grad(loss, 2, num_stages=STAGES)
    placed = grad_fn.place(params, X, KEY)
    found = jax.tree.map(np.asarray, grad_fn(placed, X, KEY))
    ref.assert_close(found, jax.value_and_grad(plain)(params), ref.FLOAT64)
    stages = grad_fn._pipelined_function.last_specialization.stages
    assert stages.structural_key(1, 0) == stages.structural_key(2, 0)


# --------------------------------------------------------------- what the user sees


def test_equal_pieces_are_one_sharded_array() -> None:
    loss, params = FORMS["scan"]
    grad_fn = jpipe.value_and_grad(loss, 2, num_stages=STAGES)
    kernel = grad_fn.place(params(), X)["kernel"]
    assert isinstance(kernel, jax.Array)
    assert len(kernel.devices()) == STAGES
    shapes = {shard.data.shape for shard in kernel.addressable_shards}
    assert shapes == {(LAYERS // STAGES, WIDTH, WIDTH)}


def test_unequal_pieces_are_a_stacked_leaf() -> None:
    loss, params = FORMS["seven_layers"]
    grad_fn = jpipe.value_and_grad(loss, 2, num_stages=STAGES)
    kernel = grad_fn.place(params(), X)["kernel"]
    assert isinstance(kernel, jpipe.Stacked)
    assert kernel.shape == (7, WIDTH, WIDTH)
    assert kernel.dtype == float
    assert (kernel.ndim, kernel.size) == (3, 7 * WIDTH**2)
    assert kernel.nbytes == 8 * kernel.size
    assert len(kernel.devices()) == STAGES
    assert not kernel.block_until_ready().is_deleted()
    np.testing.assert_array_equal(kernel[3], params()["kernel"][3])
    assert repr(kernel).startswith("Stacked(float64[7,6,6], axis 0 in pieces of ")
    for compute in (
        lambda: kernel * 2,
        lambda: 1 - kernel,
        lambda: -kernel,
        lambda: jnp.sum(kernel),
    ):
        with pytest.raises(
            (TypeError, ValueError),
            match=r"grad_fn\.jit\(f\)\(tree\), .* or on the host",
        ):
            compute()


@pytest.mark.slow
def test_other_batch_sizes_have_the_same_pieces() -> None:
    loss, params = FORMS["seven_layers"]
    grad_fn = jpipe.value_and_grad(loss, 2, num_stages=STAGES)
    placed = grad_fn.place(params(), X)
    x = X[:4]
    found = jax.tree.map(np.asarray, grad_fn(placed, x))
    ref.assert_close(found, jax.value_and_grad(loss)(params(), x), ref.FLOAT64)


@pytest.mark.slow
def test_parameters_placed_for_other_stages_are_placed_again() -> None:
    loss, params = FORMS["scan"]
    four = jpipe.value_and_grad(loss, 2, num_stages=4)
    two = jpipe.value_and_grad(loss, 2, num_stages=2)
    placed = two.place(four.place(params(), X), X)
    found = jax.tree.map(np.asarray, two(placed, X))
    ref.assert_close(found, jax.value_and_grad(loss)(params(), X), ref.FLOAT64)


@pytest.mark.slow
def test_a_plan_has_the_pieces() -> None:
    loss, params = FORMS["seven_layers"]
    grad_fn = jpipe.value_and_grad(loss, 2, num_stages=STAGES)
    grad_fn.place(params(), X)
    plan = jpipe.Plan.from_json(grad_fn.plan.to_json())
    planned = jpipe.value_and_grad(loss, plan=plan)
    placed = planned.place(params(), X)
    assert placed["kernel"].pieces == grad_fn.place(params(), X)["kernel"].pieces
    found = jax.tree.map(np.asarray, planned(placed, X))
    ref.assert_close(found, jax.value_and_grad(loss)(params(), X), ref.FLOAT64)


@pytest.mark.slow
@pytest.mark.parametrize(("saved_by", "restored_by"), [(7, 4), (4, 7), (4, 2)])
def test_checkpoints_go_on_in_other_pieces(
    saved_by: int, restored_by: int, tmp_path: Any
) -> None:
    """Each number of stages has other pieces of seven layers."""
    loss, params = FORMS["seven_layers"]
    before = jpipe.value_and_grad(loss, 2, num_stages=saved_by)
    after = jpipe.value_and_grad(loss, 2, num_stages=restored_by)
    jpipe.checkpoint.save(tmp_path / "state", before.place(params(), X))
    zeros = jax.tree.map(np.zeros_like, params())
    restored = jpipe.checkpoint.restore(tmp_path / "state", after.place(zeros, X))
    found = jax.tree.map(np.asarray, after(restored, X))
    ref.assert_close(found, jax.value_and_grad(loss)(params(), X), ref.FLOAT64)


@pytest.mark.slow
def test_check_takes_parameters_in_pieces() -> None:
    loss, params = FORMS["seven_layers"]
    grad_fn = jpipe.value_and_grad(loss, 2, num_stages=STAGES)
    assert grad_fn.check(grad_fn.place(params(), X), X)


@pytest.mark.slow
def test_frozen_stacks_have_no_gradient() -> None:
    loss, params = FORMS["scan"]
    grad_fn = jpipe.value_and_grad(
        loss, 2, num_stages=STAGES, trainable=lambda path, _: path[-1] != "kernel"
    )
    value, grads = grad_fn(grad_fn.place(params(), X), X)
    expected_value, expected = jax.value_and_grad(loss)(params(), X)
    assert grads["kernel"] is None
    found = value, np.asarray(grads["bias"])
    ref.assert_close(found, (expected_value, expected["bias"]), ref.FLOAT64)


# ------------------------------------------------------------------------ optimizers

OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-2),
    "clip_by_global_norm": lambda: optax.chain(
        optax.clip_by_global_norm(0.1), optax.sgd(0.1, momentum=0.9)
    ),
    "lamb": lambda: optax.lamb(1e-2),
}
MORE_OPTIMIZERS = {
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=2),
    "adagrad": lambda: optax.adagrad(1e-2),
    "adaptive_grad_clip": lambda: optax.chain(
        optax.adaptive_grad_clip(0.1), optax.sgd(0.1)
    ),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(1e-2), 2),
    "clip_by_block_rms": lambda: optax.chain(
        optax.clip_by_block_rms(0.01), optax.sgd(0.1)
    ),
    "decayed_by_mask": lambda: optax.adamw(
        1e-2, mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 2, params)
    ),
    "lars": lambda: optax.lars(1e-2),
    "lion": lambda: optax.lion(1e-3),
    "moving_average": lambda: optax.chain(optax.sgd(0.1), optax.ema(0.9)),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
    "muon": lambda: optax.contrib.muon(1e-2),
    "nadam": lambda: optax.nadam(1e-2),
    "rmsprop": lambda: optax.rmsprop(1e-2, momentum=0.9),
    "schedule_free": lambda: optax.contrib.schedule_free_sgd(1e-2),
    "sgd": lambda: optax.sgd(0.1),
    "sm3": lambda: optax.sm3(1e-2),
    "yogi": lambda: optax.yogi(1e-2),
}


def assert_trains_like_optax(name: str, num_layers: int) -> None:
    tx = {**OPTIMIZERS, **MORE_OPTIMIZERS}[name]()
    loss, _ = FORMS["scan"]
    plain_params: Any = stack(num_layers)
    plain_state = tx.init(plain_params)
    grad_fn = jpipe.value_and_grad(loss, 2, num_stages=STAGES)
    optimizer = grad_fn.optimizer(tx)
    apply_updates = grad_fn.jit(optax.apply_updates)
    params = grad_fn.place(plain_params, X)
    state = optimizer.init(params)
    update = jax.jit(tx.update)
    for _ in range(3):
        _, grads = grad_fn(params, X)
        updates, state = optimizer.update(grads, state, params)
        params = apply_updates(params, updates)
        _, plain_grads = jax.value_and_grad(loss)(plain_params, X)
        plain_updates, plain_state = update(plain_grads, plain_state, plain_params)
        plain_params = optax.apply_updates(plain_params, plain_updates)
    assert jax.tree.structure(state) == jax.tree.structure(plain_state)
    trained = jax.tree.map(np.asarray, (params, state))
    expected = jax.tree.map(np.asarray, (plain_params, plain_state))
    # Roots and quotients of small gradients, three times.
    for x, y in zip(jax.tree.leaves(trained), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    "name", slow_except({"clip_by_global_norm", "lamb"}, OPTIMIZERS)
)
def test_optimizers_see_whole_parameters(name: str) -> None:
    assert_trains_like_optax(name, num_layers=7)


@pytest.mark.slow
@pytest.mark.parametrize("num_layers", [7, 8])
@pytest.mark.parametrize("name", MORE_OPTIMIZERS)
def test_more_optimizers_see_whole_parameters(name: str, num_layers: int) -> None:
    assert_trains_like_optax(name, num_layers)


def test_a_last_activation_that_nobody_reads_leaves_stages_equal() -> None:
    """Fewer bytes cross behind the last layers than before them."""

    def loss(w: Any, x: jax.Array) -> jax.Array:
        def turn(h: jax.Array, of_layer: Any) -> Any:
            return layer(h, of_layer)[0], mean_square(h @ of_layer["kernel"])

        return jax.lax.scan(turn, x, w)[1].sum()

    grad_fn = assert_equals_plain_jax(loss, stack(), X)
    assert [stage.work for stage in grad_fn.plan.stages] == pytest.approx(
        [0.25] * 4, rel=0.01
    )


# -------------------------------------------------------------------------- refusals


def test_readers_of_a_whole_stack_are_refused_with_their_line() -> None:
    def loss(w: Any, x: jax.Array) -> jax.Array:
        return mean_square(layers(w, x)) + jax.lax.sort(w["kernel"], 0).sum()

    grad_fn = jpipe.value_and_grad(loss, 2, num_stages=STAGES)
    says = (
        r"(?s)a parameter that a scan goes along is in pieces.*"
        r"params\['kernel'\]: sort, at \S*test_layer_scans\.py:\d+ \(\S*loss\), "
        r"reads all of it, 2\.2 KiB"
    )
    with pytest.raises(ValueError, match=says):
        grad_fn.place(stack(), X)
    one_stage = jpipe.value_and_grad(loss, 2, num_stages=1)
    found = one_stage(one_stage.place(stack(), X), X)
    ref.assert_close(found, jax.value_and_grad(loss)(stack(), X), ref.FLOAT64)


def test_a_scan_over_time_stays_whole() -> None:
    def loss(w: Any, x: jax.Array) -> jax.Array:
        for of_layer in w:

            def turn(h: jax.Array, row: jax.Array, w: Any = of_layer) -> Any:
                h = layer(h + row, w)[0]
                return h, h

            _, x = jax.lax.scan(turn, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))
            x = x.swapaxes(0, 1)
        return mean_square(x)

    params = [jax.tree.map(lambda leaf, i=i: leaf[i], stack()) for i in range(4)]
    x = normal(4, BATCH, 5, WIDTH)
    grad_fn = assert_equals_plain_jax(loss, params, x)
    stages = grad_fn._pipelined_function.last_specialization.stages
    scans = [
        eqn
        for stage in range(STAGES)
        for eqn in _jaxpr.equations(stages.slice_of(stage).closed)
        if eqn.primitive.name == "scan"
    ]
    assert [eqn.params["length"] for eqn in scans] == [5] * 4


def test_scans_are_divided_anywhere_though_results_of_all_layers_cross() -> None:
    """From layer to layer more bytes cross, and none has fewer than its neighbors."""
    num_layers = 32
    grad_fn = assert_equals_plain_jax(several_results, stack(num_layers), X)
    kernel = grad_fn.place(stack(num_layers), X)["kernel"]
    assert {shard.data.shape[0] for shard in kernel.addressable_shards} == {8}
