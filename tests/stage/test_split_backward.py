"""The backward in two halves: what each computes, and that nothing else changes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import jpipe
from jpipe import schedules

from .. import reference as ref

WIDTH, ROWS = 64, 8
PRODUCT = 2 * ROWS * WIDTH * WIDTH


def grads_of(layers, x, targets, microbatches, **options):
    pipe = jpipe.pipeline(layers, microbatches, **options)
    variables = pipe.init(jax.random.key(0), x)
    return variables, pipe.value_and_grad(ref.mse)(variables, x, targets)


def small():
    return [*ref.mlp()[:3], ref.dense(4)]


def test_halves_give_the_same_bits_in_every_order_and_ulps_off_the_whole():
    x, targets = ref.regression(16)
    # Made to measure: halves only, in an order that is none of the catalogue's.
    costs = schedules.Costs([1, 1.5, 1, 0.8], 3, 1, 1, latency=0.5)
    made = schedules.fit(costs, 4, 8, max_bytes=5)
    assert "B" not in {action.op for row in made.rows for action in row}
    first, *others = (
        grads_of(small(), x, targets, 8, schedule=name, devices=jax.devices()[:ranks])[
            1
        ]
        for name, ranks in [
            ("zb_h1", 4),
            ("zb_v", 2),
            ("v_min", 2),
            ("interleaved_zb", 2),
            (made, 4),
        ]
    )
    for other in others:
        ref.assert_equal(other, first)
    variables, whole = grads_of(small(), x, targets, 8, schedule="gpipe")
    ref.assert_close(first, whole, 1e-6)  # XLA fuses otherwise: a few ulps
    params = ref.params_of(variables)
    expected = ref.value_and_grad(small(), params, x, targets)
    ref.assert_close(first, expected, ref.FLOAT32)


def test_schedule_without_backwards_applies_and_does_not_train():
    layers = [ref.dense(4), ref.dense(3)]
    pipe = jpipe.pipeline(layers, 2, schedule="forward_only")
    x, _ = ref.regression(6)
    variables = pipe.init(jax.random.key(0), x)
    expected = ref.compose(layers, ref.params_of(variables), x)
    ref.assert_close(pipe.apply(variables, x), expected, ref.FLOAT32)
    with pytest.raises(ValueError, match="'forward_only' has forwards only: it can"):
        pipe.value_and_grad(ref.mse)
    with pytest.raises(ValueError, match="such as schedule='1f1b'"):
        pipe.train_step(ref.mse, optax.sgd(0.1))


def test_forwards_alone_run_in_any_order_of_micro_batches():
    layers = [ref.dense(4), ref.dense(3)]
    order = schedules.Schedule.from_text("0F3 0F1 0F2 0F0\n1F1 1F3 1F2 1F0")
    x, _ = ref.regression(10)
    outputs = []
    for schedule in ("forward_only", order):
        pipe = jpipe.pipeline(layers, 4, schedule=schedule)
        variables = pipe.init(jax.random.key(0), x)
        outputs.append(pipe.apply(variables, x))
    assert (outputs[0] == outputs[1]).all()


def test_a_model_not_divided_yet_does_not_train_without_backwards():
    model, (x, targets) = nn.Sequential(small()), ref.regression(6)
    devices = jax.devices()[:2]
    pipe = jpipe.pipeline(model, 2, devices=devices, schedule="forward_only")
    find = pipe.value_and_grad(ref.mse)
    step = pipe.train_step(ref.mse, optax.sgd(0.1))
    state = pipe.init_train_state(jax.random.key(0), x, optax.sgd(0.1))
    expected = model.apply(ref.on_host(state.variables), x)
    ref.assert_close(pipe.apply(state.variables, x), expected, ref.FLOAT32)
    says = "'forward_only' has forwards only.* such as schedule='1f1b'"
    for train in (True, False):
        with pytest.raises(ValueError, match=says):
            find(state.variables, x, targets, train=train)
    with pytest.raises(ValueError, match=says):
        step(state, x, targets)
    params = [np.ones((5, 4), np.float32)]
    grad_fn = jpipe.value_and_grad(
        lambda params, x, targets: ref.mse(jnp.tanh(x @ params[0]), targets),
        2,
        num_stages=1,
        schedule="forward_only",
    )
    for call in (grad_fn.place, grad_fn):
        with pytest.raises(ValueError, match=says):
            call(params, x, targets)


def custom(function):
    wrapped = jax.custom_vjp(function)
    wrapped.defvjp(
        lambda *given: jax.vjp(function, *given), lambda pullback, ct: pullback(ct)
    )
    return wrapped


def scanned(first, second, x):
    stacked = jnp.stack([first, second])
    return jax.lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, stacked)[0]


WRAPPINGS = {
    "plain": lambda both: both,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "custom_vjp": custom,
    "scan": lambda _: scanned,
}


class Chain(nn.Module):
    """Two matrix products with a sine between, in one of several wrappings."""

    wrap: str = "plain"

    @nn.compact
    def __call__(self, x):
        def both(first, second, x):
            return jnp.sin(x @ first) @ second

        width = x.shape[-1]
        weights = [
            self.param(name, nn.initializers.lecun_normal(), (width, width), x.dtype)
            for name in ("first", "second")
        ]
        return WRAPPINGS[self.wrap](both)(*weights, x)


def compiled(layers, schedule="zb_h1", **options):
    """The plan, and the flops of each program of the gradient by name."""
    x = jnp.ones((2 * ROWS, WIDTH))
    pipe = jpipe.pipeline(layers, 2, schedule=schedule, **options)
    variables = pipe.init(jax.random.key(0), x)
    find = pipe.value_and_grad(ref.mse)
    report = find.compile(variables, x, x)
    return find.plan, {program.name: program.flops for program in report.programs}


def products(wrap, remat):
    """How many matrix products both halves, and the whole backward, take."""
    layers = [nn.Dense(WIDTH), Chain(wrap), nn.Dense(WIDTH)]
    _, halves = compiled(layers, remat=remat)
    _, whole = compiled(layers, "1f1b", remat=remat)
    names = ("stage1_input_grad", "stage1_weight_grad_add_grads")
    flops = [*(halves[name] for name in names), whole["stage1_backward_add_grads"]]
    # What a half computes beside products is less than a fifth of one.
    assert all(abs(each / PRODUCT - round(each / PRODUCT)) < 0.2 for each in flops)
    return [round(each / PRODUCT) for each in flops]


@pytest.mark.parametrize(
    ("wrap", "num_products"),
    # XLA counts one iteration of a loop.
    [("plain", 2), ("jit", 2), ("custom_vjp", 2), ("scan", 1)],
)
def test_first_half_has_the_products_of_dx_and_second_those_of_dw(wrap, num_products):
    assert products(wrap, "none") == [num_products, num_products, 2 * num_products]


@pytest.mark.parametrize(("wrap", "remat"), [("plain", "full"), ("checkpoint", "none")])
def test_recomputed_products_are_recomputed_once(wrap, remat):
    first, second, whole = products(wrap, remat)
    assert second == 2
    assert first + second == whole in (5, 6)  # of the forward again


def test_halves_that_have_nothing_to_compute_are_left_out():
    _, flops = compiled([nn.Dense(WIDTH), jnp.sin, nn.Dense(WIDTH)])
    assert {name for name in flops if name.startswith("stage")} == {
        "stage0_forward",
        "stage0_weight_grad_add_grads",  # the first stage has no input gradient
        "stage1_forward",
        "stage1_input_grad",  # a layer without parameters has no weight gradient
        "stage2_forward_add_results_input_grad",  # the loss is with the first half
        "stage2_weight_grad_add_grads",
    }
