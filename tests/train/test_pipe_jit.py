"""`pipe.jit`: a function of leaves on several devices, with the numbers of one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jpipe

from .. import reference as ref
from ..compiling import log_compiled

ALL = jax.devices()
DEVICES = ALL[:3]
PIPE = jpipe.pipeline([jnp.sin, jnp.cos, jnp.tanh], 2, devices=DEVICES)


def tree(seed=0, dtype=jnp.float64):
    """One entry per layer, each on its device; the second has nothing."""
    rng = np.random.default_rng(seed)
    shapes = [{"w": (3, 4), "b": (4,)}, {}, {"w": (4, 2), "b": (2,)}]
    made = [
        {name: jnp.asarray(rng.normal(size=shape), dtype) for name, shape in of.items()}
        for of in shapes
    ]
    return PIPE.place(made)


def devices_of(tree):
    return jax.tree.map(lambda leaf: leaf.devices(), tree)


def on_one(args):
    """The same values, arrays on the first device."""
    return jax.tree.map(
        lambda x: jax.device_put(x, DEVICES[0]) if isinstance(x, jax.Array) else x, args
    )


def fully(f):
    return functools.partial(jax.tree.map, f)


def branches(i, p, q):
    """A switch by a number of all places, with a branch in a branch."""
    both = lambda: jax.lax.cond(i > 0, lambda: optax.tree.sub(p, q), lambda: p)  # noqa: E731
    return jax.lax.switch(i + (optax.tree.norm(p) > 1), [lambda: p, lambda: q, both])


def loops(n, p):
    """With an infinite ``n`` the branch that is not taken would never end."""
    more, twice = fully(lambda x: x + 1), fully(lambda x: 2 * x)
    return jax.lax.cond(
        n > 0,
        lambda: jax.lax.while_loop(lambda q: q[0]["b"][0] < n, more, p),
        lambda: jax.lax.fori_loop(0, 3, lambda i, q: twice(q), p),
    )


def noise(key, p):
    return fully(lambda x: x + jax.random.normal(key, x.shape, x.dtype))(p)


def arguments(p, q, s):
    twice = jax.jit(lambda x: (x, x, 2 * x))(s)
    return q, p, q, s, twice, optax.tree.add(p, q), [None]


KEY = jax.random.key(3)
FUNCTIONS = [
    (optax.tree.norm, lambda: (tree(),)),
    (optax.incremental_update, lambda: (tree(), tree(1), 0.1)),
    (branches, lambda: (1, tree(), tree(1))),
    (loops, lambda: (-jnp.inf, tree())),
    (noise, lambda: (KEY, tree())),
    (arguments, lambda: (*(tree(),) * 2, 1.5)),
]


# What is like the parameters stays with them.
MIRRORING = [optax.incremental_update, branches, noise]


@pytest.mark.parametrize(("function", "make"), FUNCTIONS)
def test_functions_give_what_jax_jit_gives_on_one_device(double, function, make):
    args = make()
    actual, expected = PIPE.jit(function)(*args), jax.jit(function)(*on_one(args))
    ref.assert_close(actual, expected, ref.FLOAT64)
    assert jax.tree.map(jax.typeof, actual) == jax.tree.map(jax.typeof, expected)
    if function in MIRRORING:
        assert devices_of(actual) == devices_of(tree())


def test_second_calls_trace_and_compile_nothing():
    """A program is found by all that JAX tells apart in the arguments."""
    log = []

    @PIPE.jit
    def f(p, scale=1.0, *, power=2):
        log.append(1)
        return jax.tree.map(lambda x: scale * x**power, p)

    p = tree(dtype=jnp.float32)
    calls = [
        lambda: f(p),
        lambda: f(p, 2.0),
        lambda: f(p, power=3),
        lambda: f(on_one(p)),
        lambda: f(jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), p)),
        lambda: f([p[0], {}, p[0]]),
    ]
    for i, call in enumerate(calls):
        call()
        assert len(log) == i + 1
    with log_compiled() as compiled:
        for call in calls:
            call()
    assert len(log) == len(calls)
    assert compiled == []
    ref.assert_close(f(p, 3.0), jax.tree.map(lambda x: 3 * x**2, on_one(p)), 1e-6)
    assert len(log) == len(calls)


def test_static_arguments_are_compared_by_value():
    log = []

    def power(n, p, name):
        log.append(name)
        return jax.tree.map(lambda x: x**n if name == "power" else x, p)

    f = PIPE.jit(power, static_argnums=(0, -1))
    p = tree(dtype=jnp.float32)
    for _ in range(2):
        squares = jax.tree.map(jnp.square, on_one(p))
        ref.assert_close(f(2, p, "power"), squares, 1e-6)
        ref.assert_equal(f(2, p, "none"), p)
    assert log == ["power", "none"]
    f(2.0, p, "none")
    assert len(log) == 3
    with pytest.raises(TypeError, match="unhashable") as refusal:
        f([3], p, "power")
    assert refusal.value.__notes__ == ["argument 0 of power is in static_argnums"]


class TestDonation:
    @staticmethod
    def step(p, m, g):
        """What is donated is read again after a part of it was overwritten."""
        m = jax.tree.map(lambda m, g: 0.9 * m + g * optax.tree.norm(m), m, g)
        return jax.tree.map(lambda p, m: p - 0.1 * m, p, m), m, p[0]["w"]

    def test_overwrites_what_is_given_and_nothing_else(self):
        given = [tree(i, jnp.float32) for i in range(3)]
        expected = jax.jit(self.step)(*on_one(given))
        ref.assert_close(PIPE.jit(self.step)(*given), expected, 1e-6)
        f = PIPE.jit(self.step, donate_argnums=(0, -2))
        ref.assert_close(f(*given), expected, 1e-6)
        gone = [[x.is_deleted() for x in jax.tree.leaves(arg)] for arg in given]
        assert gone == [[True] * 4, [True] * 4, [False] * 4]
        with pytest.raises(ValueError, match=r"pipe\.jit without donate_argnums"):
            f(*given)
        with pytest.raises(ValueError, match="this state was donated"):
            PIPE.jit(optax.tree.norm)(given[0])

    def test_one_array_given_twice_is_refused(self):
        f, p = PIPE.jit(optax.tree.add, donate_argnums=1), tree(dtype=jnp.float32)
        says = r"argument 0\[0\]\['b'\] and argument 1.*jnp\.copy"
        with pytest.raises(ValueError, match=says):
            f(p, p)
        assert not any(x.is_deleted() for x in jax.tree.leaves(p))
        # What is only read may be one array.
        f = PIPE.jit(lambda a, b, p: optax.tree.add(a, b), donate_argnums=2)
        f(p, p, tree(dtype=jnp.float32))


class TestErrors:
    def test_name_arguments_that_are_no_arrays_or_sharded(self):
        f = PIPE.jit(lambda *a, **k: 0, static_argnums=0)
        with pytest.raises(TypeError, match="static_argnums") as error:
            f("b", [np.ones(2), "a"], mode="train")
        assert "argument 1[1] is a str" in str(error.value)
        assert "argument 'mode' is a str" in str(error.value)
        mesh = jax.make_mesh((2,), ("x",), devices=DEVICES[:2])
        rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
        x = jax.device_put(np.ones(4), rows)
        with pytest.raises(ValueError, match=r"argument 0\['x'\] is on 2 devices"):
            PIPE.jit(lambda x: x)({"x": x})

    def test_refuse_a_call_that_is_traced(self):
        norm = PIPE.jit(lambda x: jnp.sum(x**2))
        norm(np.ones(3, np.float32))
        with pytest.raises(TypeError, match=r"call it outside of jax\.jit"):
            jax.grad(norm)(np.ones(3, np.float32))


def test_only_what_crosses_is_moved(moved):
    """Nothing; a norm from each device; that and back of one function in another."""
    p, q = tree(dtype=jnp.float32), tree(1, dtype=jnp.float32)
    norm = PIPE.jit(optax.tree.norm)
    average = PIPE.jit(lambda a, p: optax.incremental_update(p, a, 0.1))
    scale = PIPE.jit(lambda p: optax.tree.scale(1 / norm(p), p))
    found = []
    for function, args in ((average, (p, q)), (norm, (p,)), (scale, (p,))):
        moved.clear()
        result = function(*args)
        found.append([size for size, _ in moved])
    assert found == [[], [1], [1, 1]]
    expected = optax.tree.scale(1 / optax.tree.norm(on_one(p)), on_one(p))
    ref.assert_close(result, expected, 1e-6)
