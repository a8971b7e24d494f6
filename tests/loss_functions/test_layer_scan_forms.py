"""Forms in which programs scan over layers: stacks made inside, counters, remainders.

As in `test_layer_scans`, loss and every gradient are those of plain JAX in float64, and
no device holds all layers.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jpipe
from jpipe._instructions._program import Program
from jpipe._jaxprs import _jaxpr
from jpipe._placed import _jit

from .. import reference as ref
from ..slow import slow_except
from .test_layer_scans import (
    KEY,
    LAYERS,
    STAGES,
    WIDTH,
    assert_equals_plain_jax,
    largest_bytes,
    layer,
    layers,
    mean_square,
    normal,
    stack,
)

pytestmark = pytest.mark.usefixtures("double")

# So many examples that a counter is few bytes beside them.
X = normal(3, 40, WIDTH)


def scans_of_stages(grad_fn: Any) -> list[list[int]]:
    """The iterations of the scans of each stage."""
    stages = grad_fn._pipelined_function.last_specialization.stages
    lengths = list[list[int]]()
    for stage in range(STAGES):
        eqns = _jaxpr.equations(stages.slice_of(stage).closed)
        scans = [eqn for eqn in eqns if eqn.primitive.name == "scan"]
        lengths.append([eqn.params["length"] for eqn in scans])
    return lengths


def assert_is_divided(
    loss: Callable[..., Any], params: Any, lengths: list[list[int]]
) -> Any:
    grad_fn = assert_equals_plain_jax(loss, params, X)
    assert scans_of_stages(grad_fn) == lengths
    all_layers = 8 * LAYERS * WIDTH * WIDTH
    assert largest_bytes(grad_fn, params, X) < all_layers
    return grad_fn


# ------------------------------------------------ stacks that the function makes itself


def blocks(num_layers: int = LAYERS) -> dict[str, Any]:
    """The parameters of each layer by themselves."""
    w = stack(num_layers)
    return {
        f"layer{i}": jax.tree.map(lambda leaf, i=i: leaf[i], w)
        for i in range(num_layers)
    }


def in_order(w: dict[str, Any]) -> list[Any]:
    return [w[f"layer{i}"] for i in range(len(w))]


def stacked_inside(w: Any, x: jax.Array) -> jax.Array:
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *in_order(w))
    return mean_square(layers(stacked, x))


def concatenated_inside(w: Any, x: jax.Array) -> jax.Array:
    """Behind a cast, as in mixed precision, and along another axis."""

    def join(*leaves: jax.Array) -> jax.Array:
        expanded = [(2 * leaf).astype(float)[:, None] for leaf in leaves]
        return jnp.moveaxis(jnp.concatenate(expanded, axis=1), 1, 0)

    return mean_square(layers(jax.tree.map(join, *in_order(w)), x))


def two_layers_and_a_remainder(w: Any, x: jax.Array) -> jax.Array:
    """Each turn runs two layers; its results are indexed; the last layer runs after."""

    def turn(h: jax.Array, pair: Any) -> Any:
        h = layer(layer(h, pair[0])[0], pair[1])[0]
        return h, h.mean(1)

    *scanned, last = in_order(w)
    pairs = zip(scanned[::2], scanned[1::2], strict=True)
    xs = jax.tree.map(lambda *leaves: jnp.stack(leaves), *pairs)
    h, means = jax.lax.scan(turn, x, xs)
    return mean_square(layer(h, last)[0]) + jnp.mean(means[1] ** 2 + means.sum(0))


MADE = {
    "stacked": (stacked_inside, blocks, [[2]] * STAGES),
    "seven_layers": (stacked_inside, lambda: blocks(7), [[2], [2], [2], [1]]),
    "concatenated": (concatenated_inside, blocks, [[2]] * STAGES),
    "remainder": (two_layers_and_a_remainder, lambda: blocks(7), [[1], [1], [1], []]),
}


@pytest.mark.parametrize("name", slow_except({"seven_layers", "remainder"}, MADE))
def test_stacks_made_by_the_function(name: str) -> None:
    loss, params, lengths = MADE[name]
    grad_fn = assert_is_divided(loss, params(), lengths)
    placed = grad_fn.place(params(), X)
    owners = [min(d.id for d in leaf.devices()) for leaf in jax.tree.leaves(placed)]
    assert owners == sorted(owners)
    assert len(set(owners)) == STAGES


def test_a_stack_of_the_parameters_of_some_layers_beside_a_stacked_parameter() -> None:
    def loss(w: Any, x: jax.Array) -> jax.Array:
        return mean_square(layers({**w, "kernel": jnp.stack(w["kernel"])}, x))

    params = {"bias": stack()["bias"], "kernel": list(stack()["kernel"])}
    assert_is_divided(loss, params, [[2]] * STAGES)


def test_other_batch_sizes_and_plans_have_the_same_pieces() -> None:
    grad_fn = jpipe.value_and_grad(stacked_inside, 2, num_stages=STAGES)
    params = blocks(7)
    placed = grad_fn.place(params, X)
    lengths = scans_of_stages_after(grad_fn, placed, X)
    assert scans_of_stages_after(grad_fn, placed, X[:33]) == lengths
    plan = jpipe.Plan.from_json(grad_fn.plan.to_json())
    planned = jpipe.value_and_grad(stacked_inside, plan=plan)
    assert scans_of_stages_after(planned, planned.place(params, X), X) == lengths


def scans_of_stages_after(grad_fn: Any, placed: Any, x: np.ndarray) -> list[list[int]]:
    """The iterations of the scans of stages, after a call that is right."""
    found = jax.tree.map(np.asarray, grad_fn(placed, x))
    expected = jax.value_and_grad(stacked_inside)(jax.device_get(placed), x)
    ref.assert_close(found, jax.tree.map(np.asarray, expected), ref.FLOAT64)
    return scans_of_stages(grad_fn)


# ----------------------------------------------------------------------------- counters


def row(w: jax.Array, i: Any) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(w, i, keepdims=False)


def counted(w: Any, x: jax.Array) -> jax.Array:
    """A scan over numbers, whose carry is split at each, in a checkpoint."""

    @jax.checkpoint
    def turn(carry: Any, i: jax.Array) -> Any:
        h, key = carry
        key, dropout_key = jax.random.split(key)
        h = layer(h, jax.tree.map(lambda leaf: row(leaf, i), w))[0]
        return (h * jax.random.bernoulli(dropout_key, 0.9, (WIDTH,)), key), None

    (h, _), _ = jax.lax.scan(turn, (x, jax.random.key(3)), jnp.arange(LAYERS))
    return mean_square(h)


def fori(w: Any, x: jax.Array) -> jax.Array:
    def turn(i: jax.Array, h: jax.Array) -> jax.Array:
        return layer(h, jax.tree.map(lambda leaf: leaf[i], w))[0]

    return mean_square(jax.lax.fori_loop(0, LAYERS, turn, x))


def counted_stacks_made_inside(w: Any, x: jax.Array) -> jax.Array:
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *in_order(w))
    return fori(stacked, x)


COUNTED = {
    "counted": (counted, stack),
    "fori": (fori, stack),
    "counted_stacks_made_inside": (counted_stacks_made_inside, blocks),
}


@pytest.mark.parametrize(
    "name", slow_except({"counted", "counted_stacks_made_inside"}, COUNTED)
)
def test_stacks_indexed_by_a_counter(name: str) -> None:
    loss, params = COUNTED[name]
    assert_is_divided(loss, params(), [[2]] * STAGES)


def test_other_indices_are_refused() -> None:
    def loss(w: Any, x: jax.Array) -> jax.Array:
        def turn(i: jax.Array, h: jax.Array) -> jax.Array:
            return layer(h, jax.tree.map(lambda leaf: leaf[LAYERS - 1 - i], w))[0]

        return mean_square(jax.lax.fori_loop(0, LAYERS, turn, x))

    grad_fn = jpipe.value_and_grad(loss, 2, num_stages=STAGES)
    with pytest.raises(ValueError, match=r"one operation, fori_loop.*be divided"):
        grad_fn.place(stack(), X)


# ---------------------------------------------------------- operations before the scan


@jax.custom_vjp
def doubled_gradient(w: jax.Array) -> jax.Array:
    return jnp.sin(w)


doubled_gradient.defvjp(
    lambda w: (jnp.sin(w), jnp.cos(w)), lambda cos, g: (2 * cos * g,)
)


def fused(kernel: jax.Array) -> jax.Array:
    """Three matrices in one, as of queries, keys and values."""
    queries, keys, values = jnp.split(jnp.tile(kernel, 3) / 3, 3, axis=-1)
    return queries + keys * values


def arranged(kernel: jax.Array) -> jax.Array:
    """Columns of each layer, turned around, chosen, padded and set."""
    chosen = kernel[:, ::-1][:, jnp.array([2, 0, 1, 4, 5, 3])]
    padded = jnp.pad(chosen, ((0, 0), (1, 0), (0, 0)))[:, :WIDTH]
    return jax.lax.optimization_barrier(padded.at[:, 0].set(0.1))


def transformed(kernel: jax.Array) -> jax.Array:
    inverse = jnp.linalg.inv(kernel + 3 * jnp.eye(WIDTH))
    return jax.nn.log_softmax(inverse @ jnp.tril(kernel), -1)


def halves(kernel: jax.Array) -> jax.Array:
    return jnp.concatenate([2 * kernel[:4], jnp.sin(kernel[4:])])


BEFORE: dict[str, Callable[[jax.Array], jax.Array]] = {
    "softplus_and_relu": lambda w: jax.nn.softplus(w) - jax.nn.relu(w),
    "a_custom_vjp": doubled_gradient,
    "fused": fused,
    "arranged": arranged,
    "transformed": transformed,
    "halves": halves,
    "a_layer_is_taken": lambda w: w * jnp.take(w, 3, axis=0),
}


def scanned_after(
    operation: Callable[[jax.Array], jax.Array],
) -> Callable[[Any, jax.Array], jax.Array]:
    return lambda w, x: mean_square(layers({**w, "kernel": operation(w["kernel"])}, x))


@pytest.mark.parametrize("name", slow_except({"a_custom_vjp", "halves"}, BEFORE))
def test_operations_on_each_layer_before_the_scan(name: str) -> None:
    assert_is_divided(scanned_after(BEFORE[name]), stack(), [[2]] * STAGES)


@pytest.mark.parametrize("name", slow_except({"softplus_and_relu"}, BEFORE))
def test_operations_on_layers_in_uneven_pieces(name: str) -> None:
    lengths = [[2], [2], [2], [1]]
    loss = scanned_after(BEFORE[name])
    grad_fn = assert_equals_plain_jax(loss, stack(7), X)
    assert scans_of_stages(grad_fn) == lengths
    assert largest_bytes(grad_fn, stack(7), X) < 8 * 7 * WIDTH * WIDTH


def test_operations_on_layers_on_a_mesh() -> None:
    def loss(w: Any, x: jax.Array) -> jax.Array:
        return scanned_after(lambda k: halves(jax.nn.softplus(fused(k))))(w, x)

    devices = np.array(jax.devices()[:8]).reshape(4, 2)
    mesh = jax.sharding.Mesh(devices, ("stage", "data"))
    grad_fn = assert_equals_plain_jax(loss, stack(), X, mesh=mesh)
    assert scans_of_stages(grad_fn) == [[2]] * STAGES
    assert largest_bytes(grad_fn, stack(), X) < 8 * LAYERS * WIDTH * WIDTH


MIXED = {
    "sort": (lambda w: jnp.sort(w, 0), "sort", ""),
    "reversed": (lambda w: w[::-1], "rev", "with reverse=True, "),
    "roll": (lambda w: jnp.roll(w, 1, 0), "slice", ""),
    "take": (lambda w: jnp.take(w, jnp.arange(LAYERS) ^ 1, axis=0), "gather", ""),
    "set": (lambda w: w.at[0].set(1.0), "scatter", ""),
    "accumulated": (lambda w: jnp.cumsum(w, 0), "cumsum", ""),
}


@pytest.mark.parametrize("name", slow_except({"reversed", "take"}, MIXED))
def test_operations_that_mix_layers_are_named_with_their_line(name: str) -> None:
    operation, primitive, advice = MIXED[name]
    grad_fn = jpipe.value_and_grad(
        lambda w, x: mean_square(layers(jax.tree.map(operation, w), x)),
        2,
        num_stages=STAGES,
    )
    says = (
        rf"one operation, scan, .* cannot be divided, since {primitive}, at "
        rf"\S*test_layer_scan_forms.py:\d+ \(<lambda>\), moves or mixes the layers "
        rf"before; scan along the parameter itself, {advice}"
    )
    with pytest.raises(ValueError, match=says):
        grad_fn.place(stack(), X)


def test_stacks_that_are_accumulated_beside_others_are_refused() -> None:
    """XLA does not compile the gradient of a slice of them right, for one."""

    def loss(w: Any, x: jax.Array) -> jax.Array:
        bias = jnp.sin(jnp.cumsum(w["bias"], 0))
        return mean_square(layers({**w, "bias": bias}, x))

    grad_fn = jpipe.value_and_grad(loss, 2, num_stages=STAGES)
    says = r"params\['bias'\]: cumsum, at .*loss\), accumulates along the layers"
    with pytest.raises(ValueError, match=says):
        grad_fn.place(stack(), X)


# -------------------------------------------------------------------------- other forms


def scanned(w: Any, x: jax.Array) -> jax.Array:
    return mean_square(layers(w, x))


def couplings(w: Any, x: jax.Array) -> jax.Array:
    """Numbers of layers that choose a branch; log-determinants that are summed."""

    def turn(h: jax.Array, xs: Any) -> Any:
        of_layer, branch = xs
        h = layer(h, of_layer)[0] @ of_layer["coupling"]
        h = jax.lax.switch(branch, [jnp.sin, jnp.cos], h)
        return h, jnp.log(jnp.abs(of_layer["bias"]) + 1).sum()

    branches = jnp.arange(LAYERS) % 2
    h, logs = jax.lax.scan(turn, x, (w, branches), reverse=True)
    return mean_square(h) - logs.sum() / 9


def scans_in_scans(w: Any, x: jax.Array) -> jax.Array:
    """Layers on two axes, both scanned."""
    block = jax.checkpoint(lambda h, of_block: (layers(of_block, h), None))
    return mean_square(jax.lax.scan(block, x, w)[0])


def layers_and_blocks(w: Any, x: jax.Array) -> jax.Array:
    """One stack, scanned layer by layer, and in blocks of two."""
    return scans_in_scans(in_blocks(w), layers(w, x))


def blocks_and_layers(w: Any, x: jax.Array) -> jax.Array:
    block = jax.checkpoint(lambda h, of_block: (layers(of_block, h), None))
    return mean_square(layers(w, jax.lax.scan(block, x, in_blocks(w))[0]))


def in_blocks(w: Any) -> Any:
    return jax.tree.map(lambda v: v.reshape(4, 2, *v.shape[1:]), w)


def branch_on_parameters(w: Any, x: jax.Array) -> jax.Array:
    """A branch, and a loop, on whole stacks: they stay in pieces."""
    kernel = jax.lax.cond(
        w["bias"][0, 0] > 0, lambda w: w * 2, lambda w: jnp.sin(w), w["kernel"]
    )
    kernel = jax.lax.fori_loop(0, 3, lambda _, k: k - 0.1 * k @ k, kernel)
    return mean_square(layers({**w, "kernel": kernel}, x))


def weighted_norms(w: Any, x: jax.Array) -> jax.Array:
    """Penalties of all layers, with weights and masks that are constants."""
    norms = jnp.linalg.norm(w["bias"], axis=1)
    traces = jax.vmap(jnp.trace)(w["kernel"])
    return scanned(w, x) + norms @ jnp.arange(1.0, 1 + LAYERS) + traces.sum() / 9


FORMS = {
    "weighted_norms": (weighted_norms, stack, [[2]] * STAGES),
    "couplings": (
        couplings,
        lambda: {**stack(), "coupling": normal(4, LAYERS, WIDTH, WIDTH) / 4},
        [[2]] * STAGES,
    ),
    "branch_on_parameters": (branch_on_parameters, stack, None),
    "layers_and_blocks": (layers_and_blocks, stack, None),
    "blocks_and_layers": (blocks_and_layers, stack, None),
    "five_layers": (scanned, lambda: stack(5), [[2], [2], [1], []]),
    "scans_in_scans": (
        scans_in_scans,
        lambda: in_blocks(stack()),
        [[1, 2]] * STAGES,
    ),
}


@pytest.mark.parametrize("name", slow_except({*FORMS} - {"blocks_and_layers"}, FORMS))
def test_further_forms(name: str) -> None:
    loss, params, lengths = FORMS[name]
    if lengths is None:
        grad_fn = assert_equals_plain_jax(loss, params(), X)
        assert largest_bytes(grad_fn, params(), X) < 8 * LAYERS * WIDTH * WIDTH
    else:
        assert_is_divided(loss, params(), lengths)


def test_a_stack_that_is_scanned_along_two_axes_is_refused() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        def turn(h: jax.Array, matrix: jax.Array) -> Any:
            return jnp.tanh(h @ matrix), None

        h, _ = jax.lax.scan(turn, x, w)
        columns = jnp.moveaxis(w, 2, 0)[:, :WIDTH]
        return mean_square(jax.lax.scan(turn, h, columns)[0])

    grad_fn = jpipe.value_and_grad(loss, 2, num_stages=STAGES)
    with pytest.raises(ValueError, match=r"params: .* reads all of it"):
        grad_fn.place(stack()["kernel"], X)


def test_parameters_of_another_number_of_layers_are_refused() -> None:
    grad_fn = jpipe.value_and_grad(scanned, 2, num_stages=STAGES)
    grad_fn.place(stack(7), X)
    says = (
        r"params\['bias'\] has shape \(8, 6\); it is in pieces of 2, 2, 2, 1 along "
        r"axis 0, and needs 7 there; .*another jpipe\.value_and_grad"
    )
    for call in (grad_fn, grad_fn.place):
        with pytest.raises(ValueError, match=says):
            call(stack(8), X)


def test_a_scan_over_time_beside_layers_is_in_one_stage() -> None:
    """It is half of the work, and goes along nothing of the parameters."""

    def loss(w: Any, x: jax.Array) -> jax.Array:
        h, _ = jax.lax.scan(
            lambda h, row: (layer(h + row, w["cell"])[0], None),
            jnp.zeros_like(x),
            jnp.tile(x, (16, 1, 1)),
        )
        return mean_square(layers(w["layers"], h))

    cell = jax.tree.map(lambda leaf: leaf[0], stack())
    grad_fn = jpipe.value_and_grad(loss, 2, num_stages=STAGES)
    params = {"cell": cell, "layers": stack(16)}
    with pytest.warns(UserWarning, match=r"one operation, scan.*cannot be divided"):
        placed = grad_fn.place(params, X)
    expected = jax.value_and_grad(loss)(params, X)
    ref.assert_close(grad_fn(placed, X), expected, ref.FLOAT64)


def test_functions_of_what_a_user_computes_from_stacks() -> None:
    """Some of it is in pieces, some on all devices."""
    grad_fn = jpipe.value_and_grad(scanned, 2, num_stages=STAGES)
    bias = grad_fn.place(stack(), X)["bias"]
    negate = grad_fn.jit(lambda x: -x)
    for x in (2 * bias, bias.T, bias[:, None]):
        np.testing.assert_array_equal(negate(x), -np.asarray(x))
    for x in (bias.sum(0), bias[0], bias.mean()):
        with pytest.raises(ValueError, match="argument 0 is on 4 devices"):
            negate(x)


def test_results_of_layers_as_aux() -> None:
    def loss(w: Any, x: jax.Array) -> Any:
        def turn(h: jax.Array, of_layer: Any) -> Any:
            h = layer(h, of_layer)[0]
            return h, h.sum(1)

        h, sums = jax.lax.scan(turn, x, w)
        return mean_square(h), sums

    grad_fn = jpipe.value_and_grad(loss, 2, num_stages=STAGES, has_aux=True, aux_axes=1)
    params = stack()
    found = jax.tree.map(np.asarray, grad_fn(grad_fn.place(params, X), X))
    expected = jax.value_and_grad(loss, has_aux=True)(params, X)
    ref.assert_close(found, jax.tree.map(np.asarray, expected), ref.FLOAT64)
    assert scans_of_stages(grad_fn) == [[2]] * STAGES


# ------------------------------------------------------------- what optimizers join


def of_matrices(params: Any) -> Any:
    """The weights that muon takes: matrices of layers, stacked."""
    numbers = optax.contrib.MuonDimensionNumbers((-2,), (-1,))
    return jax.tree.map(lambda leaf: numbers if leaf.ndim == 3 else None, params)


def muon(preconditioning: str) -> optax.GradientTransformation:
    return optax.contrib.muon(
        1e-2,
        preconditioning=preconditioning,  # pyright: ignore[reportArgumentType]
        muon_weight_dimension_numbers=of_matrices,
    )


KEEP_PIECES = {
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=2),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(1e-2), 2),
    "lamb": lambda: optax.lamb(1e-2),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
    "muon": lambda: muon("frobenius"),
    "muon_with_a_branch": lambda: muon("aol"),
    "prodigy": lambda: optax.contrib.prodigy(1e-2),
}


@pytest.mark.parametrize(
    "name",
    slow_except({"adafactor", "muon_with_a_branch"}, KEEP_PIECES),
)
def test_optimizers_that_put_no_stack_together(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two updates are those of optax; no value has the bytes of all layers."""
    programs = list[Program]()

    def keep_program(*args: Any) -> Program:
        programs.append(Program(*args))
        return programs[-1]

    monkeypatch.setattr(_jit, "Program", keep_program)
    tx = KEEP_PIECES[name]()
    grad_fn = jpipe.value_and_grad(
        lambda w, x: mean_square(layers(w, x)), 2, num_stages=STAGES
    )
    params = grad_fn.place(stack(7), X)
    init = grad_fn.jit(tx.init)
    update = grad_fn.jit(tx.update)
    plain_params: Any = stack(7)
    plain_state = tx.init(plain_params)
    plain_update = jax.jit(tx.update)
    state = init(params)
    for _ in range(2):
        _, grads = grad_fn(params, X)
        updates, state = update(grads, state, params)
        plain_updates, plain_state = plain_update(
            jax.tree.map(np.asarray, grads), plain_state, plain_params
        )
        found = jax.tree.map(np.asarray, (updates, state))
        expected = jax.tree.map(np.asarray, (plain_updates, plain_state))
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-8, atol=1e-10)
    assert len(programs) >= 2
    largest = max(max(program.nbytes) for program in programs)
    assert largest < stack(7)["kernel"].nbytes


@pytest.mark.slow
def test_keys_of_layers() -> None:
    def loss(w: Any, x: Any, key: jax.Array) -> jax.Array:
        def turn(h: jax.Array, xs: Any) -> Any:
            of_layer, key = xs
            h = layer(h, of_layer)[0]
            return h * jax.random.bernoulli(key, 0.8, h.shape), None

        keys = jax.random.split(key, LAYERS)
        return mean_square(jax.lax.scan(turn, x, (w, keys))[0])

    def plain(w: Any) -> Any:
        halves: list[Any] = [
            loss(w, X[20 * m : 20 * m + 20], jpipe.microbatch_key(KEY, m))
            for m in range(2)
        ]
        return sum(halves) / 2

    grad_fn = jpipe.value_and_grad(loss, 2, num_stages=STAGES)
    placed = grad_fn.place(stack(), X, KEY)
    found = jax.tree.map(np.asarray, grad_fn(placed, X, KEY))
    ref.assert_close(found, jax.value_and_grad(plain)(stack()), ref.FLOAT64)
    assert scans_of_stages(grad_fn) == [[2]] * STAGES


@pytest.mark.parametrize(("shape", "is_read"), [((300,), True), ((4, 6), False)])
def test_one_number_of_each_layer_may_be_sorted_and_no_more(shape, is_read):
    def loss(params, x):
        x, _ = jax.lax.scan(lambda x, w: (jnp.sin(x * w), None), x, params)
        return jnp.mean(x**2) + jnp.sort(params, axis=0)[-1].sum()

    params, x = (
        jnp.linspace(0.5, 1.0, math.prod(shape)).reshape(shape),
        jnp.ones((4, 6)),
    )
    grad_fn = jpipe.value_and_grad(loss, 2, num_stages=2)
    if not is_read:
        with pytest.raises(ValueError, match=r"sort, at .*, reads all of it"):
            grad_fn.place(params, x)
        return
    result = grad_fn(grad_fn.place(params, x), x)
    ref.assert_close(result, jax.value_and_grad(loss)(params, x), ref.FLOAT32)
