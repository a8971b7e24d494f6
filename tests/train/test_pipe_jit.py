"""`pipe.jit`: a function of leaves on several devices, with the numbers of one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jpipe

from .. import reference as ref

DEVICES = jax.devices()[:3]
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


FUNCTIONS = {
    "global norm": (optax.tree.norm, lambda: (tree(),)),
    "average": (
        lambda a, p: optax.incremental_update(p, a, 0.1),
        lambda: (tree(), tree(1)),
    ),
    "inner product": (optax.tree.vdot, lambda: (tree(), tree(1))),
    "its gradient": (
        jax.grad(lambda p: optax.tree.norm(p) ** 3),
        lambda: (tree(),),
    ),
    "branches": (
        lambda yes, p, q: jax.lax.cond(yes, lambda: p, lambda: optax.tree.add(p, q)),
        lambda: (optax.tree.norm(on_one(tree())) > 1, tree(), tree(1)),
    ),
    "branches in branches": (
        lambda i, p, q: jax.lax.switch(
            i,
            [
                lambda: p,
                lambda: jax.lax.cond(i > 0, lambda: q, lambda: p),
                lambda: optax.tree.sub(p, q),
            ],
        ),
        lambda: (1, tree(), tree(1)),
    ),
    "a loop in a branch": (
        lambda n, p: jax.lax.cond(
            n > 0,
            lambda: jax.lax.while_loop(
                lambda q: q[0]["b"][0] < n, fully(lambda x: x + 1), p
            ),
            lambda: p,
        ),
        # With this n the branch that is not taken would never end.
        lambda: (-jnp.inf, tree()),
    ),
    "a scan": (
        lambda p: jax.lax.fori_loop(0, 3, lambda i, q: fully(lambda x: 2 * x)(q), p),
        lambda: (tree(),),
    ),
    "a while loop": (
        lambda p: jax.lax.while_loop(
            lambda q: q[2]["b"][1] < 10, fully(lambda x: x + 1), p
        ),
        lambda: (tree(),),
    ),
    "noise": (
        lambda key, p: jax.tree.map(
            lambda x: x + jax.random.normal(key, x.shape, x.dtype), p
        ),
        lambda: (jax.random.key(3), tree()),
    ),
    "keys": (lambda key: jax.random.split(key, 2), lambda: (jax.random.key(3),)),
    "zeros": (lambda p: (jax.tree.map(jnp.zeros_like, p), 0), lambda: (tree(),)),
    "constants": (
        lambda p: (1, 2.5, None, True, {"a": jnp.arange(3)}),
        lambda: (tree(),),
    ),
    "arguments": (lambda p, q, s: (q, p, q, s, s), lambda: (tree(), np.ones(2), 1.5)),
    "one array twice": (lambda p, q: optax.tree.add(p, q), lambda: (tree(),) * 2),
    "an inner jit that returns twice": (
        lambda p: jax.jit(lambda x: (x, x, 2 * x))(p[2]["w"]),
        lambda: (tree(),),
    ),
    "half and a scalar": (
        lambda d, p: jax.tree.map(lambda x: d * x, p),
        lambda: (0.99, tree(dtype=jnp.bfloat16)),
    ),
    "empty": (lambda a, *b: (a, b), lambda: ((), {"x": [None]})),
    "integers": (lambda p, n: jax.tree.map(lambda x: x * n, p), lambda: (tree(), 3)),
}


# What is like the parameters stays with them.
MIRRORING = ["average", "branches", "a scan", "a while loop", "noise", "integers"]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_give_what_jax_jit_gives_on_one_device(double, name):
    function, make = FUNCTIONS[name]
    args = make()
    actual, expected = PIPE.jit(function)(*args), jax.jit(function)(*on_one(args))
    ref.assert_close(actual, expected, ref.FLOAT64)
    assert jax.tree.map(jax.typeof, actual) == jax.tree.map(jax.typeof, expected)
    if name in MIRRORING:
        assert devices_of(actual) == devices_of(tree())


def test_what_follows_from_nothing_placed_goes_where_its_path_is():
    @PIPE.jit
    def start(state, n):
        p = state["params"]
        zeros = jax.tree.map(jnp.zeros_like, p)
        return zeros, {"m": zeros, "count": 0}, {"last": zeros[2]}, 2 * n

    zeros, state, last, n = start({"params": tree(dtype=jnp.float32)}, np.ones(3))
    assert devices_of(zeros) == devices_of(state["m"])
    assert devices_of(zeros) == devices_of(tree(dtype=jnp.float32))
    assert state["count"].devices() == n.devices() == {DEVICES[0]}
    assert n.committed
    # Its paths have one key each: both layers have a bias.
    assert devices_of(last["last"]) == {"w": {DEVICES[0]}, "b": {DEVICES[0]}}
    leaves = jax.tree.leaves((zeros, state, last))
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


def test_only_what_crosses_is_moved(moved):
    average = PIPE.jit(lambda a, p: optax.incremental_update(p, a, 0.1))
    norm = PIPE.jit(optax.tree.norm)
    p, q = tree(dtype=jnp.float32), tree(1, dtype=jnp.float32)
    moved.clear()
    average(p, q)
    assert not moved
    norm(p)
    assert moved == [(1, DEVICES[2])]


@pytest.mark.parametrize("place", [np.asarray, jnp.asarray])
def test_what_comes_from_the_host_is_copied(place):
    memory = np.zeros(256 + 16, np.float32)
    start = -memory.ctypes.data % 64 // 4
    given = memory[start : start + 256]  # JAX would take it as it is
    result = jax.block_until_ready(PIPE.jit(lambda x: x)(place(given)))
    given[:] = 1
    assert not np.any(result)


LABELS = np.arange(6) % 4
LOGITS = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)


@pytest.mark.parametrize(
    "labels",
    [
        LABELS,
        list(LABELS),
        jnp.asarray(LABELS),
        jax.device_put(LABELS, jax.devices()[0]),
        jax.device_put(LABELS, jax.devices()[2]),
        jax.device_put(LABELS, jax.devices()[7]),
    ],
    ids=["numpy", "list", "uncommitted", "first", "last", "none of the pipeline's"],
)
def test_accuracy_with_labels_from_anywhere(labels):
    @PIPE.jit
    def accuracy(logits, labels):
        """The share of right ones."""
        return jnp.mean(logits.argmax(-1) == jnp.asarray(labels))

    logits = jax.device_put(LOGITS, DEVICES[2])
    result = accuracy(logits, labels=labels)
    assert result == np.mean(LOGITS.argmax(-1) == LABELS)
    assert result.devices() == {DEVICES[2]}
    assert accuracy.__name__ == "accuracy"
    assert accuracy.__doc__ == "The share of right ones."


def counting(log):
    def f(p, scale=1.0, *, power=2):
        log.append(1)
        return jax.tree.map(lambda x: scale * x**power, p)

    return f


def test_programs_are_found_by_all_that_jax_tells_apart():
    log = []
    f = PIPE.jit(counting(log))
    p = tree(dtype=jnp.float32)
    calls = {
        "first": lambda: f(p),
        "scalar": lambda: f(p, 2.0),
        "typed scalar": lambda: f(p, np.float32(2)),
        "by name": lambda: f(p, power=3),
        "elsewhere": lambda: f(on_one(p)),
        "uncommitted": lambda: f(jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), p)),
        "structure": lambda: f(list(p)),
        "dtype": lambda: f(tree(dtype=jnp.bfloat16)),
        "shape": lambda: f([p[0], {}, p[0]]),
    }
    for i, call in enumerate(calls.values()):
        call()
        assert len(log) == i + 1
    for call in calls.values():
        call()
    assert len(log) == len(calls)
    ref.assert_close(f(p, 3.0), jax.tree.map(lambda x: 3 * x**2, on_one(p)), 1e-6)
    assert len(log) == len(calls)


def test_second_calls_trace_and_compile_nothing(caplog):
    traces = []

    def function(p, q):
        traces.append(p)
        return optax.tree.add(p, q), optax.tree.norm(p)

    f = PIPE.jit(function)
    p = tree(dtype=jnp.float32)
    total, _ = f(p, p)
    f(total, p)
    before = len(traces)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        f(total, total)
    assert len(traces) == before
    assert not [r for r in caplog.records if "ompil" in r.getMessage()]


def test_static_arguments_are_compared_by_value():
    log = []

    def power(n, p, name):
        log.append(name)
        return jax.tree.map(lambda x: x**n if name == "power" else x, p)

    f = PIPE.jit(power, static_argnums=(0, -1))
    p = tree(dtype=jnp.float32)
    for _ in range(2):
        ref.assert_close(
            f(3, p, "power"), jax.tree.map(lambda x: x**3, on_one(p)), 1e-6
        )
        ref.assert_close(f(2, p, "power"), jax.tree.map(jnp.square, on_one(p)), 1e-6)
        ref.assert_equal(f(2, p, "none"), p)
    assert log == ["power", "power", "none"]
    f(2.0, p, "none")
    assert len(log) == 4
    with pytest.raises(TypeError, match="unhashable") as refusal:
        f([3], p, "power")
    assert refusal.value.__notes__ == ["argument 0 of power is in static_argnums"]


class TestDonation:
    @staticmethod
    def step(p, m, g):
        m = jax.tree.map(lambda m, g: 0.9 * m + g, m, g)
        return jax.tree.map(lambda p, m: p - 0.1 * m, p, m), m

    def test_takes_the_memory_of_what_is_given(self):
        f = PIPE.jit(self.step, donate_argnums=(0, -2))
        given = [tree(i, jnp.float32) for i in range(3)]
        expected = jax.jit(self.step)(*on_one(given))
        # Another donates nothing.
        kept = PIPE.jit(self.step)(*given)
        actual = f(*given)
        ref.assert_close(actual, expected, 1e-6)
        ref.assert_close(kept, expected, 1e-6)
        gone = [[x.is_deleted() for x in jax.tree.leaves(arg)] for arg in given]
        assert gone == [[True] * 4, [True] * 4, [False] * 4]
        with pytest.raises(ValueError, match=r"pipe\.jit without donate_argnums"):
            f(*given)
        with pytest.raises(ValueError, match="this state was donated"):
            PIPE.jit(optax.tree.norm)(given[0])

    def test_of_what_is_read_twice_and_elsewhere(self):
        def f(p):
            return jax.tree.map(lambda x: x * optax.tree.norm(p), p), p[0]["w"]

        p = tree(dtype=jnp.float32)
        expected = jax.jit(f)(on_one(p))
        ref.assert_close(PIPE.jit(f, donate_argnums=0)(p), expected, 1e-6)

    def test_of_one_array_given_twice_is_refused(self):
        f = PIPE.jit(optax.tree.add, donate_argnums=1)
        p = tree(dtype=jnp.float32)
        with pytest.raises(
            ValueError, match=r"argument 0\[0\]\['b'\] and argument 1"
        ) as e:
            f(p, p)
        assert "jnp.copy" in str(e.value)
        assert not any(x.is_deleted() for x in jax.tree.leaves(p))
        # What is only read may be one array; so may numbers.
        f = PIPE.jit(lambda a, b, p: optax.tree.add(a, b), donate_argnums=2)
        f(p, p, tree(dtype=jnp.float32))


class TestErrors:
    def test_of_the_function_are_its_own_with_a_note(self):
        def unlucky(p):
            raise KeyError("no luck")

        with pytest.raises(KeyError, match="no luck") as error:
            PIPE.jit(unlucky)(tree(dtype=jnp.float32))
        note = error.value.__notes__[0]
        assert note.startswith("raised by unlucky, which pipe.jit traces")
        assert "float32[3,4]" in note

    def test_name_all_that_is_no_array(self):
        f = PIPE.jit(lambda *a, **k: 0, static_argnums=0)
        with pytest.raises(TypeError, match="static_argnums") as error:
            f("b", [np.ones(2), "a"], mode="train")
        assert "argument 1[1] is a str" in str(error.value)
        assert "argument 'mode' is a str" in str(error.value)

    def test_name_what_is_sharded(self):
        mesh = jax.make_mesh((2,), ("x",), devices=DEVICES[:2])
        spec = jax.sharding.PartitionSpec("x")
        x = jax.device_put(np.ones(4), jax.sharding.NamedSharding(mesh, spec))
        with pytest.raises(ValueError, match=r"argument 0\['x'\] is on 2 devices"):
            PIPE.jit(lambda x: x)({"x": x})

    @pytest.mark.parametrize("transform", [jax.jit, jax.grad, jax.vmap])
    def test_of_traces(self, transform):
        norm = PIPE.jit(lambda x: jnp.sum(x**2))
        norm(np.ones(3, np.float32))
        with pytest.raises(TypeError, match=r"call it outside of jax\.jit"):
            transform(norm)(np.ones(3, np.float32))

    def test_of_arguments_of_jit(self):
        with pytest.raises(TypeError, match=r"pipe\.jit takes a function, not a list"):
            PIPE.jit([])
        with pytest.raises(ValueError, match=r"both name \[1\]"):
            PIPE.jit(optax.tree.norm, donate_argnums=(0, 1), static_argnums=1)


def test_such_functions_are_parts_of_one_another(moved):
    norm = PIPE.jit(optax.tree.norm)

    @functools.partial(PIPE.jit, donate_argnums=0)
    def scale(p):
        scale = 1 / norm(p)
        return jax.tree.map(lambda x: scale * x, p)

    p = tree(dtype=jnp.float32)
    expected = jax.jit(lambda p: optax.tree.scale(1 / optax.tree.norm(p), p))
    expected = expected(on_one(p))
    moved.clear()
    ref.assert_close(scale(p), expected, 1e-6)
    assert [size for size, _ in moved] == [1, 1]


def test_prints_without_operands_are_printed(capfd):
    @PIPE.jit
    def f(p):
        jax.debug.print("here")
        jax.debug.print("{}", jnp.sum(p[2]["b"] * 0))
        return p[0]["w"]

    f(tree(dtype=jnp.float32))
    jax.effects_barrier()
    assert sorted(capfd.readouterr().out.split()) in (["-0.0", "here"], ["0.0", "here"])


def test_closed_over_arrays_may_be_anywhere():
    p, q = tree(dtype=jnp.float32), tree(1, jnp.float32)
    actual = PIPE.jit(lambda p: optax.tree.add(p, q))(p)
    ref.assert_equal(actual, optax.tree.add(on_one(p), on_one(q)))
    assert devices_of(actual) == devices_of(p)


def test_a_device_that_serves_several_stages_is_one_place(moved):
    pipe = jpipe.pipeline([jnp.sin] * 3, 2, devices=[*DEVICES[:2], DEVICES[0]])
    p = pipe.place([{"a": np.float32(i)} for i in range(3)])
    moved.clear()
    assert pipe.jit(optax.tree.norm)(p) == np.sqrt(np.float32(5))
    assert len(moved) <= 2
