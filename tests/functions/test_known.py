"""Numbers that follow from how many examples there are: as JAX computes them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jpipe._jaxprs import _jaxpr
from jpipe._mixing import _known
from jpipe._mixing._pairs import Numbers
from jpipe._mixing._results import results

NUMBERS = Numbers(3, 4, 2)


def places(n):
    return jnp.arange(n)


def angles(n):
    return jnp.arange(1.0, n + 1) / n


def table(n):
    return jnp.arange(n * 2).reshape(n, 2)


EXPRESSIONS = {
    "halves": lambda n: places(n) < n // 2,
    "odd": lambda n: (places(n) % 2 == 1) | (places(n) >= 3),
    "not the last": lambda n: ~(places(n) == n - 1) & (places(n) != 2),
    "either": lambda n: (places(n) > 1) ^ (places(n) <= 2),
    "divided": lambda n: (-places(n) + 3) // 2,
    "rest": lambda n: lax.rem(3 - places(n), jnp.full(n, 2)),
    "towards zero": lambda n: lax.div(3 - places(n), jnp.full(n, 2)),
    "within": lambda n: jnp.clip(places(n), 1, 3),
    "clamped": lambda n: lax.clamp(1, places(n), 2),
    "sizes": lambda n: abs(jnp.sign(places(n) - 2)),
    "curves": lambda n: jnp.sin(angles(n)) + jnp.cos(angles(n)) * jnp.exp(angles(n)),
    "roots": lambda n: jnp.log(angles(n)) - jnp.sqrt(angles(n)) + jnp.square(angles(n)),
    "powers": lambda n: angles(n) ** angles(n)[::-1],
    "more curves": lambda n: sum(
        curve(angles(n) / 2)
        for curve in (
            *(jnp.tanh, jnp.tan, jnp.sinh, jnp.cosh, jnp.cbrt, jnp.expm1, jnp.log1p),
            *(jnp.arcsin, jnp.arccos, jnp.arctan, jnp.arcsinh, jnp.arctanh, jnp.exp2),
            *(lax.rsqrt, lax.logistic, lax.erf, lax.erfc, lax.erf_inv, jnp.round),
        )
    ),
    "of two": lambda n: jnp.arctan2(angles(n), 2.0) + jnp.arccosh(1 + angles(n)),
    "cubes": lambda n: places(n) ** 3,
    "finite": lambda n: jnp.isfinite(1 / places(n)),
    "rounded": lambda n: jnp.floor(angles(n) * 2) + jnp.ceil(angles(n) * 3),
    "whole": lambda n: (angles(n) * 2).astype(jnp.int32),
    "chosen": lambda n: jnp.where(places(n) < 2, 5, places(n)),
    "labels": lambda n: jnp.concatenate([jnp.ones(n // 2), jnp.zeros(n - n // 2)]),
    "evenly": lambda n: jnp.linspace(0, 1, n),
    "padded": lambda n: jnp.pad(jnp.ones(n // 2), (0, n // 2)),
    "repeated": lambda n: jnp.repeat(jnp.array([1.0, 0.0]), n // 2),
    "tiled": lambda n: jnp.tile(jnp.array([1, 2, 3]), n),
    "one of many": lambda n: jax.nn.one_hot(places(n) % 3, 3),
    "below": lambda n: jnp.tril(jnp.ones((n, n))),
    "turned": lambda n: table(n).T[::-1, 1::2],
    "cut": lambda n: jnp.stack([*jnp.split(places(n), 2)], 1),
    "columns": lambda n: jnp.unstack(table(n), axis=1)[1],
    "first": lambda n: jnp.zeros(n).at[: n // 2].set(1),
    "counted": lambda n: jnp.zeros(2).at[places(n) % 2].add(1),
    "in a place": lambda n: lax.dynamic_update_slice(jnp.zeros(n), jnp.ones(2), (1,)),
    "from a place": lambda n: lax.dynamic_slice(places(n), (n - 2,), (2,)),
    "shifted": lambda n: jnp.take(places(n), (places(n) + 1) % n),
    "so far": lambda n: jnp.cumsum(places(n)) + jnp.cumprod(jnp.full(n, 1)),
    "largest so far": lambda n: lax.cummax(places(n) % 3) - lax.cummin(places(n) % 3),
    "all": lambda n: jnp.sum(places(n)) + jnp.max(table(n)) - jnp.min(table(n), 0),
    "product": lambda n: jnp.prod(jnp.full(n, 2)),
    "order": lambda n: jnp.argsort(-(places(n) % 3)),
    "where": lambda n: jnp.argmax(table(n), 0) - jnp.argmin(table(n), 0),
    "copied": lambda n: lax.stop_gradient(jnp.copy(angles(n))),
}


def traced(function, count):
    return jax.make_jaxpr(lambda: function(count))()


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_what_is_known_is_what_jax_computes(name):
    jaxprs = [traced(EXPRESSIONS[name], count) for count in NUMBERS.counts]
    (made,) = results(jaxprs[0], jaxprs[1], [], NUMBERS)
    for count, known in zip(NUMBERS.counts, made.known.each, strict=True):
        expected = EXPRESSIONS[name](count)
        assert known.dtype == expected.dtype
        # A curve of NumPy may differ from that of XLA in its last bit.
        actual = np.broadcast_to(known, expected.shape)
        np.testing.assert_allclose(actual, expected, rtol=1e-6)


def names(closed):
    for eqn in closed.jaxpr.eqns:
        yield eqn.primitive.name
        for inner in _jaxpr.inside(eqn):
            yield from names(inner)


def test_all_that_is_computed_is_among_them():
    found = {name for f in EXPRESSIONS.values() for name in names(traced(f, 4))}
    listed = {*_known._ONE_BY_ONE, *_known._BOUND, *_known._SHAPED}
    assert listed - found <= {"add_any", "squeeze", "stack", "tile", "unstack"}


def test_equal_ones_are_equal():
    one, other = (_known.constant(np.arange(4), np.arange(12)) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    assert one != _known.constant(np.arange(4.0), np.arange(12.0))
    assert one != _known.constant(np.arange(4), np.zeros(12))


def test_too_much_is_not_known():
    many = 1 << 21
    assert _known.constant(np.arange(many), np.arange(many)) is None
    assert _known.constant(np.zeros(many), np.zeros(3 * many)) is not None
    assert _known.constant(jnp.zeros(1 << 17), jnp.zeros(1 << 17)) is None
    assert _known.constant(jax.random.key(0), jax.random.key(0)) is None
