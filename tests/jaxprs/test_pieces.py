"""A computation on arrays in pieces is the one on whole arrays.

Programs are drawn operation by operation, on a stack whose layers are along any axis.
No operation knows of pieces. What the rewritten program computes is compared with
plain evaluation: only sums over layers are added in another order.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies
from jax.extend import core

from jpipe._jaxprs import _jaxpr, _pieces, _piecewise
from jpipe._jaxprs._pieces import Pieces
from jpipe._jaxprs._piecewise import PiecewiseJaxpr

# Of the largest number in any result: sums of some hundred numbers in another order.
TOLERANCES = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 1e-2}


def specs(*arrays: Any) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]


def cut(array: Any, pieces: Pieces) -> list[Any]:
    return np.split(np.asarray(array), pieces.ends[:-1], pieces.axis)


def rewritten(
    function: Callable[..., Any],
    args: list[Any],
    input_pieces: dict[int, Pieces],
    output_pieces: dict[int, Pieces] | None = None,
) -> PiecewiseJaxpr:
    closed, _ = _jaxpr.trace(function, *specs(*args))
    return _piecewise.run_in_pieces(
        closed,
        input_pieces,
        output_pieces or {},
        keeps_pieces=output_pieces is None,
        num_fixed=0,
    )


def evaluated(
    piecewise: PiecewiseJaxpr, args: list[Any], input_pieces: dict[int, Pieces]
) -> list[np.ndarray]:
    """The results as whole arrays, from whole arguments."""
    flat = list[Any]()
    for i, arg in enumerate(args):
        flat += cut(arg, input_pieces[i]) if i in input_pieces else [arg]
    flat += map(np.int32, piecewise.begins)
    arrays = iter(jax.jit(core.jaxpr_as_fun(piecewise.closed))(*flat))
    results = list[np.ndarray]()
    num_results = len(piecewise.closed.jaxpr.outvars) - sum(
        len(pieces.sizes) - 1 for pieces in piecewise.output_pieces.values()
    )
    for i in range(num_results):
        if (pieces := piecewise.output_pieces.get(i)) is None:
            results.append(np.asarray(next(arrays)))
            continue
        parts = [np.asarray(next(arrays)) for _ in pieces.sizes]
        assert [part.shape[pieces.axis] for part in parts] == [*pieces.sizes]
        results.append(np.concatenate(parts, pieces.axis))
    return results


def assert_equal_results(
    function: Callable[..., Any],
    args: list[Any],
    input_pieces: dict[int, Pieces],
    output_pieces: dict[int, Pieces] | None = None,
) -> PiecewiseJaxpr:
    piecewise = rewritten(function, args, input_pieces, output_pieces)
    expected = jax.tree.leaves(jax.jit(function)(*args))
    actual = evaluated(piecewise, args, input_pieces)
    largest = max(float(abs(x).max()) for x in expected)
    for x, y in zip(actual, expected, strict=True):
        assert x.dtype == y.dtype
        tolerance = TOLERANCES.get(str(x.dtype), 0) * largest
        np.testing.assert_allclose(
            x.astype(float), y.astype(float), rtol=0, atol=tolerance
        )
    return piecewise


# ------------------------------------------------------------------- random programs


def scan(draw: Any, x: jax.Array) -> jax.Array:
    """A scan over the first axis; its carry may be a literal, or a constant as well."""
    row = jnp.cos(jnp.arange(math.prod(x.shape[1:]), dtype=x.dtype)).reshape(
        x.shape[1:]
    )
    init = draw(strategies.sampled_from(["literal", "row", "first"]))
    carry = {"literal": 0.5, "row": row, "first": x[0]}[init]
    is_doubled = draw(strategies.booleans())

    def body(carry: Any, xs: Any) -> Any:
        a, b, i = xs
        new_carry = jnp.tanh(jnp.mean(carry + a) + row * 0.1 + b)
        if init == "literal":
            new_carry = new_carry.mean()
        return new_carry, (new_carry * i, a + row)

    last, (ys, zs) = jax.lax.scan(
        body,
        carry,
        (x, x if is_doubled else jnp.sin(x), jnp.arange(x.shape[0], dtype=x.dtype)),
        reverse=draw(strategies.booleans()),
        unroll=draw(strategies.sampled_from([1, 2])),
    )
    ys = ys.reshape(ys.shape + (1,) * (x.ndim - ys.ndim))
    return zs + ys + last


def transpose(draw: Any, x: jax.Array) -> jax.Array:
    return x.transpose(draw(strategies.permutations(range(x.ndim))))


def reduce(draw: Any, x: jax.Array) -> jax.Array:
    axis = draw(strategies.integers(0, x.ndim - 1))
    reduction = draw(strategies.sampled_from([jnp.sum, jnp.mean, jnp.max, jnp.min]))
    return x - reduction(x, axis=axis, keepdims=True)


def arg_extreme(draw: Any, x: jax.Array) -> jax.Array:
    axis = draw(strategies.integers(0, x.ndim - 1))
    return x + jnp.expand_dims(jnp.argmax(x, axis), axis).astype(x.dtype)


def accumulate(draw: Any, x: jax.Array) -> jax.Array:
    axis = draw(strategies.integers(0, x.ndim - 1))
    operation = draw(strategies.sampled_from([jnp.cumsum, jnp.sort]))
    return operation(x, axis=axis)


def join_or_divide_axes(draw: Any, x: jax.Array) -> jax.Array:
    shapes = [(x.size,), (*x.shape, 1), (1, *x.shape)]
    if x.ndim > 1:
        shapes += [(x.shape[0] * x.shape[1], *x.shape[2:])]
    if x.shape[0] % 2 == 0:
        shapes += [
            (2, x.shape[0] // 2, *x.shape[1:]),
            (x.shape[0] // 2, 2, *x.shape[1:]),
        ]
    return x.reshape(draw(strategies.sampled_from(shapes)))


def broadcast(draw: Any, x: jax.Array) -> jax.Array:
    axis = draw(strategies.integers(0, x.ndim))
    expanded = jnp.expand_dims(x, axis)
    shape = list(expanded.shape)
    shape[axis] = 2
    return jnp.broadcast_to(expanded, shape).sum(axis) + expanded.squeeze(axis)


def take(draw: Any, x: jax.Array) -> jax.Array:
    """Slices along an axis: one row, several, or by a start that is an array."""
    axis = draw(strategies.integers(0, x.ndim - 1))
    length = x.shape[axis]
    begin = draw(strategies.integers(0, length - 1))
    end = draw(strategies.integers(begin + 1, length))
    step = draw(strategies.sampled_from([1, 2]))
    rows = jax.lax.slice_in_dim(x, begin, end, step, axis)
    if draw(strategies.booleans()):
        rows = jax.lax.dynamic_slice_in_dim(x, begin, end - begin, axis)
    return x * rows.mean() + rows.sum(axis, keepdims=True)


def index_by_data(draw: Any, x: jax.Array) -> jax.Array:
    index = jnp.argmax(x.reshape(-1)) % x.shape[0]
    return x + jax.lax.dynamic_index_in_dim(x, index, 0)


def join_arrays(draw: Any, x: jax.Array) -> jax.Array:
    axis = draw(strategies.integers(0, x.ndim - 1))
    length = x.shape[axis]
    joined = jnp.concatenate([x, jnp.cos(x)], axis)
    return jax.lax.slice_in_dim(joined, 1, length + 1, axis=axis)


def divide(draw: Any, x: jax.Array) -> jax.Array:
    axis = draw(strategies.integers(0, x.ndim - 1))
    if draw(strategies.booleans()):
        first, *others = jnp.unstack(x, axis=axis)
        return (
            jnp.expand_dims(first, axis) - x * sum(others, jnp.zeros_like(first)).sum()
        )
    first, second = jnp.split(x, [x.shape[axis] // 2], axis)
    return x * (1 + first.sum()) - second.mean()


def multiply_matrices(draw: Any, x: jax.Array) -> jax.Array:
    flat = x.reshape(x.shape[0], -1)
    if draw(strategies.booleans()):
        product = jnp.einsum("li,lj->lij", flat, flat).mean(2)  # the layers as a batch
    else:
        weights = jnp.sin(jnp.arange(flat.shape[1] ** 2, dtype=x.dtype))
        product = flat @ weights.reshape(flat.shape[1], -1)
    return product.reshape(x.shape)


def elementwise(draw: Any, x: jax.Array) -> jax.Array:
    choice = draw(strategies.integers(0, 4))
    if choice == 0:
        return x * x
    if choice == 1:
        return jnp.where(x > 0.3, 0.5, x)
    if choice == 2:
        return x.astype(jnp.float32).astype(x.dtype) + 1
    if choice == 3:
        return jnp.clip(x, -0.7, 0.7)
    return jnp.sin(x) / 2


OPERATIONS = [
    accumulate,
    arg_extreme,
    broadcast,
    divide,
    elementwise,
    index_by_data,
    join_arrays,
    join_or_divide_axes,
    multiply_matrices,
    reduce,
    scan,
    take,
    transpose,
]


@strategies.composite
def partitions(draw: Any, length: int, axis: int) -> Pieces:
    inner = list(range(1, length))
    ends = draw(strategies.sets(strategies.sampled_from(inner), max_size=3))
    bounds = [0, *sorted(ends), length]
    return Pieces(axis, tuple(b - a for a, b in itertools.pairwise(bounds)))


@given(data=strategies.data())
def test_random_programs_in_pieces(data: Any) -> None:
    draw = data.draw
    length = draw(strategies.integers(2, 6), label="layers")
    axis = draw(strategies.integers(0, 2), label="axis")
    shape = (2, 3)
    shape = (*shape[:axis], length, *shape[axis:])
    input_pieces = {
        0: draw(partitions(length, axis), label="pieces of the first"),
        1: draw(partitions(length, axis), label="pieces of the second"),
    }
    operations = draw(
        strategies.lists(strategies.sampled_from(OPERATIONS), min_size=1, max_size=5)
    )
    # What is drawn inside of a function must be the same in each trace of it.
    choices = list[Any]()

    with jax.enable_x64(True):
        values = np.random.default_rng(0).normal(size=(2, *shape))

        def function(x: jax.Array, y: jax.Array) -> Any:
            remaining = iter(list(choices))

            def choose(strategy: Any) -> Any:
                if (choice := next(remaining, None)) is None:
                    choice = draw(strategy)
                    choices.append(choice)
                return choice

            z = x + y * 0.5
            results = [z]
            for operation in operations:
                z = operation(choose, z)
                results.append(z)
            return results, z.sum()

        assert_equal_results(function, [*values], input_pieces)


# --------------------------------------------------------------------- rule by rule


LENGTH = 6
PIECES = Pieces(0, (2, 3, 1))


def stack(*shape: int) -> jax.Array:
    size = math.prod(shape)
    return jnp.cos(jnp.arange(LENGTH * size, dtype=jnp.float32)).reshape(LENGTH, *shape)


def layer_scan(carry: Any, xs: Any, **options: Any) -> Any:
    return jax.lax.scan(lambda c, x: (jnp.tanh(c * x), c + x), carry, xs, **options)


# Each reads the stack without ever putting it together.
KEPT = {
    "scan": lambda w: layer_scan(jnp.ones(4), w),
    "scan_reversed": lambda w: layer_scan(jnp.ones(4), w, reverse=True),
    "scan_unrolled": lambda w: layer_scan(jnp.ones(4), w, unroll=4),
    "scan_of_the_same_twice": lambda w: layer_scan(jnp.ones(4), w * w),
    "scan_twice": lambda w: layer_scan(layer_scan(jnp.ones(4), w)[0], w),
    "scan_after_cast_and_transposes": lambda w: layer_scan(
        jnp.ones(4, jnp.bfloat16), w.T.astype(jnp.bfloat16).T
    ),
    "scan_in_scan": lambda w: jax.lax.scan(
        lambda c, x: layer_scan(c, x), jnp.ones(4), jnp.stack([w, w], axis=1)
    ),
    "sum_of_squares": lambda w: (w**2).sum(),
    "largest": lambda w: jnp.abs(w).max(),
    "centred": lambda w: (w - w.mean(0)).var(1).sum(),
    "norms_of_layers": lambda w: jnp.sqrt((w**2).sum(1)).sum(),
    "one_layer": lambda w: w[3],
    "one_layer_from_the_end": lambda w: w[-1] * 2,
    "layers_of_two_pieces": lambda w: w[1:4].sum(1).sum(),
    "unstacked": lambda w: sum(jnp.unstack(w)),
    "divided_elsewhere": lambda w: [x.sum() for x in jnp.split(w, [1, 3])],
    "layers_as_a_batch": lambda w: jnp.einsum("li,lj->lij", w, w).sum(),
    "product_with_a_matrix": lambda w: (w @ jnp.ones((4, 2))).sum(),
    "new_axes": lambda w: (w[:, None] * jnp.ones((LENGTH, 3, 4))).sum(),
    "joined_axes": lambda w: w.reshape(-1).sum(),
    "divided_axis": lambda w: w.reshape(LENGTH, 2, 2).sum(2).max(),
    "sorted_in_each_layer": lambda w: jnp.sort(w, 1)[:, 0].sum(),
    "stacked_in_front": lambda w: jnp.stack([w, 2 * w]).sum(0).max(),
    "where": lambda w: jnp.where(w > 0, w, 0.1).sum(),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_a_stack_may_be_read_by(name: str) -> None:
    piecewise = assert_equal_results(KEPT[name], [stack(4)], {0: PIECES})
    assert piecewise.whole_reads == []


JOINED = {
    "sort": lambda w: jnp.sort(w, 0).sum(),
    "cumsum": lambda w: jnp.cumsum(w, 0).sum(),
    "argmax": lambda w: jnp.argmax(w, 0).sum(),
    "dynamic_slice": lambda w: jax.lax.dynamic_index_in_dim(w, jnp.argmax(w[0]), 0),
    "scan": lambda w: jax.lax.scan(lambda c, _: (c * w, None), w, length=2)[0].sum(),
    "split": lambda w: sum(x.sum() for x in jnp.split(w, [0, 3])),
    "while": lambda w: jax.lax.while_loop(
        lambda x: jnp.abs(x).max() < 4, lambda x: x * 2, w
    ),
}


@pytest.mark.parametrize("name", JOINED)
def test_reads_of_a_whole_stack_are_reported(name: str) -> None:
    piecewise = assert_equal_results(JOINED[name], [stack(4)], {0: PIECES}, {})
    reads = [read for read in piecewise.whole_reads if read.eqn is not None]
    assert next(read.eqn.primitive.name for read in reads if read.eqn) == name
    assert reads[0].input_indices == {0}
    assert reads[0].spec.shape == (LENGTH, 4)


def test_a_slice_that_begins_at_data_reads_the_whole_stack() -> None:
    """Also where pieces of the stack would be pieces of the slice."""

    def half(w: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(w, jnp.argmax(w[0]), LENGTH // 2, 0)

    piecewise = assert_equal_results(half, [stack(4)], {0: Pieces(0, (2, 4))}, {})
    assert [read.input_indices for read in piecewise.whole_reads] == [{0}]


def test_a_result_that_is_whole_is_reported() -> None:
    piecewise = assert_equal_results(lambda w: w * 2, [stack(4)], {0: PIECES}, {})
    (read,) = piecewise.whole_reads
    assert read.eqn is None


def test_a_result_comes_in_the_pieces_of_its_input() -> None:
    piecewise = assert_equal_results(
        lambda w: (w.T * 2, w.sum(), w.sum(1)), [stack(4)], {0: PIECES}
    )
    assert piecewise.output_pieces == {
        0: Pieces(1, PIECES.sizes),
        2: Pieces(0, PIECES.sizes),
    }


def largest_array(closed: core.ClosedJaxpr) -> int:
    return max(
        math.prod(var.aval.shape)
        for eqn in closed.jaxpr.eqns
        for var in [*eqn.invars, *eqn.outvars]
    )


def test_wanted_zeros_are_made_in_pieces() -> None:
    def moments(w: jax.Array) -> Any:
        return jnp.zeros_like(w), jnp.ones((4, LENGTH)).T * 2

    wanted = {0: PIECES, 1: PIECES}
    piecewise = assert_equal_results(moments, [stack(4)], {0: PIECES}, wanted)
    assert largest_array(piecewise.closed) <= 3 * 4


def test_wanted_layers_are_drawn_in_pieces() -> None:
    def init(key: jax.Array) -> jax.Array:
        def draw(_: Any, key: jax.Array) -> Any:
            return None, jax.random.normal(key, (4, 5))

        return jax.lax.scan(draw, None, jax.random.split(key, LENGTH))[1].mT * 0.1

    def init_at_once(key: jax.Array) -> jax.Array:
        keys = jax.random.split(key, LENGTH)
        return jax.vmap(lambda key: jax.random.normal(key, (4, 5)))(keys)

    key = jax.random.key(0)
    for function in (init, init_at_once):
        closed, _ = _jaxpr.trace(function, jax.ShapeDtypeStruct((), key.dtype))
        piecewise = _piecewise.run_in_pieces(closed, {}, {0: PIECES}, num_fixed=0)
        assert largest_array(piecewise.closed) <= 3 * 4 * 5
        begins = map(np.int32, piecewise.begins)
        drawn = core.jaxpr_as_fun(piecewise.closed)(key, *begins)
        np.testing.assert_array_equal(np.concatenate(drawn), function(key))


def test_equal_pieces_are_equal_programs() -> None:
    """Arrays that are whole, such as keys of layers, are cut at inputs."""

    def apply(w: jax.Array, rates: jax.Array) -> jax.Array:
        def layer(x: jax.Array, xs: Any) -> Any:
            w, rate = xs
            return jnp.tanh(x * w) * rate, None

        return jax.lax.scan(layer, jnp.ones(4), (w, rates))[0]

    pieces = Pieces(0, (2, 2, 2))
    piecewise = assert_equal_results(apply, [stack(4), stack()], {0: pieces})
    assert piecewise.begins == [0, 2, 4]
    cuts = [
        eqn
        for eqn in piecewise.closed.jaxpr.eqns
        if eqn.primitive.name == "dynamic_slice"
    ]
    begins = piecewise.closed.jaxpr.invars[-3:]
    assert [eqn.invars[1] for eqn in cuts] == begins
    scans = [e for e in piecewise.closed.jaxpr.eqns if e.primitive.name == "scan"]
    assert len({id(eqn.params["jaxpr"]) for eqn in scans}) == 1


def test_what_follows_from_parameters_is_cut_at_constants() -> None:
    def apply(w: jax.Array, frozen: jax.Array) -> jax.Array:
        return layer_scan(jnp.ones(4), w * jnp.sort(frozen, 0))[0]

    closed, _ = _jaxpr.trace(apply, *specs(stack(4), stack(4)))
    piecewise = _piecewise.run_in_pieces(closed, {0: PIECES}, {}, num_fixed=2)
    names = [eqn.primitive.name for eqn in piecewise.closed.jaxpr.eqns]
    assert "slice" in names
    assert "dynamic_slice" not in names


def test_the_axis_of_layers_is_traced_back_to_parameters() -> None:
    """Through casts, transposes, broadcasts and reshapes, as models have them."""

    def apply(params: dict[str, jax.Array]) -> jax.Array:
        w = jnp.moveaxis(params["kernel"], 1, 0).astype(jnp.bfloat16)
        b = jnp.broadcast_to(params["bias"], (6, 4))
        nested = params["nested"].reshape(6, 2, 4)
        scale = params["scale"][:, None]
        return layer_scan(jnp.ones(4), w * scale + b)[0], layer_scan(
            jnp.ones((2, 4)), nested
        )

    params = {
        "bias": jnp.ones(4),
        "kernel": jnp.ones((4, 6)),
        "nested": jnp.ones((12, 4)),
        "scale": jnp.ones(6),
    }
    closed, _ = _jaxpr.trace(apply, params)
    xs = {
        eqn.invars[i]: 0
        for eqn in closed.jaxpr.eqns
        if eqn.primitive.name == "scan"
        for i in range(_jaxpr.carry_slice(eqn).stop, len(eqn.invars))
    }
    axes = _pieces.trace_axes_back(closed.jaxpr, xs)
    assert [axes.get(var) for var in closed.jaxpr.invars] == [None, 1, 0, 0]
