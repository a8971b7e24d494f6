"""Scans whose backward is split: what each half computes, and that values stay.

Loss and every gradient under a schedule of halves are those of plain JAX in float64.
XLA counts the operations of one iteration of a loop, whatever its length.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jpipe

from .. import reference as ref
from ..listing import program_of
from ..slow import slow, slow_except

pytestmark = pytest.mark.usefixtures("double")

LAYERS, WIDTH, ROWS, STAGES = 8, 64, 16, 4
NUM_CLASSES = 1000
# The operations of a product of activations and a kernel, in half a batch.
PRODUCT = 2 * (ROWS // 2) * WIDTH * WIDTH
Params = dict[str, Any]
Loss = Callable[[Any, jax.Array], jax.Array]
Layer = Callable[[Any, Any], tuple[Any, None]]


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


X = normal(0, ROWS, WIDTH)


def stack() -> Params:
    return {
        "bias": normal(1, LAYERS, WIDTH) / 9,
        "kernel": normal(2, LAYERS, WIDTH, WIDTH) / 9,
        "scale": 1 + normal(3, LAYERS, WIDTH) / 9,
    }


def layer(h: jax.Array, w: Params) -> tuple[jax.Array, None]:
    normed = h / jnp.sqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-6) * w["scale"]
    return h + jnp.tanh(normed @ w["kernel"] + w["bias"]), None


def loss_of(turn: Layer, **options: Any) -> Loss:
    def loss(params: Params, x: jax.Array) -> jax.Array:
        return jnp.mean(jax.lax.scan(turn, x, params, **options)[0] ** 2)

    return loss


def blocks_of_layers(params: Params, x: jax.Array) -> jax.Array:
    def block(h: jax.Array, w: Params) -> tuple[jax.Array, None]:
        return jax.lax.scan(layer, h, w)

    pairs = jax.tree.map(lambda leaf: leaf.reshape(4, 2, *leaf.shape[1:]), params)
    return jnp.mean(jax.lax.scan(block, x, pairs)[0] ** 2)


def shared_kernel(params: Params, x: jax.Array) -> jax.Array:
    """A kernel that all layers read: the iterations add to its gradient."""

    def turn(h: jax.Array, bias: jax.Array) -> tuple[jax.Array, None]:
        return h + jnp.tanh(h @ params["shared"] + bias), None

    return jnp.mean(jax.lax.scan(turn, x, params["bias"])[0] ** 2)


def momentum(params: Params, x: jax.Array) -> jax.Array:
    """Two carries, each of which follows from the other one."""

    def turn(carry: Any, w: Params) -> tuple[Any, None]:
        h, velocity = carry
        velocity = 0.9 * velocity + jnp.tanh(h @ w["kernel"] + w["bias"])
        return (h + velocity * w["scale"], velocity), None

    return jnp.mean(jax.lax.scan(turn, (x, 0 * x), params)[0][0] ** 2)


def results_of_layers(params: Params, x: jax.Array) -> jax.Array:
    def turn(h: jax.Array, w: Params) -> tuple[jax.Array, jax.Array]:
        return layer(h, w)[0], jnp.mean(jnp.sin(h @ w["kernel"]))

    h, means = jax.lax.scan(turn, x, params)
    return jnp.mean(h**2) + jnp.sum(means)


def stack_and_shared() -> Params:
    return {"bias": stack()["bias"], "shared": normal(4, WIDTH, WIDTH) / 9}


class Form(NamedTuple):
    """A loss that scans.

    Attributes:
      loss: the loss.
      products: the products of I and of W in an iteration, as XLA counts them.
      params: makes its parameters.
    """

    loss: Loss
    products: tuple[int, int]
    params: Callable[[], Params] = stack


FORMS = {
    "layers": Form(loss_of(layer), (1, 1)),
    "reversed": Form(loss_of(layer, reverse=True), (1, 1)),
    "unrolled": Form(loss_of(layer, unroll=2), (2, 2)),
    "jit": Form(loss_of(jax.jit(layer)), (1, 1)),
    # Its products are computed again, once.
    "checkpoint": Form(loss_of(jax.checkpoint(layer)), (2, 1)),
    "shared_kernel": Form(shared_kernel, (1, 1), stack_and_shared),
    "blocks_of_layers": Form(blocks_of_layers, (1, 1)),
    "momentum": Form(momentum, (1, 1)),
    "results_of_layers": Form(results_of_layers, (2, 2)),
}


def gradient(loss: Loss, schedule: str = "zb_h1", **options: Any) -> Any:
    return jpipe.value_and_grad(
        loss, 2, num_stages=STAGES, schedule=schedule, **options
    )


def assert_equals_plain_jax(grad_fn: Any, loss: Loss, params: Any) -> None:
    found = jax.tree.map(np.asarray, grad_fn(grad_fn.place(params, X), X))
    expected = jax.jit(jax.value_and_grad(loss))(params, X)
    ref.assert_close(found, jax.tree.map(np.asarray, expected), ref.FLOAT64)


def products(grad_fn: Any, params: Any) -> tuple[int, int]:
    """The products in an iteration of I and W of stage 1; the rest is less than one."""
    report = grad_fn.compile(grad_fn.place(params, X), X)
    flops_of = {program.name: program.flops for program in report.programs}

    def count(half: str) -> int:
        """Equal stages are one program, `stage1_2`."""
        (flops,) = [
            flops
            for name, flops in flops_of.items()
            if name.startswith("stage1_") and half in name
        ]
        return math.floor(flops / PRODUCT)

    return count("input_grad"), count("weight_grad")


QUICK = {"layers", "reversed", "checkpoint", "momentum"}


@pytest.mark.parametrize("name", slow_except(QUICK, FORMS))
def test_products_of_weight_gradients_are_in_the_second_half(name: str) -> None:
    loss, expected_products, params = FORMS[name]
    grad_fn = gradient(loss)
    assert_equals_plain_jax(grad_fn, loss, params())
    assert products(grad_fn, params()) == expected_products


@pytest.mark.parametrize("remat", ["full", slow("none"), slow("dots")])
def test_products_are_in_the_second_half_under_other_remat_modes(remat: str) -> None:
    loss = FORMS["layers"].loss
    grad_fn = gradient(loss, remat=remat)
    assert_equals_plain_jax(grad_fn, loss, stack())
    # Under `full` and `dots` the first half runs the forward again, in another loop.
    recomputed = 1 if remat == "full" else 0
    assert products(grad_fn, stack()) == (1 + recomputed, 1)


def test_halves_of_a_scan_add_up_to_the_whole() -> None:
    """The work is that of the whole, its gradients are, and the halves are alike."""
    loss = FORMS["layers"].loss
    flops = list[dict[str, float]]()
    values = list[Any]()
    for schedule in ("zb_h1", "1f1b"):
        grad_fn = gradient(loss, schedule)
        placed = grad_fn.place(stack(), X)
        report = grad_fn.compile(placed, X)
        flops.append({program.name: program.flops for program in report.programs})
        values.append(jax.tree.map(np.asarray, grad_fn(placed, X)))
    halves, wholes = flops
    first = halves["stage1_2_input_grad"]
    second = halves["stage1_2_weight_grad_add_grads"]
    whole = wholes["stage1_2_backward_add_grads"]
    assert 0.8 < second / first < 1.2
    assert first + second < 1.05 * whole
    ref.assert_close(values[0], values[1], ref.FLOAT64)


def test_a_carry_that_begins_with_zeros_is_none_of_the_weights() -> None:
    """What follows from it and from weights is computed once all the same.

    The last activation is not read here, so its cotangent is zero.
    """

    def loss(params: Params, x: jax.Array) -> jax.Array:
        def turn(h: jax.Array, w: Params) -> tuple[jax.Array, jax.Array]:
            return h + h @ w["first"] @ w["second"], jnp.mean(jnp.sin(h))

        h = jpipe.boundary(jnp.tanh(x @ params["kernel"]))
        return jnp.sum(jax.lax.scan(turn, h, params["layers"])[1])

    kernels = normal(14, 2, 2, WIDTH, WIDTH) / 9  # of two layers
    params = {
        "kernel": normal(15, WIDTH, WIDTH) / 9,
        "layers": {"first": kernels[0], "second": kernels[1]},
    }
    grad_fn = jpipe.value_and_grad(loss, 2, schedule="zb_h1")
    assert_equals_plain_jax(grad_fn, loss, params)
    forward_and_input_grad = 2 + 2
    assert products(grad_fn, params) == (forward_and_input_grad, 2)


# ------------------------------------------------------------------ what stays whole


def in_chunks(turn: Callable[[Any, Any], Any]) -> Loss:
    """A loss of logits that are wide, chunk by chunk, in the last of three stages."""

    def loss(params: Params, x: jax.Array) -> jax.Array:
        h = jpipe.boundary(jnp.tanh(x @ params["first"]))
        h = jpipe.boundary(jnp.tanh(h @ params["second"]))

        def add(total: jax.Array, rows: jax.Array) -> tuple[jax.Array, None]:
            return total + turn(rows, params["head"]), None

        chunks = h.reshape(4, -1, WIDTH)
        return jax.lax.scan(add, jnp.zeros(()), chunks)[0] / len(x)

    return loss


def logsumexps(rows: jax.Array, head: jax.Array) -> jax.Array:
    return jnp.sum(jax.nn.logsumexp(rows @ head, -1))


def head_params() -> Params:
    return {
        "first": normal(5, WIDTH, WIDTH) / 9,
        "second": normal(6, WIDTH, WIDTH) / 9,
        "head": normal(7, WIDTH, NUM_CLASSES) / 9,
    }


@pytest.mark.parametrize("recomputes", [True, False])
def test_a_loss_in_chunks_hands_over_no_logits_that_it_computes_again(
    recomputes: bool,
) -> None:
    turn = jax.checkpoint(logsumexps) if recomputes else logsumexps
    loss = in_chunks(turn)
    grad_fn = jpipe.value_and_grad(loss, 2, schedule="zb_h1")
    assert_equals_plain_jax(grad_fn, loss, head_params())
    program = program_of(grad_fn, head_params(), X)
    logits_bytes = 8 * ROWS // 2 * NUM_CLASSES
    assert (logits_bytes in program.nbytes) != recomputes


def test_a_scan_whose_second_half_is_cheap_stays_whole() -> None:
    """The gradient of a bias is a sum: it is computed where its cotangent is."""

    def turn(h: jax.Array, w: Params) -> tuple[jax.Array, None]:
        return jnp.sin(h + w["bias"]), None

    loss = loss_of(turn)
    params = {"bias": stack()["bias"]}
    grad_fn = gradient(loss)
    assert_equals_plain_jax(grad_fn, loss, params)
    report = grad_fn.compile(grad_fn.place(params, X), X)
    flops_of = {program.name: program.flops for program in report.programs}
    # The second half adds the gradients of two layers to their sums, and no more.
    assert flops_of["stage1_2_weight_grad_add_grads"] <= 2 * WIDTH


def test_a_scan_over_time_adds_to_its_weights_in_the_second_half() -> None:
    """A recurrent layer, whose kernels are constants of the loop."""

    def recur(params: Params, x: jax.Array) -> jax.Array:
        def turn(state: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
            new = jnp.tanh(row @ params["kernel"] + state @ params["recurrent"])
            return new, new

        steps = x.reshape(len(x), 4, -1).swapaxes(0, 1)
        state = jnp.zeros((len(x), WIDTH))
        return jax.lax.scan(turn, state, steps)[1].swapaxes(0, 1).reshape(len(x), -1)

    def loss(params: list[Params], x: jax.Array) -> jax.Array:
        for layer_params in params[:-1]:
            x = jpipe.boundary(recur(layer_params, x)[:, : 4 * WIDTH])
        return jnp.mean(recur(params[-1], x) ** 2)

    def layer_params(seed: int, width: int) -> Params:
        return {
            "kernel": normal(seed, width, WIDTH) / 9,
            "recurrent": normal(seed + 1, WIDTH, WIDTH) / 9,
        }

    params = [layer_params(8, WIDTH // 4), layer_params(10, WIDTH)]
    params += [layer_params(12, WIDTH)]
    grad_fn = jpipe.value_and_grad(loss, 2, schedule="zb_h1")
    assert_equals_plain_jax(grad_fn, loss, params)
    assert products(grad_fn, params) == (2, 2)
