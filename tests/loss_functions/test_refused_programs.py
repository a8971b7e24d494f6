"""What `jpipe.value_and_grad` cannot run, and what it says to type."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jpipe

from .. import reference as ref
from .small_losses import TARGETS, X, marked, matrices, perceptron, plain, squares


def scanned(params, x, targets):
    weights = jnp.stack(params[1:])
    backwards = jnp.arange(3, -1, -1)
    y, _ = jax.lax.scan(lambda h, i: (jnp.tanh(h @ weights[i]), None), x, backwards)
    return squares(y[:, :3], targets)


def marked_before_scan(params, x, targets):
    def layer(h, w):
        return jnp.tanh(h @ w), None

    y, _ = jax.lax.scan(layer, jpipe.boundary(jnp.sin(x)), params)
    return squares(y[:, :3], targets)


def turned(params, x, targets):
    y = jax.lax.fori_loop(0, 4, lambda _, h: jnp.tanh(h @ params[0]), x)
    return squares(y[:, :3], targets)


REFUSED = {
    "params is an nnx.Module": lambda: (
        plain,
        nnx.Linear(6, 3, rngs=nnx.Rngs(0)),
        (X, TARGETS),
        {},
    ),
    r"parameters need a floating dtype: params\[0\] is int": lambda: (
        plain,
        [np.ones((6, 3), int)],
        (X, TARGETS),
        {},
    ),
    "leaves differ in batch size": lambda: (
        plain,
        matrices(6, 3),
        (X, TARGETS[:5]),
        {},
    ),
    r"scale of shape \(\) has no axis 0": lambda: (
        lambda p, scale, x, t: scale * plain(p, x, t),
        matrices(6, 3),
        (2.0 * np.ones(()), X, TARGETS),
        {},
    ),
    r"must return \(loss, aux\); it returned": lambda: (
        plain,
        matrices(6, 3),
        (X, TARGETS),
        {"has_aux": True},
    ),
    r"must return \(total, weight\) in place": lambda: (
        plain,
        matrices(6, 3),
        (X, TARGETS),
        {"reduction": "weighted"},
    ),
    r"cannot be joined on aux_axes=0; .*:\n  \* aux has shape \(6,\)": lambda: (
        lambda p, x, t: (plain(p, x, t), x.sum(0)),
        matrices(6, 3),
        (X, TARGETS),
        {"has_aux": True, "aux_axes": 0},
    ),
    r"SUM is for numbers; type x.astype\(int\):\n  \* aux is bool": lambda: (
        lambda p, x, t: (plain(p, x, t), x[0, 0] > 0),
        matrices(6, 3),
        (X, TARGETS),
        {"has_aux": True, "aux_axes": jpipe.SUM},
    ),
    r"has None in in_axes=.*:\n  \* batch\['scale'\] is a float": lambda: (
        lambda p, batch: squares(batch["x"] @ p[0], batch["scale"]),
        matrices(6, 3),
        ({"x": X, "scale": 0.5},),
        {},
    ),
    "must return a scalar loss.* type .mean": lambda: (
        perceptron,
        matrices(6, 3),
        (X,),
        {},
    ),
    r"scan, at \S*test_refused_programs.py:\d+ \(scanned\), is .* cannot be": lambda: (
        scanned,
        matrices(6, 6, 6, 6, 6),
        (X, TARGETS),
        {"num_stages": 3},
    ),
    r"in \d+ at most: one operation, fori_loop, at .*, is .* cannot be divided; "
    r"write the loop in Python, or type num_stages=\d+$": lambda: (
        turned,
        matrices(6, 6),
        (X, TARGETS),
        {"num_stages": 40},
    ),
    "boundary is called inside scan.* leave jpipe.boundary out, and type": lambda: (
        lambda p, x, t: squares(
            jax.lax.scan(lambda c, _: (jpipe.boundary(c), None), x @ p[0], None, 2)[0],
            t,
        ),
        matrices(6, 3),
        (X, TARGETS),
        {},
    ),
    "boundary is called inside cond; .* loops and branches$": lambda: (
        lambda p, x, t: squares(
            jax.lax.cond(t[0, 0] > 0, jpipe.boundary, jnp.sin, x @ p[0]), t
        ),
        matrices(6, 3),
        (X, TARGETS),
        {},
    ),
    "num_stages=4: jpipe.boundary marks 1 places, .* leave out num_stages$": lambda: (
        marked,
        matrices(6, 8, 8, 8, 3),
        (X, TARGETS),
        {"num_stages": 4},
    ),
    r"num_stages=4: .* leave out num_stages, or leave out jpipe\.boundary": lambda: (
        marked_before_scan,
        jnp.ones((8, 6, 6)),
        (X, TARGETS),
        {"num_stages": 4},
    ),
    "in_axes=.* has 1 entries for 2 arguments": lambda: (
        plain,
        matrices(6, 3),
        (X, TARGETS),
        {"in_axes": (0,)},
    ),
}


@pytest.mark.parametrize("says", REFUSED)
def test_programs_that_cannot_run_are_refused_with_what_to_type(says):
    function, params, args, options = REFUSED[says]()
    grad_fn = jpipe.value_and_grad(function, 2, **{"num_stages": 1, **options})
    if "boundary" in says and "num_stages" not in options:
        grad_fn = jpipe.value_and_grad(function, 2)
    if says.startswith("num_stages=4"):
        grad_fn = jpipe.value_and_grad(function, 2, num_stages=4)
    with pytest.raises((TypeError, ValueError), match=says):
        grad_fn.place(params, *args)


def test_parameters_that_are_not_in_place_are_refused():
    params = matrices(6, 8, 3)
    grad_fn = jpipe.value_and_grad(plain, 2, num_stages=2)
    with pytest.raises(ValueError, match=r"type params = grad_fn\.place\(params"):
        grad_fn(params, X, TARGETS)


def test_options_that_do_not_exist_are_refused():
    value_and_grad = functools.partial(jpipe.value_and_grad, plain, 2)
    with pytest.raises(ValueError, match="unknown reduction 'median': choose 'mean'"):
        value_and_grad(reduction="median")
    with pytest.raises(ValueError, match=r"devices=\[\]: needs at least one"):
        value_and_grad(devices=[])
    with pytest.raises(ValueError, match="2 stages need 2 devices, there are 1"):
        value_and_grad(num_stages=2, devices=jax.devices()[:1]).place(
            matrices(6, 8, 3), X, TARGETS
        )


def by_size_in_numpy(params, x, targets):
    weights = np.full(3, 1 / len(x))
    return jnp.sum((perceptron(params, x) - targets) ** 2 * weights)


def by_size_in_branches(params, x, targets):
    first, second, last = params
    if len(x) % 2:
        y = jnp.tanh(x @ first) * jnp.cos(x @ second)
    else:
        y = jnp.cos(x @ second) * jnp.tanh(x @ first) + 0.0
    return squares(y @ last, targets)


def by_size_in_what_is_read(params, x, targets):
    y = perceptron(params, x)
    return squares(y, targets if len(x) % 2 else x[:, :3])


@pytest.mark.parametrize("function", [by_size_in_branches, by_size_in_what_is_read])
def test_functions_that_differ_with_the_size_of_a_micro_batch_are_refused(function):
    params = matrices(6, 6, 6, 3)
    grad_fn = jpipe.value_and_grad(function, 4, num_stages=2)
    with pytest.raises(ValueError, match="for micro-batches of another size; give a"):
        grad_fn.place(params, X, TARGETS)
    grad_fn.place(params, X[:8], TARGETS[:8])


def test_arrays_of_numpy_may_differ_with_the_size_of_a_micro_batch(double):
    params = matrices(6, 6, 6, 3)
    grad_fn = jpipe.value_and_grad(by_size_in_numpy, 4, num_stages=2)
    placed = grad_fn.place(params, X, TARGETS)
    expected = jax.value_and_grad(by_size_in_numpy)(params, X, TARGETS)
    ref.assert_close(grad_fn(placed, X, TARGETS), expected, ref.FLOAT64)


def test_a_model_of_no_operation_is_not_divided():
    pipe = jpipe.pipeline(lambda x: x, 2, num_stages=2)
    with pytest.raises(ValueError, match=r"in 1 at most; type num_stages=1\b"):
        pipe.apply({}, X)
    pipe = jpipe.pipeline(lambda x: x, 2, num_stages=1)
    ref.assert_equal(pipe.apply({}, np.float32(X)), np.float32(X))


def test_devices_may_be_a_generator():
    devices = (device for device in jax.devices()[:2])
    grad_fn = jpipe.value_and_grad(plain, 2, num_stages=2, devices=devices)
    placed = grad_fn.place(matrices(6, 8, 3), X, TARGETS)
    assert [w.device for w in placed] == jax.devices()[:2]


def test_no_stages_are_refused():
    with pytest.raises(ValueError, match="num_stages=0: needs at least 1"):
        jpipe.value_and_grad(plain, 2, num_stages=0)
