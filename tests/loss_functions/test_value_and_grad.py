"""`jpipe.value_and_grad`: any loss function, unchanged, against plain JAX."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jpipe

from .. import reference as ref
from ..compiling import log_compiled
from ..slow import slow, slow_except
from .small_losses import (
    PROGRAMS,
    RNG,
    TARGETS,
    WIDE,
    X,
    matrices,
    perceptron,
    plain,
    run,
    skipping,
    squares,
)

SLOW = {"one block six times", "one checkpoint", "inner jit"}


@pytest.mark.parametrize("name", slow_except({*PROGRAMS} - SLOW, PROGRAMS))
def test_loss_and_gradients_are_those_of_plain_jax(double, name):
    function, params, args, stages = PROGRAMS[name]()
    expected = jax.jit(jax.value_and_grad(function))(params, *args)
    grad_fn = jpipe.value_and_grad(function, 4, num_stages=stages)
    # The gradient of a bias of keys is nothing but rounding.
    ref.assert_close(run(grad_fn, params, *args), expected, ref.FLOAT64, 1.0)


@pytest.mark.parametrize(
    "options",
    [
        slow({"schedule": "gpipe", "remat": "none"}),
        slow({"schedule": "gpipe", "remat": "full"}),
        slow({"schedule": "zb_h1"}),
        {"schedule": "zb_h1", "remat": ["none", "dots", "min_cut", "full"]},
        {"schedule": "interleaved", "devices": jax.devices()[:2]},
        slow({"schedule": "zb_v", "devices": jax.devices()[:2]}),
        {"remat": "except_last", "devices": (4 * jax.devices()[:1])},
    ],
    ids=lambda options: " ".join(map(str, options.values()))[:30],
)
def test_every_schedule_and_remat_gives_loss_and_gradients_of_plain_jax(
    double, options
):
    params, args = matrices(6, 8, 8, 8, 8, 3), (X, TARGETS)
    expected = jax.value_and_grad(skipping)(params, *args)
    grad_fn = jpipe.value_and_grad(skipping, 4, num_stages=4, **options)
    ref.assert_close(run(grad_fn, params, *args), expected, ref.FLOAT64)


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


def test_aux_that_follows_from_no_example_is_that_of_one_device(double):
    """Whether it has two rows, as many as a micro-batch, or one for each example."""

    def loss(params, x, targets):
        rows = jnp.broadcast_to(params[0][0], (len(x), 8))
        aux = {"table": params[0][:2], "exp": jnp.exp(params[0][:2]), "rows": rows}
        return plain(params, x, targets), {**aux, "numbers": jnp.arange(len(x))}

    params = matrices(6, 8, 3)
    expected = jax.value_and_grad(loss, has_aux=True)(params, X, TARGETS)
    for options in ({"num_stages": 2}, {"num_stages": 2, "replicas": [1, 2]}):
        grad_fn = jpipe.value_and_grad(loss, 5, has_aux=True, aux_axes=0, **options)
        ref.assert_close(run(grad_fn, params, X, TARGETS), expected, ref.FLOAT64)


def test_integers_of_a_state_are_those_of_the_last_micro_batch(double):
    """Averages beside a counter, as a batch norm of Haiku keeps them."""

    def loss(params, state, x, targets):
        counter, average = state["counter"] + 1, state["average"]
        average = 0.9 * average + 0.1 * x.mean(0)
        state = {"counter": counter, "average": average}
        return plain(params, x, targets), state

    params = matrices(6, 8, 3)
    state = {"counter": jnp.zeros((), jnp.int32), "average": jnp.ones(6, X.dtype)}
    expected = jax.value_and_grad(loss, has_aux=True)(params, state, X, TARGETS)
    options = {"has_aux": True, "aux_axes": jpipe.MEAN, "in_axes": (None, 0, 0)}
    grad_fn = jpipe.value_and_grad(loss, 4, num_stages=2, **options)
    found = run(grad_fn, params, state, X, TARGETS)
    ref.assert_close(found, expected, ref.FLOAT64)


def test_parameters_of_aux_alone_have_no_gradient(double):
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


def of_words(key, x):
    """As Keras reads its seed."""
    return x + jax.random.normal(key * 1, x.shape, x.dtype)


def in_checkpoint(key, x):
    return jax.checkpoint(of_words)(key, x)


def in_scan(key, x):
    def step(h, _):
        return in_checkpoint(key, h), None

    return jax.lax.scan(step, x, None, length=2)[0]


def of_next_word(key, x):
    return of_words(key + jnp.array([0, 1], key.dtype), x)


@pytest.mark.parametrize("noise", [of_words, in_checkpoint, in_scan, of_next_word])
def test_raw_keys_are_folded_however_they_are_read(double, noise):
    """And the state of a generator is that of one device."""

    def loss(params, key, x, targets):
        h = noise(key, x)
        aux = {"h": h, "next": key + jnp.array([0, 1], key.dtype)}
        return squares(perceptron(params, h), targets), aux

    params, key = matrices(6, 8, 3), jax.random.PRNGKey(3)
    grad_fn = jpipe.value_and_grad(
        loss,
        5,
        num_stages=1,
        in_axes=(None, 0, 0),
        has_aux=True,
        aux_axes={"h": 0, "next": jpipe.MEAN},
    )

    def by_hand(params):
        parts = [
            loss(
                params,
                jax.random.key_data(
                    jpipe.microbatch_key(jax.random.wrap_key_data(key), m)
                ),
                X[i : i + 2],
                TARGETS[i : i + 2],
            )
            for m, i in enumerate(range(0, 10, 2))
        ]
        h = jnp.concatenate([aux["h"] for _, aux in parts])
        return sum(value for value, _ in parts) / 5, {
            "h": h,
            "next": key + jnp.array([0, 1], key.dtype),
        }

    expected = jax.value_and_grad(by_hand, has_aux=True)(params)
    result = run(grad_fn, params, key, X, TARGETS)
    ref.assert_close(result, expected, ref.FLOAT64)


def test_draws_of_a_raw_key_are_returned_as_they_are_drawn_and_effects_run_once(double):
    num_calls = 0

    def count():
        nonlocal num_calls
        num_calls += 1

    def loss(params, key, x, targets):
        jax.debug.callback(count)
        bits = jax.checkpoint(lambda key: jax.random.bits(key, (3,), jnp.uint32))(key)
        aux = {"bits": bits, "next": jax.random.split(key)[0]}
        shift = bits.astype(x.dtype).mean() / 2**32
        return squares(perceptron(params, x + shift), targets), aux

    params, key = matrices(6, 8, 3), jax.random.PRNGKey(3)
    grad_fn = jpipe.value_and_grad(
        loss, 2, num_stages=1, in_axes=(None, 0, 0), has_aux=True
    )
    (value, aux), _ = run(grad_fn, params, key, X, TARGETS)
    jax.effects_barrier()
    assert num_calls == 4  # `run` calls it twice, with two micro-batches
    typed = jax.random.wrap_key_data(key)
    keys = [jax.random.key_data(jpipe.microbatch_key(typed, m)) for m in range(2)]
    parts = [
        loss(params, keys[m], X[5 * m : 5 * m + 5], TARGETS[5 * m : 5 * m + 5])
        for m in range(2)
    ]
    ref.assert_close(value, (parts[0][0] + parts[1][0]) / 2, ref.FLOAT64)
    ref.assert_equal(
        aux, jax.tree.map(lambda *x: jnp.stack(x), parts[0][1], parts[1][1])
    )


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
    trained = [stage.num_trained for stage in grad_fn.plan.stages]
    assert trained == [0, *(s.num_params for s in grad_fn.plan.stages[1:])]
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


def test_a_second_call_traces_and_compiles_nothing():
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
    with log_compiled() as compiled:
        grad_fn(placed, *args)
    assert traces == [(2, 6)]
    assert compiled == []


def test_debug_prints_run_in_each_micro_batch(capfd):
    def printing(params, x, targets):
        y = perceptron(params, x)
        jax.debug.print("sum {}", y.sum())
        return squares(y, targets)

    params = matrices(6, 8, 3)
    grad_fn = jpipe.value_and_grad(printing, 2, num_stages=2, schedule="gpipe")
    grad_fn(grad_fn.place(params, X, TARGETS), X, TARGETS)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("sum") >= 2


def test_after_compile_the_first_call_compiles_nothing():
    params = matrices(6, 8, 3)
    grad_fn = jpipe.value_and_grad(plain, 2, num_stages=2)
    placed = grad_fn.place(params, X, TARGETS)
    report = grad_fn.compile(placed, X, TARGETS)
    assert any("backward" in program.name for program in report.programs)
    with log_compiled() as compiled:
        grad_fn(placed, X, TARGETS)
    assert compiled == []


def test_masks_and_targets_do_not_cross(double):
    """Each stage makes them of the tokens; activations cross, and the long skip."""
    function, params, args, _ = PROGRAMS["transformer"]()
    grad_fn = jpipe.value_and_grad(function, 5, num_stages=3)
    grad_fn.place(params, *args)
    activations = 2 * 8 * 8 * 8
    sent = sorted(stage.sent_bytes for stage in grad_fn.plan.stages)
    assert sent == [0, activations, 2 * activations]  # with the skip


def test_there_is_a_stage_for_each_device_by_default():
    params, devices = matrices(6, 8, 8, 3), (2 * jax.devices())[:2]
    grad_fn = jpipe.value_and_grad(plain, 2, devices=devices)
    grad_fn.place(params, X, TARGETS)
    assert len(grad_fn.plan.stages) == 2


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
@pytest.mark.parametrize("stages", [slow(2), 3])
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


def test_a_penalty_sends_numbers_between_stages_and_no_weights(moved):
    def penalized(params, x, targets):
        outputs = x
        for weight in params:
            outputs = jnp.tanh(outputs @ weight)
        penalty = sum(jnp.sum(weight**2) for weight in params)
        return jnp.mean((outputs - targets) ** 2) + 0.01 * penalty

    params, args = matrices(6, 11, 11, 11, 3), (X, TARGETS)
    grad_fn = jpipe.value_and_grad(penalized, 4, num_stages=4)
    params = grad_fn.place(params, *args)
    grad_fn(params, *args)
    moved.clear()
    grad_fn(params, *args)
    assert moved
    assert 11 * 11 not in {size for size, *_ in moved}


@pytest.mark.parametrize("has_penalty", [False, True])
def test_values_computed_once_have_the_gradients_of_a_weighted_loss(
    double, has_penalty
):
    """Backwards have divided their cotangents by the sum of weights: once is enough."""
    keys = jax.random.split(jax.random.key(0), 4)
    names = ("first", "second", "third")
    params = {
        name: jax.random.normal(key, (64, 64)) / 8
        for name, key in zip(names, keys, strict=False)
    }
    x = jax.random.normal(keys[3], (8, 64))
    weights = jnp.arange(8.0) + 1

    def loss_fn(params, x, weights):
        product = params["first"] @ params["second"]  # once per step
        outputs = jpipe.boundary(jnp.tanh(x @ params["third"])) @ product
        total = (weights * jnp.mean((outputs - 1) ** 2, axis=-1)).sum()
        if has_penalty:
            total += jnp.sum(product**2)
        return total, weights.sum()

    def whole(params):
        total, weight = loss_fn(params, x, weights)
        return total / weight

    grad_fn = jpipe.value_and_grad(loss_fn, 4, reduction="weighted", num_stages=2)
    params = grad_fn.place(params, x, weights)
    loss, grads = grad_fn(params, x, weights)
    expected = jax.value_and_grad(whole)(jax.device_get(params))
    ref.assert_close((loss, grads), expected, ref.FLOAT64)


@jax.custom_vjp
def clipped(w):
    return w * 1.0


clipped.defvjp(lambda w: (clipped(w), None), lambda _, g: (jnp.clip(g, -0.05, 0.05),))


@pytest.mark.parametrize("width", [6, 40])
@pytest.mark.parametrize("reader", [clipped, jax.jit(clipped)])
def test_a_rule_for_derivatives_of_parameters_sees_the_gradient_of_the_step(
    double, width, reader
):
    """Whatever their size: it need not be linear."""

    def loss(params, x, targets):
        h = jnp.tanh(x @ reader(params[0]))
        h = jnp.tanh(h @ params[1])
        return 10 * squares(h @ params[1] @ reader(params[0])[:, :3], targets)

    x = RNG.normal(size=(10, width))
    params = [RNG.normal(size=(width, width)) / 3 for _ in range(2)]
    expected = jax.value_and_grad(loss)(params, x, TARGETS)
    grad_fn = jpipe.value_and_grad(loss, 5, num_stages=2)
    ref.assert_close(run(grad_fn, params, x, TARGETS), expected, ref.FLOAT64)


@pytest.mark.parametrize("is_constant", [True, False])
def test_what_follows_from_no_example_is_computed_once_for_all_stages(is_constant):
    """A loop or a draw is dear, however small its operands are."""
    num_calls = 0

    def host(x):
        nonlocal num_calls
        num_calls += 1
        return np.asarray(x)

    def dear(_, h):
        return jax.pure_callback(host, jax.ShapeDtypeStruct((6, 6), h.dtype), h)

    def loss(params, x):
        start = jnp.ones((6, 6)) if is_constant else jax.lax.stop_gradient(params[0])
        features = jax.lax.fori_loop(0, 3, dear, start)
        for w in params:
            x = jnp.tanh(x @ w + 0.1 * x @ features)
        return jnp.mean(x**2)

    x = jnp.asarray(X, jnp.float32)
    params = [jnp.full((6, 6), 0.1) for _ in range(3)]
    expected = jax.value_and_grad(loss)(params, x)
    grad_fn = jpipe.value_and_grad(loss, 5, num_stages=3)
    placed = grad_fn.place(params, x)
    jax.block_until_ready(grad_fn(placed, x))
    num_calls = 0
    result = jax.block_until_ready(grad_fn(placed, x))
    assert num_calls == 3
    ref.assert_close(result, expected, ref.FLOAT32)


def test_reads_that_nobody_uses_change_nothing(double):
    """As of libraries that look at row 0 of a stack for its structure."""

    def loss(params, x):
        jnp.take(params, 0, axis=0)
        jnp.sort(params, axis=0)
        return jnp.mean(jax.lax.scan(scanned_layer, x, params)[0] ** 2)

    def scanned_layer(h, w):
        return jnp.tanh(h @ w), None

    params = RNG.normal(size=(4, 6, 6)) / 2
    expected = jax.value_and_grad(loss)(params, X)
    grad_fn = jpipe.value_and_grad(loss, 5, num_stages=2)
    result = run(grad_fn, params, X)
    ref.assert_close(result, expected, ref.FLOAT64)
    assert grad_fn.place(params, X).sharding.num_devices == 2


def test_an_activation_of_two_readers_has_the_sum_of_their_cotangents(double):
    rng = np.random.default_rng(0)
    params, x = list(rng.normal(size=(3, 4, 4))), rng.normal(size=(8, 4))

    def loss(params, x):
        a = jpipe.boundary(jnp.tanh(x @ params[0]))
        b = jpipe.boundary(jnp.tanh(a @ params[1]))
        return jnp.mean((3 * jnp.sin(a) + b @ params[2]) ** 2)

    grad_fn = jpipe.value_and_grad(loss, 2)
    found = grad_fn(grad_fn.place(params, x), x)
    ref.assert_close(found, jax.value_and_grad(loss)(params, x), ref.FLOAT64)
