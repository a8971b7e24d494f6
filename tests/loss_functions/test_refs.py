"""A `jax.Ref` that a function makes for itself is as good as a value."""

import functools

import jax
import jax.numpy as jnp
import pytest

import jpipe
from jpipe import schedules

from .. import reference as ref
from .small_losses import RNG, TARGETS, X, matrices, run, squares

WEIGHTS = [*(RNG.normal(size=(6, 6)) / 2 for _ in range(3)), RNG.normal(size=(6, 3))]


def summed(w, x):
    total = jax.new_ref(jnp.zeros((len(x), w.shape[1]), x.dtype))
    total[...] += jnp.tanh(x @ w)
    total[...] = total[...] * 2
    total[:, 0] += 1.0
    return total[...]


def without_ref(w, x):
    return (2 * jnp.tanh(x @ w)).at[:, 0].add(1.0)


def in_layers(params, x, targets, layer=summed):
    for w in params[:-1]:
        x = jpipe.boundary(layer(w, x))
    return squares(layer(params[-1], x), targets)


def through_all_layers(params, x, targets, layer=None):
    """One ref from the first stage to the last, written in branches and loops."""
    penalty = jax.new_ref(jnp.zeros((), x.dtype))

    def add(i, _):
        penalty[...] += 0.1 * i * jnp.sum(params[0] ** 2)

    jax.lax.fori_loop(0, 3, add, None)
    for w in params:
        x = jnp.tanh(x @ w)
        jax.lax.cond(
            jnp.sum(w) > 0,
            lambda x=x: penalty.__setitem__(..., penalty[...] + x.mean()),
            lambda: None,
        )
    return squares(x, targets) + jax.freeze(penalty)


def in_calls(params, x, targets, layer=summed):
    """JAX itself differentiates no ref in a checkpoint, up to version 0.12."""
    for w in params[:2]:
        x = jax.checkpoint(layer)(w, x)
    x, _ = jax.lax.scan(lambda h, w: (jax.jit(layer)(w, h), None), x, params[2][None])
    return squares(x @ params[3], targets)


@pytest.mark.parametrize("function", [in_layers, through_all_layers, in_calls])
@pytest.mark.parametrize(
    ("schedule", "remat"),
    [("1f1b", "min_cut"), ("zb_h1", "full"), ("gpipe", "none"), ("zb_h1", "dots")],
)
def test_gradients_are_those_of_one_device(double, function, schedule, remat):
    by_hand = functools.partial(function, layer=without_ref)
    expected = jax.value_and_grad(by_hand)(WEIGHTS, X, TARGETS)
    devices = jax.devices()[:2]
    stages = {"devices": devices, "num_stages": 2}
    if function is in_layers:
        stages = {"devices": [*devices, *devices], "num_stages": 4}
    grad_fn = jpipe.value_and_grad(
        function, 5, schedule=schedules.BY_NAME[schedule], remat=remat, **stages
    )
    ref.assert_close(run(grad_fn, WEIGHTS, X, TARGETS), expected, ref.FLOAT64)


def test_layers_of_a_list_may_use_refs(double):
    def body(x):
        return summed(jnp.eye(6), x)

    layers = [ref.dense(6, jnp.float64), body, ref.dense(3, jnp.float64), jnp.tanh]
    pipe = jpipe.pipeline(layers, 5, balance=[2, 2], remat="full")
    variables = pipe.init(jax.random.key(0), X)
    params = ref.on_host(ref.params_of(variables))

    def by_hand(params):
        return ref.mse(ref.compose(layers, params, X), TARGETS)

    expected = jax.value_and_grad(by_hand)(params)
    result = pipe.value_and_grad(ref.mse)(variables, X, TARGETS)
    ref.assert_close(result, expected, ref.FLOAT64)


def test_refs_from_outside_are_refused():
    count = jax.new_ref(jnp.zeros(()))

    def counting(params, x, targets):
        count[...] += 1
        return in_layers(params, x, targets)

    grad_fn = jpipe.value_and_grad(counting, 5, num_stages=1)
    with pytest.raises(
        ValueError, match=r"a jax\.Ref from outside.* return the new one"
    ):
        grad_fn.place(WEIGHTS, X, TARGETS)


def test_refs_in_a_rule_for_derivatives_are_refused():
    rule = jax.custom_vjp(summed)
    rule.defvjp(lambda w, x: jax.vjp(summed, w, x), lambda vjp, grads: vjp(grads))

    def loss(params, x, targets):
        return squares(rule(params[0], x), targets)

    grad_fn = jpipe.value_and_grad(loss, 5, num_stages=1)
    with pytest.raises(ValueError, match=r"custom_vjp.* uses a jax\.Ref in a function"):
        grad_fn.place(matrices(6, 3), X, TARGETS)
