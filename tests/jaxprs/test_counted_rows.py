"""Scans that index arrays by a counter are scans along these, where it is one."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies
from jax.extend import core

from jpipe._jaxprs import _inlining, _jaxpr
from jpipe._jaxprs._counted_rows import scan_along_counted

LENGTH = 4
W = jnp.sin(jnp.arange(36.0)).reshape(LENGTH, 3, 3)
X = jnp.ones(3)


def row(w: jax.Array, i: Any, axis: int = 0) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(w, i, axis, keepdims=False)


def fori(step: Callable[[Any, Any], Any], x: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, LENGTH, step, x)


def along(indices: Any, step: Callable[[Any, Any], Any], x: Any, **options: Any) -> Any:
    return jax.lax.scan(lambda x, i: (step(i, x), x), x, indices, **options)


def turn(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w)


def counted_by_carry(w: jax.Array, x: jax.Array) -> Any:
    def step(carry: Any, _: None) -> Any:
        i, x = carry
        return (i + 1, turn(w[i], x)), i

    return jax.lax.scan(step, (0, x), length=LENGTH)


def twice_in_a_body(w: jax.Array, x: jax.Array) -> Any:
    @jax.checkpoint
    def block(w: jax.Array, i: jax.Array, x: jax.Array) -> jax.Array:
        return turn(jax.jit(row)(w, i), x)

    return along(jnp.arange(LENGTH), lambda i, x: block(w, i, x) + row(w, i)[0], x)


def along_another_axis(w: jax.Array, x: jax.Array) -> jax.Array:
    w = w.transpose(1, 0, 2)
    return fori(lambda i, x: turn(row(w, i, 1), x), x)


@jax.custom_jvp
def custom_turn(w: jax.Array, i: jax.Array, x: jax.Array) -> jax.Array:
    return turn(w[i], x)


custom_turn.defjvp(
    lambda primals, tangents: jax.jvp(
        lambda w, x: turn(w[primals[1]], x), primals[::2], tangents[::2]
    )
)


def with_unused_reads(w: jax.Array, x: jax.Array) -> jax.Array:
    @jax.jit
    def block(w: jax.Array, i: Any, x: jax.Array) -> jax.Array:
        w.reshape(-1, 1)
        return turn(row(w, i), x)

    return fori(lambda i, x: block(w, i, x), x)


COUNTED = {
    "with_unused_reads": with_unused_reads,
    "fori": lambda w, x: fori(lambda i, x: turn(row(w, i), x), x),
    "arange": lambda w, x: along(jnp.arange(LENGTH), lambda i, x: turn(w[i], x), x),
    "numpy": lambda w, x: along(np.arange(LENGTH), lambda i, x: turn(w[i], x), x),
    "arange_from_behind": lambda w, x: along(
        jnp.arange(LENGTH), lambda i, x: turn(w[i - LENGTH], x), x, reverse=True
    ),
    "from_one": lambda w, x: along(
        jnp.arange(1, LENGTH + 1), lambda i, x: turn(w[i - 1], x), x
    ),
    "another_axis": along_another_axis,
    "carried": counted_by_carry,
    "calls_inside": twice_in_a_body,
}


def counted_arrays(function: Callable[..., Any], *args: Any) -> int:
    """The number of further arrays that the scan goes along; results are equal."""
    closed, _ = _inlining.trace(function, *args)
    new_closed = scan_along_counted(closed)
    results = core.jaxpr_as_fun(new_closed)(*args)
    for x, y in zip(results, jax.tree.leaves(function(*args)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)
    num_xs = list[int]()
    for jaxpr in (closed.jaxpr, new_closed.jaxpr):
        (scan,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
        num_xs.append(len(scan.invars) - _jaxpr.carry_slice(scan).stop)
    before, after = num_xs
    return after - before


@pytest.mark.parametrize("name", COUNTED)
def test_what_is_indexed_by_a_counter_is_scanned(name: str) -> None:
    assert counted_arrays(COUNTED[name], W, X) == 1


NOT_COUNTED = {
    "shifted": lambda w, x: fori(lambda i, x: turn(w[(i + 1) % LENGTH], x), x),
    "backwards": lambda w, x: fori(lambda i, x: turn(w[LENGTH - 1 - i], x), x),
    "reversed_with_a_carry": lambda w, x: jax.lax.scan(
        lambda c, _: ((c[0] + 1, turn(w[c[0]], c[1])), None),
        (0, x),
        length=LENGTH,
        reverse=True,
    ),
    "every_second": lambda w, x: jax.lax.fori_loop(
        0, 2, lambda i, x: turn(w[2 * i], x), x
    ),
    "the_first_rows": lambda w, x: jax.lax.fori_loop(
        0, 3, lambda i, x: turn(w[i], x), x
    ),
    "by_data": lambda w, x: fori(lambda i, x: turn(w[jnp.argmax(x)], x), x),
    "by_a_counter_and_data": lambda w, x: fori(
        lambda i, x: turn(w[i], x) + row(w, jnp.argmax(x))[0], x
    ),
    "two_rows": lambda w, x: fori(
        lambda i, x: turn(w[i], x) + row(w, jnp.maximum(i - 1, 0))[0], x
    ),
    "all_as_well": lambda w, x: fori(lambda i, x: turn(w[i], x) + w.sum(), x),
    "transposed_inside": lambda w, x: fori(lambda i, x: turn(w.mT[i], x), x),
    "two_axes": lambda w, x: fori(lambda i, x: x + w[i, 0, i % 3], x),
    "in_a_custom_derivative": lambda w, x: along(
        jnp.arange(LENGTH), lambda i, x: custom_turn(w, i, x), x
    ),
    "from_an_argument": lambda w, x: along(
        jnp.arange(LENGTH) + jnp.int32(x[0]) - 1, lambda i, x: turn(w[i], x), x
    ),
}


@pytest.mark.parametrize("name", NOT_COUNTED)
def test_other_reads_stay(name: str) -> None:
    function = NOT_COUNTED[name]
    closed, _ = _inlining.trace(function, W, X)
    assert scan_along_counted(closed) is closed


@given(
    begin=strategies.integers(0, 3),
    step=strategies.integers(-2, 2),
    offset=strategies.integers(-4, 4),
    reverse=strategies.booleans(),
)
def test_counters_of_any_steps(
    begin: int, step: int, offset: int, reverse: bool
) -> None:
    """An index that is no count along the array leaves the loop as it was."""

    def apply(w: jax.Array, x: jax.Array) -> Any:
        def body(carry: Any, _: None) -> Any:
            i, x = carry
            return (i + step, turn(row(w, jnp.clip(i + offset, -4, 3)), x)), None

        return jax.lax.scan(body, (begin, x), length=LENGTH, reverse=reverse)

    indices = np.clip(begin + offset + step * np.arange(LENGTH), -4, 3) % LENGTH
    indices = indices[::-1] if reverse else indices
    is_count = np.array_equal(indices, np.arange(LENGTH))
    assert counted_arrays(apply, W, X) == is_count


def test_a_loop_within_a_trace() -> None:
    closed, _ = _inlining.trace(COUNTED["carried"], W, X)

    def apply(w: jax.Array, x: jax.Array) -> Any:
        return core.jaxpr_as_fun(scan_along_counted(closed))(w, x)

    for a, b in zip(jax.jit(apply)(W, X), apply(W, X), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_a_gradient_through_rows() -> None:
    def loss(w: jax.Array) -> jax.Array:
        return COUNTED["calls_inside"](w, X)[0].sum()

    closed, _ = _inlining.trace(loss, W)
    run = core.jaxpr_as_fun(scan_along_counted(closed))
    actual = jax.grad(lambda w: run(w)[0])(W)
    np.testing.assert_allclose(actual, jax.grad(loss)(W), rtol=1e-5)
