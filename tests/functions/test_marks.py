"""Marks on values, followed through a jaxpr."""

import jax
import jax.numpy as jnp
import pytest

from jpipe._jaxprs._marks import follow, mark


def a(x):
    return mark(x, "mark a")


def b(x):
    return mark(x, "mark b")


def loop(x):
    return jax.lax.scan(lambda c, y: (c + 1, a(y)), x, jnp.stack([x, x]))


def carried(x):
    return jax.lax.fori_loop(0, 2, lambda _, c: (c[1], a(c[2]), c[2]), (x, x, x))


def grows(x):
    return jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: a(c) + 1, x)


def decides(x):
    return jax.lax.cond(a(x).sum() > 0, b, lambda x: x, x)


@jax.custom_vjp
def custom(x, y):
    return a(x), y


custom.defvjp(lambda x, y: (custom(x, y), None), lambda _, g: g)


def callback(x):
    spec = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(lambda x, y: (x, y), (spec, spec), a(x), x)


def solved(x):
    """An equation whose operands are not those of the jaxprs inside of it."""
    return jax.lax.custom_linear_solve(lambda y: 2 * y, x, lambda _, y: a(y) / 2)


@pytest.mark.parametrize(
    ("function", "results", "remarked"),
    [
        (lambda x: (a(x), x, a(x) + b(2 * x)), ["a", "", "ab"], ""),
        (lambda x: b(jax.jit(a)(x)), ["ab"], "a"),
        (lambda x: jax.checkpoint(lambda x: (a(x), jnp.sin(x)))(x), ["a", ""], ""),
        (lambda x: jax.checkpoint(jax.jit(a))(jax.jit(a)(x)), ["a"], "a"),
        (lambda x: jax.lax.cond(x.sum() > 0, a, b, x), ["ab"], ""),
        (decides, ["ab"], ""),
        (loop, ["", "a"], ""),
        (carried, ["a", "a", ""], ""),
        (grows, ["a"], "a"),
        (lambda x: custom(x, 2 * x), ["a", ""], ""),
        (callback, ["a", "a"], ""),
        (solved, ["a"], ""),
    ],
)
def test_marks_are_followed(function, results, remarked):
    closed = jax.make_jaxpr(function)(jnp.ones(2))
    found, again = follow(closed, "mark ")
    short = [letters(marks.all) for marks in found]
    assert short == [set(marks) for marks in results]
    assert {text.removeprefix("mark ") for text in again} == set(remarked)


def chooses(x):
    return jax.lax.cond(a(x).sum() > 0, b, lambda x: 2 * b(x), x)


@pytest.mark.parametrize(
    ("function", "results"),
    [
        (lambda x: (a(x), 2 * a(x), b(a(x))), ["a", "-a", "b-a"]),
        (lambda x: (a(x)[:, None], jnp.clip(a(x), 0, 1)), ["a", "-a"]),
        (lambda x: jax.lax.cond(x.sum() > 0, a, b, x), ["ab"]),
        (chooses, ["b-ab"]),
        (loop, ["", "a"]),
        (jax.vmap(a, out_axes=1), ["a"]),
        (jax.checkpoint(jax.jit(a)), ["a"]),
    ],
)
def test_what_is_marked_is_told_from_what_follows_from_it(function, results):
    closed = jax.make_jaxpr(function)(jnp.ones((2, 2)))
    found, _ = follow(closed, "mark ")
    for marks, expected in zip(found, results, strict=True):
        here, _, behind = expected.partition("-")
        assert letters(marks.here) == set(here)
        assert letters(marks.behind) == set(behind)


def test_marks_of_others_are_nothing():
    closed = jax.make_jaxpr(a)(jnp.ones(2))
    (marks,), again = follow(closed, "other")
    assert not again
    assert not letters(marks.all, "other")


def letters(marks, prefix="mark "):
    return {text.removeprefix(prefix) for text in marks if text.startswith(prefix)}


def turned(x, y):
    return jax.lax.fori_loop(0, 2, lambda _, c: (c[1], c[0]), (x, y))


def shifted(x, y):
    """Perhaps it does not turn at all."""
    return jax.lax.while_loop(lambda c: False, lambda c: (c[1], c[1]), (x, y))


def test_how_often_a_loop_turns_is_in_what_it_gives():
    def loop(x, y):
        return jax.lax.fori_loop(0, x[0, 0].astype(int), lambda _, c: c * 2, y)

    x = jnp.ones((2, 2))
    (marks,), _ = follow(jax.make_jaxpr(loop)(x, x), "mark ")
    assert marks.inputs == {0, 1}


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (lambda x, y: (y, x + y, 1.0 * x), [1, None, None]),
        (jax.checkpoint(lambda x, y: (y, jax.jit(jnp.sin)(y), x)), [1, None, 0]),
        (lambda x, y: (x.T, x.reshape(4)), [None, None]),
        (lambda x, y: (x.T.T, x.T.copy().T, (2 * x).T.T), [0, None, None]),
        (lambda x, y: jax.lax.scan(lambda c, z: (c, z), x.T, y.T)[1].T, [1]),
        (jax.vmap(lambda x, y: (x, y), in_axes=1, out_axes=1), [0, 1]),
        (jax.vmap(lambda x, y: (x, y), in_axes=1, out_axes=0), [None, None]),
        (lambda x, y: jax.lax.scan(lambda c, z: (c, z), x, y), [0, 1]),
        (lambda x, y: jax.lax.scan(lambda c, z: (c + 1, z), x, y), [None, 1]),
        (turned, [None, None]),
        (lambda x, y: jax.lax.cond(x.sum() > 0, lambda: x, lambda: 2 * x), [None]),
        (lambda x, y: jax.lax.cond(True, lambda: x, lambda: jnp.ones((2, 2))), [None]),
        (shifted, [None, 1]),
        (jax.vmap(lambda x, y: (y, x), in_axes=(0, 0)), [1, 0]),
    ],
)
def test_an_input_is_known_again(function, inputs):
    x = jnp.ones((2, 2))
    found, _ = follow(jax.make_jaxpr(function)(x, 2 * x), "mark ")
    assert [marks.input for marks in found] == inputs
