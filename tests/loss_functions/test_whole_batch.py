"""Losses over all examples of a mini-batch: exact, whatever they are."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import jpipe
from jpipe import schedules

from .. import reference as ref
from ..mesh.stages import mesh
from ..slow import slow, slow_except
from .whole_losses import LOSSES, all_losses, clip, normalized, rmse

RNG = np.random.default_rng(0)
TX = optax.sgd(0.1, momentum=0.9)
TWO = jax.devices()[:2]


def batch(size=10):
    x = RNG.normal(size=(size, 5))
    targets = {"label": np.arange(size) % 3, "number": RNG.normal(size=size)}
    return x, targets


class Scaled(nn.Module):
    """Embeddings, and a number that is learned beside them."""

    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.constant(0.7), (), float)
        return {"z": ref.dense(6, float)(x), "scale": scale}


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + ref.dense(7, float)(jnp.sin(ref.dense(7, float)(x)))


class Model(nn.Module):
    def setup(self):
        self.layers = [ref.dense(7, float), Block(), Scaled()]

    def __call__(self, x):
        first, second, last = self.layers
        return last(second(jnp.tanh(first(x))))


MODEL = Model()
OUT_AXES = {"z": 0, "scale": None}


def of_outputs(loss):
    return lambda y, targets: loss(y["z"], y["scale"], targets)


def variables():
    return MODEL.init(jax.random.key(0), np.zeros((2, 5)))


def plain(loss, params, x, targets, **options):
    """The loss and its gradients of all examples at once, on one device."""

    def loss_fn(params):
        return of_outputs(loss)(MODEL.apply(params, x), targets)

    return jax.jit(jax.value_and_grad(loss_fn, **options))(params)


def by_list(loss, count, params, x, targets, *, has_aux=False, **options):
    stages = [ref.dense(7, float), jnp.tanh, Block(), Scaled()]
    pipe = jpipe.pipeline(
        stages, count, **{"balance": [2, 1, 1], "out_axes": OUT_AXES, **options}
    )
    names = ["layers_0", None, "layers_1", "layers_2"]
    tree = tuple({"params": params["params"][n]} if n else {} for n in names)
    f = pipe.value_and_grad(of_outputs(loss), reduction="batch", has_aux=has_aux)
    value, grads = f(pipe.place(tree), x, targets)
    kept = {n: grad for n, grad in zip(names, grads, strict=True) if n}
    return value, {"params": kept}


def by_model(loss, count, params, x, targets, *, has_aux=False, **options):
    options = {"num_stages": 2, "out_axes": OUT_AXES, **options}
    pipe = jpipe.pipeline(MODEL, count, **options)
    f = pipe.value_and_grad(of_outputs(loss), reduction="batch", has_aux=has_aux)
    value, grads = f(pipe.place(params, x), x, targets)
    return value, {"params": grads}


def by_function(loss, count, params, x, targets, *, has_aux=False, **options):
    def loss_fn(params, x, targets):
        y = MODEL.apply(params, x)
        z, targets = jpipe.whole_batch((y["z"], targets))
        return loss(z, y["scale"], targets)

    options = {"num_stages": 2, **options}
    grad_fn = jpipe.value_and_grad(loss_fn, count, has_aux=has_aux, **options)
    return grad_fn(grad_fn.place(params, x, targets), x, targets)


APIS = by_list, by_model, by_function


@pytest.mark.parametrize("api", slow_except({by_list, by_function}, APIS))
def test_ten_losses_are_those_of_one_device(double, api):
    x, targets = batch(10)  # micro-batches of 4, 3 and 3
    params = variables()
    expected = plain(all_losses, params, x, targets, has_aux=True)
    found = api(all_losses, 3, params, x, targets, has_aux=True)
    ref.assert_close(found, expected, ref.FLOAT64)


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(("count", "size"), [(1, 8), (2, 8), (3, 10), (8, 8), (8, 11)])
def test_each_loss_is_that_of_one_device(double, api, loss, count, size):
    x, targets = batch(size)
    params = variables()
    expected = plain(loss, params, x, targets)
    found = api(loss, count, params, x, targets)
    # Some losses do not change with a bias: its gradient is noise.
    ref.assert_close(found, expected, ref.FLOAT64, scale=1.0)


def in_thirds(num_ranks, count):
    """All forwards, then all input gradients, then all weight gradients."""
    rows = []
    for rank in range(num_ranks):
        rows.append(" ".join(f"{rank}{op}{m}" for op in "FIW" for m in range(count)))
    return schedules.Schedule.from_text("\n".join(rows))


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("looped_bfs", {"balance": [1, 1, 1, 1], "devices": TWO}),
        (in_thirds, {}),
        slow("gpipe", {"remat": "full"}),
        slow("gpipe", {"remat": "none"}),
        slow("looped_bfs", {"balance": [1, 1, 1, 1], "devices": TWO, "remat": "dots"}),
    ],
)
def test_schedules_of_all_forwards_first_run(double, schedule, options):
    x, targets = batch(8)
    params = variables()
    expected = plain(clip, params, x, targets)
    found = by_list(clip, 4, params, x, targets, schedule=schedule, **options)
    ref.assert_close(found, expected, ref.FLOAT64)


@pytest.mark.parametrize("api", slow_except({by_model}, APIS))
@pytest.mark.parametrize("shape", slow_except({(2, 2)}, [(2, 2), (2, 2, 2), (1, 4)]))
def test_examples_may_be_sharded(double, api, shape):
    x, targets = batch(16)
    params = variables()
    options = {"mesh": mesh(*shape)}
    if api is by_list:
        options["balance"] = [2, 2] if shape[0] == 2 else [4]
    else:
        options["num_stages"] = shape[0]
    expected = plain(all_losses, params, x, targets, has_aux=True)
    found = api(all_losses, 2, params, x, targets, has_aux=True, **options)
    ref.assert_close(found, expected, ref.FLOAT64)


# ---------------------------------------------------------------- marks in a function


def towers(params, images, texts, temperature):
    """Two encoders, tied heads behind the marks, and a penalty on all parameters."""
    u = jnp.tanh(images @ params["image"][0]) @ params["image"][1]
    v = jnp.tanh(texts @ params["text"][0]) @ params["text"][1]
    u = jpipe.whole_batch(u) @ params["head"]
    v = jpipe.whole_batch(v) @ params["head"]
    z = jnp.concatenate([u, v], axis=1)
    penalty = sum(jnp.sum(w**2) for w in jax.tree.leaves(params))
    return clip(z, params["scale"] * temperature, None) + 1e-2 * penalty, {"u": u}


def tower_params():
    shapes = {
        "image": [(4, 6), (6, 5)],
        "text": [(3, 7), (7, 5)],
        "head": (5, 3),
        "scale": (),
    }
    return jax.tree.map(
        lambda shape: jnp.asarray(RNG.normal(size=shape)),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


@pytest.mark.parametrize(
    ("count", "size"), [(3, 8), slow(1, 8), slow(2, 8), slow(8, 8), slow(64, 70)]
)
def test_two_towers_share_a_head_and_have_a_penalty(double, count, size):
    args = RNG.normal(size=(size, 4)), RNG.normal(size=(size, 3)), 0.5
    params = tower_params()
    expected = jax.value_and_grad(towers, has_aux=True)(params, *args)
    grad_fn = jpipe.value_and_grad(
        towers, count, num_stages=2, has_aux=True, in_axes=(0, 0, None)
    )
    placed = grad_fn.place(params, *args)
    ref.assert_close(grad_fn(placed, *args), expected, ref.FLOAT64)
    # A reduction of parameters runs where these are; only the head and the scale move.
    owners = jax.tree.map(lambda w: w.devices(), placed)
    assert owners["head"] == owners["scale"] == {jax.devices()[1]}
    assert grad_fn.plan.stages[0].sent_bytes > 0  # embeddings, straight to the loss


def test_the_loss_may_read_what_is_the_same_for_all_micro_batches(double):
    def loss_fn(params, x, key, table, *, closed):
        h = jnp.tanh(x @ params["first"])
        router = jnp.mean(h**2) * jnp.sum(params["first"])  # an auxiliary loss
        z = jpipe.whole_batch(h @ params["last"])
        router = jpipe.whole_batch(router, jpipe.MEAN)
        total = jpipe.whole_batch(jnp.sum(x), jpipe.SUM)
        noise = jax.random.normal(key, z.shape)
        gram = (z + noise + table) @ z.T - jnp.asarray(closed)
        loss = jnp.sqrt(jnp.mean(gram**2)) + router + total * jnp.sum(params["last"])
        return loss, {
            "z": z,
            "shape": jnp.asarray(z.shape),
            "sum": params["last"].sum(),
        }

    params = {"first": RNG.normal(size=(5, 6)), "last": RNG.normal(size=(6, 4))}
    params = jax.tree.map(jnp.asarray, params)
    x, _ = batch(9)
    key = jax.random.key(3)
    table = RNG.normal(size=4)
    closed = tuple(range(9))
    in_axes = (0, None, None)

    def on_one_device(params):
        first_key = jpipe.microbatch_key(key, 0)
        return loss_fn(params, x, first_key, table, closed=closed)

    expected = jax.value_and_grad(on_one_device, has_aux=True)(params)
    grad_fn = jpipe.value_and_grad(
        lambda params, *args: loss_fn(params, *args, closed=closed),
        2,
        num_stages=2,
        has_aux=True,
        in_axes=in_axes,
    )
    placed = grad_fn.place(params, x, key, table)
    found = grad_fn(placed, x, key, table)
    ref.assert_close(found, expected, ref.FLOAT64)


@pytest.mark.parametrize("in_axes", [0, None])
def test_one_micro_batch_needs_no_examples_to_split(double, in_axes):
    x, _ = batch(6)
    w = jnp.asarray(RNG.normal(size=(5, 2)))

    def loss_fn(w, x):
        return jnp.sqrt(jnp.mean(jpipe.whole_batch(jnp.tanh(x @ w)) ** 2))

    grad_fn = jpipe.value_and_grad(loss_fn, 1, num_stages=1, in_axes=in_axes)
    found = grad_fn(grad_fn.place(w, x), x)
    ref.assert_close(found, jax.value_and_grad(loss_fn)(w, x), ref.FLOAT64)


@pytest.mark.slow
def test_a_stack_in_pieces_is_read_behind_marks_too(double):
    params = {"layers": RNG.normal(size=(4, 5, 5)) / 3, "scale": np.float64(0.3)}
    params = jax.tree.map(jnp.asarray, params)
    x, targets = batch(10)

    def loss_fn(params, x, targets):
        def layer(h, w):
            return h + jnp.tanh(h @ w), None

        z, _ = jax.lax.scan(layer, x, params["layers"])
        z, targets = jpipe.whole_batch((z, targets))
        return normalized(z, params["scale"], targets) + jnp.sum(params["layers"] ** 2)

    grad_fn = jpipe.value_and_grad(loss_fn, 3, num_stages=2)
    value, grads = grad_fn(grad_fn.place(params, x, targets), x, targets)
    grads["layers"] = np.asarray(grads["layers"])
    expected = jax.value_and_grad(loss_fn)(params, x, targets)
    ref.assert_close((value, grads), expected, ref.FLOAT64)


# --------------------------------------------------------------------- steps and state


class Normed(nn.Module):
    """A batch norm, whose statistics are those of the mini-batch."""

    @nn.compact
    def __call__(self, x, train):
        # By default Flax computes statistics in float32, also of float64.
        options = {"dtype": float, "param_dtype": float}
        norm = nn.BatchNorm(not train, force_float32_reductions=False, **options)
        return jnp.tanh(ref.dense(6, float)(norm(x)))


def test_a_step_trains_and_keeps_state_and_frozen_parameters(double):
    layers = [Normed(), ref.dense(6, float)]
    x, targets = batch(8)

    def loss_fn(z, targets):
        return rmse(z, 1.0, targets), {"largest": jnp.max(z)}

    options = {"trainable": "0/*", "has_aux": True}
    pipe = jpipe.pipeline(layers, 2)
    state = pipe.init_train_state(jax.random.key(0), x, TX, trainable="0/*")
    before = ref.on_host(state.variables)
    step = pipe.train_step(loss_fn, TX, reduction="batch", **options)
    new_state, metrics = step(state, x, targets)

    # Norms normalize each micro-batch; the loss sees all examples.
    def plain_loss(params):
        outputs = []
        for part in np.split(x, 2):
            entry = {**before[0], "params": params}
            h, _ = layers[0].apply(entry, part, True, mutable=["batch_stats"])
            outputs.append(layers[1].apply({"params": before[1]["params"]}, h))
        return loss_fn(jnp.concatenate(outputs), targets)

    first = before[0]["params"]
    (loss, aux), grads = jax.value_and_grad(plain_loss, has_aux=True)(first)
    expected = jax.tree.map(lambda w, g: w - 0.1 * g, first, grads)
    ref.assert_close(new_state.params[0], expected, ref.FLOAT64)
    ref.assert_equal(new_state.params[1], before[1]["params"])
    ref.assert_close(metrics, {"loss": loss, "aux": aux}, ref.FLOAT64)
    statistics = new_state.model_state[0]["batch_stats"]["BatchNorm_0"]
    ref.assert_close(statistics["mean"], jnp.asarray(0.01 * x.mean(0)), ref.FLOAT64)


def test_outputs_without_rows_are_averaged(double):
    """The auxiliary loss of a layer, which ``out_axes`` joins by a mean."""

    def with_size(z):
        return z, jnp.mean(z**2)

    def loss_fn(y, targets):
        z, size = y
        return rmse(z, 1.0, targets) + 0.3 * size

    x, targets = batch(7)
    layer = ref.dense(6, float)
    pipe = jpipe.pipeline([layer, with_size], 3, out_axes=(0, jpipe.MEAN))
    variables = pipe.init(jax.random.key(0), x)
    f = pipe.value_and_grad(loss_fn, reduction="batch")

    def plain_loss(params):
        return loss_fn(with_size(layer.apply({"params": params}, x)), targets)

    params = ref.params_of(variables)[0]
    loss, grads = f(variables, x, targets)
    expected = jax.value_and_grad(plain_loss)(params)
    ref.assert_close((loss, grads[0]), expected, ref.FLOAT64)


# -------------------------------------------------------------- plans, checks, profiles


def wide_layers():
    return [ref.dense(32), jnp.tanh, ref.dense(32), jnp.tanh, ref.dense(16)]


def similarity(z, targets):
    return optax.softmax_cross_entropy_with_integer_labels(z @ z.T, targets).mean()


@pytest.mark.parametrize(
    ("remat", "schedule", "balance"),
    [
        ("full", "gpipe", [2, 3]),
        slow("min_cut", "gpipe", [2, 1, 2]),
        slow("none", "looped_bfs", [1, 1, 2, 1]),
    ],
)
def test_outputs_of_all_micro_batches_are_among_the_bytes(
    quick, remat, schedule, balance
):
    x = np.ones((64, 8), np.float32)
    targets = np.arange(64, dtype=np.int32)
    options = {"balance": balance, "remat": remat, "schedule": schedule}
    pipe = jpipe.pipeline(wide_layers(), 4, devices=jax.devices()[:3], **options)
    variables = pipe.init(jax.random.key(0), x)
    f = pipe.value_and_grad(similarity, reduction="batch")
    assert f.profile(variables, x, targets).peak_bytes == tuple(
        held for _, held in f.plan.peak_bytes
    )
    measured = f.profile(variables, x, targets)
    assert f.plan.schedule.simulate(measured.costs).peak_bytes == measured.peak_bytes

    # They are all that a loss of micro-batches under GPipe does not hold.
    if remat == "full":
        by_parts = jpipe.pipeline(wide_layers(), 4, **(options | {"schedule": "gpipe"}))
        g = by_parts.value_and_grad(similarity, reduction="microbatch_mean")
        g(variables, x, targets)
        pairs = zip(f.plan.peak_bytes, g.plan.peak_bytes, strict=True)
        more = [held - held_by_parts for (_, held), (_, held_by_parts) in pairs]
        outputs = 64 * 16 * 4
        assert more[0] == 0
        assert outputs - 8 <= more[1] <= outputs


def test_print_says_that_forwards_run_first(quick):
    x = np.ones((8, 8), np.float32)
    targets = np.arange(8)
    pipe = jpipe.pipeline(wide_layers(), 4, balance=[2, 3])
    f = pipe.value_and_grad(similarity, reduction="batch")
    f(pipe.init(jax.random.key(0), x), x, targets)
    assert pipe.schedule.name == "1f1b"  # of other losses
    assert f.plan.schedule.name == "gpipe"
    assert "the loss runs once per step, on cpu:1, on 544 B" in str(f)
    assert "so gpipe runs all forwards first" in str(f)
    assert "not checked" not in str(f)
    typed = jpipe.pipeline(wide_layers(), 4, balance=[2, 3], schedule="1f1b")
    g = typed.value_and_grad(similarity, reduction="batch")
    with pytest.raises(ValueError, match=r"'1f1b' runs backwards before.*'gpipe' or"):
        g(typed.init(jax.random.key(0), x), x, targets)
    names = [
        program.name
        for program in f.compile(pipe.init(jax.random.key(0), x), x, targets).programs
    ]
    assert names.count("whole_batch") == 1


def test_a_plan_has_a_schedule_that_runs(quick):
    x = np.ones((16, 8), np.float32)
    targets = np.arange(16)
    loss = {"loss_fn": similarity, "targets": targets, "reduction": "batch"}
    plan = jpipe.plan(wide_layers(), x, TX, num_devices=2, measure=False, **loss)
    assert plan.schedule.name in ("gpipe", "looped_bfs")
    assert "it runs once per step" in str(plan)
    pipe = jpipe.pipeline(wide_layers(), plan=plan)
    f = pipe.value_and_grad(similarity, reduction="batch")
    f(pipe.init(jax.random.key(0), x), x, targets)
    with pytest.raises(ValueError, match=r"'1f1b' does not run all forwards first"):
        jpipe.plan(wide_layers(), x, TX, schedules="1f1b", measure=False, **loss)


def test_a_schedule_of_a_user_is_planned_if_it_runs_all_forwards_first(double):
    x, targets = RNG.normal(size=(9, 8)), np.arange(9)
    layers = [ref.dense(7, float), jnp.tanh, Block(), ref.dense(4, float)]
    options = {"loss_fn": similarity, "targets": targets, "reduction": "batch"}
    options |= {"num_devices": 2, "num_microbatches": 3, "measure": False}
    last_first = schedules.Schedule.from_text(
        "0F0 0F1 0F2 0B2 0B1 0B0\n1F0 1F1 1F2 1B2 1B1 1B0"
    )
    for schedule in (last_first, in_thirds):
        plan = jpipe.plan(layers, x, TX, schedules=schedule, **options)
        pipe = jpipe.pipeline(layers, plan=plan)
        variables = pipe.init(jax.random.key(0), x)
        find = pipe.value_and_grad(similarity, reduction="batch")
        params = ref.params_of(variables)
        expected = ref.value_and_grad(layers, params, x, targets, similarity)
        ref.assert_close(find(variables, x, targets), expected, ref.FLOAT64)
    assert "0W0" in plan.schedule.to_text()

    early = dataclasses.replace(schedules.one_f_one_b(2, 3), name="early")
    says = r"plan: schedules: .* runs backwards before the last forward with"
    for schedule in (early, lambda *sizes: schedules.one_f_one_b(*sizes)):
        with pytest.raises(ValueError, match=says):
            jpipe.plan(layers, x, TX, schedules=schedule, **options)


def test_checks_run_marked_functions_and_leave_the_loss_out(quick):
    x = np.asarray(RNG.normal(size=(8, 3)), np.float32)
    w = jnp.asarray(RNG.normal(size=(3, 3)), jnp.float32)

    def loss_fn(w, x, *, wrong=False):
        z = jpipe.whole_batch(jnp.tanh(x @ w))
        return jnp.sqrt(jnp.mean(z**2)) * (len(x) if wrong else 1)

    grad_fn = jpipe.value_and_grad(loss_fn, 2, num_stages=1)
    assert grad_fn.check(w, x)
    assert not grad_fn.check(w, x, microbatch_sizes=(4, 4), wrong=True)

    pipe = jpipe.pipeline(wide_layers(), 2, balance=[2, 3])
    f = pipe.value_and_grad(similarity, reduction="batch")
    report = f.check(pipe.init(jax.random.key(0), x), x, np.arange(8))
    assert report
    assert "it runs once, on all examples" in str(report)


# ---------------------------------------------------------------------------- refusals


def size(z):
    return jnp.sqrt(jnp.mean(z**2))


def in_a_scan(w, z, x):
    def body(carry, _):
        return carry + size(jpipe.whole_batch(z)), None

    return jax.lax.scan(body, jnp.zeros(()), None, length=3)[0]


def in_a_branch(w, z, x):
    def branch(z):
        return size(jpipe.whole_batch(z))

    return jax.lax.cond(w[0, 0] > 0, branch, lambda z: 2 * branch(z), z)


def in_vmap(w, z, x):
    return jax.vmap(lambda c: size(jpipe.whole_batch(c * z)))(jnp.arange(3.0)).sum()


def in_a_gradient(w, z, x):
    return jnp.sum(jax.grad(lambda z: size(jpipe.whole_batch(z)))(z))


def in_a_checkpoint(w, z, x):
    return jax.checkpoint(lambda z: size(jpipe.whole_batch(z)))(z)


def twice(w, z, x):
    return size(jpipe.whole_batch(jpipe.whole_batch(z) @ w.T))


def of_a_mean_twice(w, z, x):
    return size(jpipe.whole_batch(jpipe.whole_batch(z).mean(), jpipe.MEAN))


def without_targets(w, z, x):
    return size(jpipe.whole_batch(z)) + jnp.mean(x)


def of_targets_with_rows(w, z, x):
    return size(jpipe.whole_batch(z) - x[:, :2])


def of_parameters(w, z, x):
    return size(jpipe.whole_batch(z)) + size(jpipe.whole_batch(w))


def without_an_axis(w, z, x):
    return size(jpipe.whole_batch(z, None))


def without_rows(w, z, x):
    return size(jpipe.whole_batch(jnp.mean(z)))


def of_another_axis(w, z, x):
    return size(jpipe.whole_batch(z, "rows"))


def of_counts(w, z, x):
    count = jnp.sum(x > 0, dtype=jnp.int32)
    return size(jpipe.whole_batch(z)) * jpipe.whole_batch(count, jpipe.MEAN)


def of_numbers_of_rows(w, z, x):
    rows = jpipe.whole_batch(jnp.arange(len(x)))
    return size(jpipe.whole_batch(z)[rows])


def of_a_length(w, z, x):
    return size(jpipe.whole_batch(z)) / len(x)


def of_all(w, z, x):
    return size(jpipe.whole_batch(z))


def unmarked(w, z, x):
    return size(z)


REFUSED = [
    (in_a_scan, {}, "inside scan; call it in the loss function itself"),
    (in_a_branch, {}, "inside cond"),
    (in_vmap, {}, "inside jax.vmap"),
    (in_a_gradient, {}, "inside jax.grad or another derivative"),
    (in_a_checkpoint, {}, "inside jax.checkpoint"),
    (twice, {}, "it has those of all 6: mark it once"),
    (of_a_mean_twice, {}, "leave the second mark out"),
    (without_targets, {}, r"mark all that the loss and aux read of examples"),
    (of_targets_with_rows, {}, "behind jpipe.whole_batch mark all"),
    (of_parameters, {}, "follows from parameters and no example"),
    (of_numbers_of_rows, {}, r"follows from no example.*jnp.arange\(len\(z\)\)"),
    (without_an_axis, {}, "has axis None, as what is the same for all examples"),
    (of_another_axis, {}, "axis='rows'; needs the number of an axis"),
    (of_counts, {}, r"int32\[\]: jpipe.MEAN is for floating dtypes"),
    (without_rows, {}, r"type jpipe.whole_batch\(z, jpipe.MEAN\)"),
    (
        of_a_length,
        {"num_microbatches": 4},
        r"read the number .* len\(z\), and not of x",
    ),
    (of_all, {"reduction": "sum"}, "leave reduction= out, or type reduction='batch'"),
    (of_all, {"reduction": "microbatch_mean"}, "combines losses of micro-batches"),
    (of_all, {"schedule": "zb_h1"}, "type schedule='gpipe' or 'looped_bfs'"),
    (unmarked, {"reduction": "batch"}, "mark all that the loss and aux read"),
]


@pytest.mark.parametrize(("end", "options", "message"), REFUSED)
def test_what_cannot_run_once_is_refused(end, options, message):
    def loss_fn(w, x):
        return end(w, jnp.tanh(x @ w), x)

    w = jnp.ones((3, 2))
    x = jnp.ones((6, 3))
    options = {"num_microbatches": 2, "num_stages": 1, **options}
    grad_fn = jpipe.value_and_grad(loss_fn, **options)
    with pytest.raises((ValueError, TypeError)) as raised:
        grad_fn(grad_fn.place(w, x), x)
    notes = getattr(raised.value, "__notes__", [])
    assert re.search(message, "\n".join([str(raised.value), *notes]), re.DOTALL)


def test_a_model_has_no_marks(quick):
    x = np.ones((6, 3), np.float32)
    pipe = jpipe.pipeline([ref.dense(3), jpipe.whole_batch], 2)
    variables = pipe.init(jax.random.key(0), x)
    with pytest.raises(ValueError, match="call it in a loss function"):
        pipe.apply(variables, x)
    with pytest.raises(ValueError, match="has no marks: type reduction='batch'"):
        pipe.value_and_grad(ref.mse, reduction="batch")(variables, x, x)


def test_aux_of_the_mini_batch_has_no_axes():
    pipe = jpipe.pipeline([jnp.tanh], 2)
    with pytest.raises(ValueError, match="loss_fn runs once, on the whole mini-batch"):
        pipe.value_and_grad(ref.mse, has_aux=True, aux_axes=0, reduction="batch")
