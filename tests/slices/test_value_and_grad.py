"""`jpipe.value_and_grad`: any loss function, unchanged, against plain JAX."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jpipe

from .. import reference as ref
from .programs import (
    PROGRAMS,
    RNG,
    TARGETS,
    WIDE,
    X,
    matrices,
    perceptron,
    plain,
    skipping,
    squares,
)


def run(grad_fn, params, *args):
    placed = grad_fn.place(params, *args)
    found = grad_fn(placed, *args)
    ref.assert_equal(grad_fn(placed, *args), found)
    for leaf, grad in zip(
        jax.tree.leaves(placed), jax.tree.leaves(found[1]), strict=True
    ):
        assert leaf.devices() == grad.devices()
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_loss_and_gradients_are_those_of_plain_jax(double, name):
    function, params, args, stages = PROGRAMS[name]()
    expected = jax.value_and_grad(function)(params, *args)
    grad_fn = jpipe.value_and_grad(function, 4, num_stages=stages)
    # The gradient of a bias of keys is nothing but rounding.
    ref.assert_close(run(grad_fn, params, *args), expected, ref.FLOAT64, 1.0)


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "gpipe", "remat": "none"},
        {"schedule": "gpipe", "remat": "full"},
        {"schedule": "zb_h1"},
        {"schedule": "zb_h1", "remat": ["none", "dots", "min_cut", "full"]},
        {"schedule": "interleaved", "devices": jax.devices()[:2]},
        {"schedule": "zb_v", "devices": jax.devices()[:2]},
        {"remat": "except_last", "devices": (4 * jax.devices()[:1])},
    ],
    ids=lambda options: " ".join(map(str, options.values()))[:30],
)
def test_every_schedule_and_remat_gives_them(double, options):
    params, args = matrices(6, 8, 8, 8, 8, 3), (X, TARGETS)
    expected = jax.value_and_grad(skipping)(params, *args)
    grad_fn = jpipe.value_and_grad(skipping, 4, num_stages=4, **options)
    ref.assert_close(run(grad_fn, params, *args), expected, ref.FLOAT64)


@pytest.mark.parametrize(
    "around",
    [lambda x: x, jnp.sum, jnp.array, lambda x: 2 * x.reshape(1).mean()],
)
def test_sum_counts_a_penalty_once(double, around):
    def total(params, x, targets):
        errors = (perceptron(params, x) - targets) ** 2
        penalty = 0.5 * sum(jnp.sum(w**2) for w in params)
        return around(jnp.sum(errors) + penalty)

    params = matrices(6, 8, 8, 3)
    expected = jax.value_and_grad(total)(params, X, TARGETS)
    grad_fn = jpipe.value_and_grad(total, 4, num_stages=3, reduction="sum")
    ref.assert_close(run(grad_fn, params, X, TARGETS), expected, ref.FLOAT64)


def contrastive(params, x, targets):
    y = perceptron(params, x)
    return optax.softmax_cross_entropy_with_integer_labels(
        y @ y.T, jnp.arange(len(y))
    ).mean()


def product(params, x, targets):
    penalty = sum(jnp.sum(w**2) for w in params)
    errors = (perceptron(params, x) - targets) ** 2
    return (errors.mean() + penalty) * errors.max()


def reciprocal(params, x, targets):
    penalty = sum(jnp.sum(w**2) for w in params)
    return 2 / (plain(params, x, targets) + penalty)


@pytest.mark.parametrize("function", [contrastive, product, reciprocal])
def test_microbatch_mean_is_the_mean_of_the_losses_of_micro_batches(double, function):
    params = matrices(6, 8, 3)
    parts = [
        jax.value_and_grad(function)(params, x, t)
        for x, t in zip(np.split(X, 5), np.split(TARGETS, 5), strict=True)
    ]
    expected = jax.tree.map(lambda *leaves: sum(leaves) / 5, *parts)
    options = {"num_stages": 2, "reduction": "microbatch_mean"}
    grad_fn = jpipe.value_and_grad(function, 5, **options)
    ref.assert_close(run(grad_fn, params, X, TARGETS), expected, ref.FLOAT64)


def noisy(params, batch, key):
    x, targets = batch
    for i, w in enumerate(params):
        mask = jax.random.bernoulli(jax.random.fold_in(key, i), 0.5, x.shape)
        x = jnp.tanh(jnp.where(mask, 2 * x, 0) @ w)
    errors = jnp.mean((x - targets) ** 2, axis=1)
    return errors.mean(), {"errors": errors, "largest": errors.max(), "size": len(x)}


def test_keys_are_folded_and_aux_is_joined(double):
    params, batch, key = matrices(6, 8, 8, 3), (X, TARGETS), jax.random.key(3)
    ends = [0, 3, 6, 8, 10]

    def by_hand(params):
        parts = [
            noisy(params, (X[a:b], TARGETS[a:b]), jpipe.microbatch_key(key, m))
            for m, (a, b) in enumerate(itertools.pairwise(ends))
        ]
        errors = jnp.concatenate([aux["errors"] for _, aux in parts])
        largest = jnp.stack([aux["largest"] for _, aux in parts])
        aux = {"errors": errors, "largest": largest, "size": jnp.array([3, 3, 2, 2])}
        return errors.mean(), aux

    expected = jax.value_and_grad(by_hand, has_aux=True)(params)
    axes = {"errors": 0, "largest": None, "size": None}
    options = {"has_aux": True, "aux_axes": axes, "num_stages": 3}
    grad_fn = jpipe.value_and_grad(noisy, 4, **options)
    (loss, aux), grads = run(grad_fn, params, batch, key)
    aux["size"] = aux["size"].astype(int)
    ref.assert_close(((loss, aux), grads), expected, ref.FLOAT64)


def test_the_mean_of_equal_values_is_that_value_to_the_bit(double):
    rates = jnp.linspace(0.1, 1, 9, dtype=jnp.float32)

    def loss(params, x, targets):
        return plain(params, x, targets), rates

    params, options = matrices(6, 8, 3), {"has_aux": True, "aux_axes": jpipe.MEAN}
    grad_fn = jpipe.value_and_grad(loss, 5, num_stages=2, **options)
    (_, aux), _ = run(grad_fn, params, X, TARGETS)
    ref.assert_equal(aux, rates)


def test_what_is_for_aux_alone_has_no_gradient(double):
    def loss(params, x, targets):
        y = perceptron(params[:1], x)
        roots = jnp.sqrt(0 * y).sum(1)  # of which the gradient is no number
        y = perceptron(params[1:], jpipe.boundary(y))
        return squares(y, targets), roots[:, None] + y

    params = matrices(6, 8, 3)
    expected = jax.value_and_grad(loss, has_aux=True)(params, X, TARGETS)
    grad_fn = jpipe.value_and_grad(loss, 5, has_aux=True, aux_axes=0)
    ref.assert_close(run(grad_fn, params, X, TARGETS), expected, ref.FLOAT64)


def test_raw_keys_are_folded_as_typed_ones(double):
    def noise(params, x, targets, key):
        drawn = jax.random.normal(key, (len(x), 3), x.dtype)
        return squares(perceptron(params, x) + drawn, targets)

    params, raw = matrices(6, 8, 3), jax.random.PRNGKey(3)
    typed = jax.random.wrap_key_data(raw)
    grad_fn = jpipe.value_and_grad(noise, 5, num_stages=2, in_axes=(0, 0, None))
    found = [run(grad_fn, params, X, TARGETS, key) for key in (raw, typed)]
    ref.assert_equal(*found)
    parts = [
        noise(params, X[i : i + 2], TARGETS[i : i + 2], jpipe.microbatch_key(typed, m))
        for m, i in enumerate(range(0, 10, 2))
    ]
    ref.assert_close(found[0][0], sum(parts) / 5, ref.FLOAT64)


def test_arguments_may_have_axes_of_their_own(double):
    def loss(params, x, table, targets):
        return squares(perceptron(params, x.T) * table, targets)

    params, table = matrices(6, 8, 3), RNG.normal(size=3)
    expected = jax.value_and_grad(loss)(params, X.T, table, TARGETS)
    grad_fn = jpipe.value_and_grad(loss, 2, num_stages=2, in_axes=(1, None, 0))
    ref.assert_close(run(grad_fn, params, X.T, table, TARGETS), expected, ref.FLOAT64)


def test_frozen_parameters_have_no_gradient(double):
    params = {f"layer_{i}": w for i, w in enumerate(matrices(6, 8, 8, 3))}

    def loss(params, x, targets):
        return plain(list(params.values()), x, targets)

    expected = jax.value_and_grad(loss)(params, X, TARGETS)
    grad_fn = jpipe.value_and_grad(
        loss, 2, num_stages=3, trainable=lambda path, leaf: path[0] != "layer_0"
    )
    placed = grad_fn.place(params, X, TARGETS)
    value, grads = grad_fn(placed, X, TARGETS)
    assert grads["layer_0"] is None
    assert "stage" in str(grad_fn)
    expected[1]["layer_0"] = None
    ref.assert_close((value, grads), expected, ref.FLOAT64)


def test_a_module_of_nnx_is_trained_by_an_optimizer_in_place(double):
    module = nnx.Sequential(
        nnx.Linear(6, 8, rngs=nnx.Rngs(0), **WIDE),
        jnp.tanh,
        nnx.Linear(8, 3, rngs=nnx.Rngs(1), **WIDE),
    )
    graph, params, rest = nnx.split(module, nnx.Param, ...)

    def loss(params, rest, x, targets):
        return squares(nnx.merge(graph, params, rest)(x), targets)

    args, tx = (rest, X, TARGETS), optax.adam(1e-2)
    grad_fn = jpipe.value_and_grad(loss, 2, num_stages=2, in_axes=(None, 0, 0))
    placed, spread = grad_fn.place(params, *args), grad_fn.optimizer(tx)
    state, expected, own = spread.init(placed), params, tx.init(params)
    for _ in range(2):
        value, grads = grad_fn(placed, *args)
        updates, state = spread.update(grads, state, placed)
        placed = optax.apply_updates(placed, updates)
        other, grads = jax.value_and_grad(loss)(expected, *args)
        updates, own = tx.update(grads, own, expected)
        expected = optax.apply_updates(expected, updates)
        ref.assert_close(value, other, ref.FLOAT64)
    ref.assert_close(jax.tree.leaves(placed), jax.tree.leaves(expected), ref.FLOAT64)


def test_a_second_call_traces_and_compiles_nothing(caplog):
    traces = []

    def counted(params, x, targets):
        traces.append(x.shape)
        return plain(params, x, targets)

    params = [np.float32(w) for w in matrices(6, 8, 3)]
    args = np.float32(X), np.float32(TARGETS)
    grad_fn = jpipe.value_and_grad(counted, 5, num_stages=2)
    placed = grad_fn.place(params, *args)
    grad_fn(placed, *args)
    assert traces == [(2, 6)]
    with jax.log_compiles(), caplog.at_level("WARNING"):
        grad_fn(placed, *args)
    assert traces == [(2, 6)]
    assert not [r for r in caplog.records if "ompil" in r.getMessage()]


def test_effects_stay_where_they_are(capfd):
    def printing(params, x, targets):
        y = perceptron(params, x)
        jax.debug.print("sum {}", y.sum())
        return squares(y, targets)

    params = matrices(6, 8, 3)
    grad_fn = jpipe.value_and_grad(printing, 2, num_stages=2, schedule="gpipe")
    grad_fn(grad_fn.place(params, X, TARGETS), X, TARGETS)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("sum") >= 2


def test_compile_tells_what_the_first_call_runs(caplog):
    params = matrices(6, 8, 3)
    grad_fn = jpipe.value_and_grad(plain, 2, num_stages=2)
    placed = grad_fn.place(params, X, TARGETS)
    report = grad_fn.compile(placed, X, TARGETS)
    assert any("backward" in program.name for program in report.programs)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        grad_fn(placed, X, TARGETS)
    assert not [r for r in caplog.records if "ompil" in r.getMessage()]


def test_masks_and_targets_do_not_cross(double):
    """Each stage makes them of the tokens; activations cross, and the long skip."""
    function, params, args, _ = PROGRAMS["transformer"]()
    grad_fn = jpipe.value_and_grad(function, 5, num_stages=3)
    grad_fn.place(params, *args)
    activations = 2 * 8 * 8 * 8
    assert f"{2 * activations:,} bytes" in str(grad_fn)  # with the skip
    assert str(grad_fn).count(f" {activations:,} bytes of a micro-batch") == 1


def test_sum_counts_a_penalty_once_whose_weight_is_an_argument(double):
    def total(params, x, targets, weight, key):
        errors = (perceptron(params, x) - targets) ** 2
        penalty = weight * sum(jnp.sum(w**2) for w in params)
        return (jnp.sum(errors) + penalty) / weight + 0 * jax.random.normal(key)

    params, args = matrices(6, 8, 8, 3), (X, TARGETS, np.array(0.3), jax.random.key(0))
    expected = jax.value_and_grad(total)(params, *args)
    options = {"reduction": "sum", "in_axes": (0, 0, None, None)}
    grad_fn = jpipe.value_and_grad(total, 4, num_stages=3, **options)
    ref.assert_close(run(grad_fn, params, *args), expected, ref.FLOAT64)


def test_there_is_a_stage_for_each_device_by_default():
    params, devices = matrices(6, 8, 8, 3), (2 * jax.devices())[:2]
    grad_fn = jpipe.value_and_grad(plain, 2, devices=devices)
    grad_fn.place(params, X, TARGETS)
    assert "stage 1 on" in str(grad_fn)
    assert "stage 2 on" not in str(grad_fn)


@jax.custom_vjp
def clipped(x):
    """Its gradients are clipped, so that their size tells."""
    return x


clipped.defvjp(lambda x: (x, None), lambda _, grads: (jnp.clip(grads, -0.1, 0.1),))


@pytest.mark.parametrize("weight_reads", ["targets", "outputs"])
def test_weighted_totals_are_divided_by_the_sum_of_weights(double, weight_reads):
    """Where targets alone tell the weight, cotangents are as large as on one device."""
    mask = RNG.integers(0, 2, 10).astype(float)

    def masked(params, x, targets, mask):
        y = perceptron(params, x)
        if weight_reads == "targets":
            errors, weight = ((clipped(y) - targets) ** 2).sum(1), mask.sum()
        else:
            errors = ((y - targets) ** 2).sum(1)
            weight = jax.lax.stop_gradient(jnp.sum(mask + jnp.abs(y).sum(1)))
        penalty = sum(jnp.sum(w**2) for w in params)
        return (errors * mask).sum() + penalty, weight

    def quotient(params, *args):
        total, weight = masked(params, *args)
        return total / weight

    params, args = matrices(6, 8, 8, 3), (X, TARGETS, mask)
    expected = jax.value_and_grad(quotient)(params, *args)
    options = {"num_stages": 3, "reduction": "weighted"}
    grad_fn = jpipe.value_and_grad(masked, 4, **options)
    ref.assert_close(run(grad_fn, params, *args), expected, ref.FLOAT64)
    report = grad_fn.check(params, *args)
    assert report
    assert f"{expected[0]:.6g}" in str(report)


def test_a_weight_of_parameters_is_held_constant_or_refused(double):
    def total(hold, params, x, targets):
        y = perceptron(params, x)
        return jnp.sum((y - targets) ** 2), hold(jnp.sum(y**2))

    def quotient(params, *args):
        value, weight = total(jax.lax.stop_gradient, params, *args)
        return value / weight

    params, args = matrices(6, 8, 3), (X, TARGETS)
    options = {"num_stages": 2, "reduction": "weighted"}
    held, free = (
        jpipe.value_and_grad(functools.partial(total, hold), 4, **options)
        for hold in (jax.lax.stop_gradient, jnp.array)
    )
    expected = jax.value_and_grad(quotient)(params, *args)
    ref.assert_close(run(held, params, *args), expected, ref.FLOAT64)
    with pytest.raises(
        TypeError, match=r"\(total, jax\.lax\.stop_gradient\(weight\)\)"
    ):
        free.place(params, *args)


@pytest.mark.parametrize(
    ("function", "reduction", "is_same"),
    [
        (plain, "mean", True),
        (plain, "sum", False),
        (contrastive, "mean", False),
        (contrastive, "microbatch_mean", False),
    ],
)
def test_check_tries_a_reduction(double, function, reduction, is_same):
    params = matrices(6, 8, 3)
    grad_fn = jpipe.value_and_grad(function, 4, num_stages=2, reduction=reduction)
    report = grad_fn.check(params, X, TARGETS, parts=(4, 6))
    assert bool(report) == is_same
    assert "not checked: grad_fn.check tries it" in str(grad_fn)
    if not is_same:
        with pytest.raises(ValueError, match=r"outputs differ: .* at once, .* 'sum'"):
            report.raise_if_different()
    with pytest.raises(ValueError, match=r"parts=\(4, 5\): .* the 10 of the batch"):
        grad_fn.check(params, X, TARGETS, parts=(4, 5))


def with_worst(params, x, targets):
    """Of one example the errors are as few bytes as the worst of them."""
    h = x @ params[0]
    for _ in range(3):
        h = h + h.mean(1, keepdims=True)
    errors = jnp.sqrt(1 + ((h[:, :3] - targets) ** 2).sum(1))
    return errors.mean(), errors.max()


def with_table(params, x, targets):
    """Of one example the product is of less than a KiB, of two of more."""
    read = x @ jnp.sin(jnp.arange(96.0)).reshape(6, 16)
    h = perceptron(params[:2], read)
    return squares((h + read)[:, :3], targets), h.max()


def with_latents(params, x, targets):
    """What follows from parameters alone has a row for each example."""
    latents, w, v = params
    h = jnp.tile(latents, (len(x), 1))
    h = jnp.tanh((h - h.mean(1, keepdims=True)) @ w)
    return squares((h * x) @ v, targets), h.max()


UNEVEN = {
    with_worst: matrices(6, 6),
    with_table: matrices(16, 16, 16),
    with_latents: matrices(1, 6, 6, 3),
}


@pytest.mark.parametrize("function", UNEVEN)
@pytest.mark.parametrize("stages", [2, 3])
def test_micro_batches_of_other_sizes_are_divided_alike(double, function, stages):
    params, args = UNEVEN[function], (X[:5], TARGETS[:5])
    grad_fn = jpipe.value_and_grad(function, 3, num_stages=stages, has_aux=True)
    (loss, aux), grads = run(grad_fn, params, *args)
    plain_grad = jax.value_and_grad(function, has_aux=True)
    (value, _), expected = plain_grad(params, *args)
    ref.assert_close((loss, grads), (value, expected), ref.FLOAT64, 1.0)
    parts = [[leaf[a:b] for leaf in args] for a, b in ((0, 2), (2, 4), (4, 5))]
    worst = jnp.stack([function(params, *part)[1] for part in parts])
    ref.assert_close(aux, worst, ref.FLOAT64, 1.0)
