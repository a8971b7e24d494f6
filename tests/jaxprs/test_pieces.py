"""A computation on arrays in pieces is the one on whole arrays: rule by rule."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies
from jax.extend import core

from jpipe._jaxprs import _inlining, _jaxpr, _pieces, _piecewise
from jpipe._jaxprs._pieces import AlignedAxis, Pieces

from .in_pieces import (
    LENGTH,
    PIECES,
    assert_equal_results,
    cut,
    partitions,
    scans_of,
    specs,
    stack,
)


def layer_scan(carry: Any, xs: Any, **options: Any) -> Any:
    return jax.lax.scan(lambda c, x: (jnp.tanh(c * x), c + x), carry, xs, **options)


def fori(steps: int, step: Callable[[Any, Any], Any], init: Any) -> Any:
    return jax.lax.fori_loop(0, steps, step, init)


def newton_schulz(w: jax.Array) -> jax.Array:
    """The matrices of all layers, made orthogonal as muon does it."""

    def step(i: jax.Array, x: jax.Array) -> jax.Array:
        return 1.5 * x - (0.5 + 0.01 * i) * x @ x.mT @ x

    return fori(5, step, w.reshape(LENGTH, 2, 2) / 4)


def matrices(w: jax.Array) -> jax.Array:
    return w.reshape(LENGTH, 2, 2) + 2 * jnp.eye(2)


ORDER = jnp.array([2, 0, 1])


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
    "product_over_layers": lambda w: jnp.vdot(w, jnp.sin(w)),
    "layers_weighted_by_numbers": lambda w: jnp.arange(6.0) @ w,
    "products_along_two_axes": lambda w: jnp.einsum("la,mb,lc->mbac", w, w, w).sum(),
    "product_with_a_matrix": lambda w: (w @ jnp.ones((4, 2))).sum(),
    "new_axes": lambda w: (w[:, None] * jnp.ones((LENGTH, 3, 4))).sum(),
    "joined_axes": lambda w: w.reshape(-1).sum(),
    "divided_axis": lambda w: w.reshape(LENGTH, 2, 2).sum(2).max(),
    "sorted_in_each_layer": lambda w: jnp.sort(w, 1)[:, 0].sum(),
    "stacked_in_front": lambda w: jnp.stack([w, 2 * w]).sum(0).max(),
    "where": lambda w: jnp.where(w > 0, w, 0.1).sum(),
    "branches": lambda w: jax.lax.cond(
        w[0, 0] > 0, lambda w: (w * 2, jnp.zeros_like(w)), lambda w: (w, w + 1), w
    ),
    "branch_that_reads_one_layer": lambda w: jax.lax.cond(
        w[0, 0] > 0, lambda w: w[4], lambda w: jnp.ones(4), w
    ),
    "loop_that_carries": newton_schulz,
    "loop_of_constants": lambda w: fori(3, lambda i, x: x + w * i, jnp.zeros_like(w)),
    "loop_that_overwrites": lambda w: fori(3, lambda i, _: w * i, jnp.zeros_like(w)),
    "loop_of_several_counters": lambda w: fori(
        3, lambda i, c: (c[0] * c[1] + w, c[1] + c[2], c[2] * 2), (w, 1.0, 1.0)
    )[0],
    "loop_that_exchanges": lambda w: fori(
        3, lambda _, c: (c[1], jax.jit(jnp.sin)(c[0])), (w, jnp.zeros_like(w))
    ),
    "loop_along_another_axis": lambda w: jax.lax.scan(
        lambda c, x: (c * 0.5 + x, c + x), jnp.zeros(LENGTH), w.T, reverse=True
    ),
    "loops_in_branches": lambda w: jax.lax.cond(
        w[0, 0] > 0, newton_schulz, lambda w: w.reshape(LENGTH, 2, 2), w
    ),
    "checkpoint": lambda w: jax.checkpoint(lambda w: jnp.sin(w) * 2)(w).sum(),
    "split_elsewhere": lambda w: jnp.split(w, [1, 2], -1),
    "unstacked_elsewhere": lambda w: jnp.unstack(w, axis=1),
    "barrier": lambda w: jax.lax.optimization_barrier((jnp.ones(3), w, w * 2)),
    "turned_around": lambda w: w[:, ::-1],
    "padded": lambda w: jnp.pad(w, ((0, 0), (2, 1))),
    "tiled": lambda w: jax.lax.tile(w, (1, 2)),
    "columns_by_indices": lambda w: w[:, ORDER],
    "columns_by_indices_that_differ": lambda w: jnp.take_along_axis(
        w, jnp.argsort(w, 1)[:, :2], 1
    ),
    "columns_that_are_set": lambda w: w.at[:, 0].set(0.5).at[:, ORDER].add(w[:, :3]),
    "a_column_that_is_set": lambda w: jax.lax.dynamic_update_slice(
        w, w[:, :1] * 2, (0, jnp.argmax(w[1]) % 4)
    ),
    "indices_of_layers": lambda w: jnp.cos(jnp.arange(9.0))[jnp.argmax(w, 1)],
    "diagonals": lambda w: jnp.diagonal(matrices(w), axis1=1, axis2=2),
    "sorted_with_indices": lambda w: jax.lax.sort((w, -w), num_keys=1),
    "largest_two": lambda w: jax.lax.top_k(w, 2),
    "windows": lambda w: jax.lax.reduce_window(
        w, -jnp.inf, jax.lax.max, (1, 2), (1, 1), "VALID"
    ),
    "fourier": lambda w: jnp.fft.rfft(w, axis=-1).real,
    "inverses": lambda w: jnp.linalg.inv(matrices(w)),
    "decompositions": lambda w: [
        *jnp.linalg.qr(matrices(w)),
        jnp.linalg.cholesky(matrices(w) @ matrices(w).mT),
        jnp.linalg.svd(matrices(w), compute_uv=False),
        jnp.linalg.eigh(matrices(w) + matrices(w).mT)[0],
    ],
    "halves_joined": lambda w: layer_scan(
        jnp.ones(4), jnp.concatenate([2 * w[:2], jnp.sin(w[2:])])
    ),
    "a_layer_joined": lambda w: jnp.concatenate([w[3:4], jnp.sin(w[:3]), w[4:]]),
    "softplus_and_relu": lambda w: jax.nn.softplus(w) + jax.nn.relu(w),
    "custom_rule_of_two": lambda w: jnp.logaddexp(w, 2 * w),
    "a_layer_taken": lambda w: jnp.take(w, 3, axis=0),
    "a_layer_taken_along_another_axis": lambda w: jnp.take(w.T, jnp.array(4), axis=1),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_a_stack_may_be_read_by(name: str) -> None:
    piecewise = assert_equal_results(KEPT[name], [stack(4)], {0: PIECES})
    assert piecewise.whole_reads == []


@jax.custom_vjp
def sum_of_layers(w: jax.Array) -> jax.Array:
    return jnp.cumsum(w, 0)


sum_of_layers.defvjp(lambda w: (sum_of_layers(w), None), lambda _, g: (g,))

JOINED = {
    "sort": lambda w: jnp.sort(w, 0).sum(),
    "cumsum": lambda w: jnp.cumsum(w, 0).sum(),
    "gather": lambda w: w[ORDER],
    "rev": lambda w: w[::-1],
    "scatter": lambda w: w.at[0].set(1.0),
    "custom_vjp_call": lambda w: sum_of_layers(w),
    "argmax": lambda w: jnp.argmax(w, 0).sum(),
    "dynamic_slice": lambda w: jax.lax.dynamic_index_in_dim(w, jnp.argmax(w[0]), 0),
    "scan": lambda w: fori(2, lambda _, c: c * w - c.mean(), w).sum(),
    "cond": lambda w: jax.lax.cond(w[0, 0] > 0, jnp.sum, lambda w: w[0].sum(), w),
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


def test_a_slice_begins_at_a_constant_of_any_integers() -> None:
    def rows(w: jax.Array, column: jax.Array) -> jax.Array:
        starts = np.int32(1), column
        return jax.lax.dynamic_slice(w, starts, (3, 2), allow_negative_indices=False)

    with jax.enable_x64(True):
        args = [stack(4), np.int32(1)]
        piecewise = assert_equal_results(rows, args, {0: PIECES})
    assert not piecewise.whole_reads


def test_a_layer_taken_beyond_the_last_one_is_as_jax_has_it() -> None:
    def take(w: jax.Array) -> jax.Array:
        return jnp.nan_to_num(jnp.take(w, LENGTH, axis=0))

    assert_equal_results(take, [stack(4)], {0: PIECES}, {})


@pytest.mark.parametrize("name", ["custom_jvp", "custom_vjp"])
def test_a_custom_rule_is_kept_for_each_piece(name: str) -> None:
    """The gradient that the rule gives is three times that of the operation."""

    def function(w: jax.Array, scale: Any) -> jax.Array:
        return jnp.sin(w) * scale

    if name == "custom_jvp":
        custom = jax.custom_jvp(function)
        custom.defjvp(
            lambda primals, tangents: (
                function(*primals),
                3 * jnp.cos(primals[0]) * tangents[0] * primals[1],
            )
        )
    else:
        custom = jax.custom_vjp(function)
        custom.defvjp(
            lambda w, scale: (function(w, scale), (jnp.cos(w), scale)),
            lambda residuals, g: (3 * residuals[0] * residuals[1] * g, None),
        )
    piecewise = assert_equal_results(
        lambda w: custom(w, jnp.float32(2.0)), [stack(4)], {0: PIECES}
    )
    assert not piecewise.whole_reads
    run = core.jaxpr_as_fun(piecewise.closed)
    pieces = list(map(jnp.asarray, cut(stack(4), PIECES)))
    begins = [*map(np.int32, piecewise.starts)]
    grads = jax.grad(lambda x: sum(map(jnp.sum, run(*x, *begins))))(pieces)
    expected = 6 * np.cos(stack(4))
    np.testing.assert_allclose(np.concatenate(grads), expected, rtol=1e-5)


@jax.custom_vjp
def scaled(w: jax.Array, scale: jax.Array) -> jax.Array:
    return w * scale


scaled.defvjp(
    lambda w, scale: (w * scale, (w, scale)),
    lambda residuals, g: (residuals[1] * g, (residuals[0] * g).sum()),
)


@jax.custom_vjp
def centred(w: jax.Array) -> jax.Array:
    return w * 2


centred.defvjp(lambda w: (w * 2, None), lambda _, g: (g - g.mean(0),))


@pytest.mark.parametrize("name", ["of_what_is_whole", "of_other_layers"])
def test_a_custom_rule_whose_gradient_mixes_layers_stays_one(name: str) -> None:
    """The gradient of a scale is a sum over all of them."""
    args = [stack(4), np.float32(2)]
    apply = scaled if name == "of_what_is_whole" else lambda w, _: centred(w)
    piecewise = assert_equal_results(apply, args, {0: PIECES}, {})
    (read, *_) = piecewise.whole_reads
    assert read.input_indices == {0}
    assert read.eqn is not None
    assert read.eqn.primitive.name == "custom_vjp_call"


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


def test_a_loop_that_gives_other_pieces_is_reported() -> None:
    """Its carry is in pieces along another axis after each iteration."""
    square = jnp.cos(jnp.arange(36.0)).reshape(LENGTH, LENGTH)
    piecewise = assert_equal_results(
        lambda w: fori(3, lambda _, x: x.T * 2, w), [square], {0: PIECES}
    )
    assert [read.input_indices for read in piecewise.whole_reads] == [{0}]


def test_loops_and_branches_are_one_for_each_piece() -> None:
    """A counter that all need is computed by each."""

    def step(carry: Any, factor: jax.Array) -> Any:
        count, x = carry
        x = jax.lax.cond(count == 0, lambda x: x * factor, jnp.tanh, x)
        return (count + 1, x), None

    def apply(w: jax.Array) -> Any:
        return jax.lax.scan(step, (0, w), jnp.arange(3.0))[0]

    piecewise = assert_equal_results(apply, [stack(4)], {0: PIECES})
    assert piecewise.output_pieces == {1: PIECES}
    scans = [e for e in piecewise.closed.jaxpr.eqns if e.primitive.name == "scan"]
    carried = [eqn.outvars[-1].aval.shape for eqn in scans if len(eqn.outvars) == 2]
    assert carried == [(2, 4), (3, 4), (1, 4)]


def largest_array(closed: core.ClosedJaxpr) -> int:
    return max(
        math.prod(var.aval.shape)
        for eqn in closed.jaxpr.eqns
        for var in [*eqn.invars, *eqn.outvars]
    )


def test_wanted_zeros_are_made_in_pieces() -> None:
    def moments(w: jax.Array) -> Any:
        return jnp.zeros_like(w), jnp.ones((LENGTH, 2)) @ jnp.ones((2, 4)) * 2

    wanted = {0: PIECES, 1: PIECES}
    piecewise = assert_equal_results(moments, [stack(4)], {0: PIECES}, wanted)
    assert largest_array(piecewise.closed) <= 3 * 4


@given(data=strategies.data())
def test_stacks_that_are_made_in_pieces(data: Any) -> None:
    """Arrays of layers, some of several, are put together along any axis."""
    draw = data.draw
    axis = draw(strategies.integers(0, 2), label="axis")
    is_stack = draw(strategies.booleans(), label="is a stack")
    lengths = draw(strategies.lists(strategies.integers(1, 2), min_size=2, max_size=5))
    lengths = [1] * len(lengths) if is_stack else lengths
    pieces = draw(partitions(sum(lengths), 0), label="pieces")
    with jax.enable_x64(True):
        normal = np.random.default_rng(0).normal
        args = [normal(size=(2, length, 3)) for length in lengths]
        args = [np.moveaxis(x, 1, axis) for x in args]

        def apply(*layers: Any) -> Any:
            if is_stack:
                w = jnp.stack([x.squeeze(axis) for x in layers], axis)
            else:
                w = jnp.concatenate(layers, axis)
            w = jnp.moveaxis(jnp.sin(w), axis, 0)
            return layer_scan(jnp.ones((2, 3)), w)

        closed, _ = _inlining.trace(apply, *specs(*args))
        (scan,) = scans_of(closed)
        scanned: Any = scan.invars[-1]
        piecewise = _piecewise.run_in_pieces(
            closed, {}, {}, targets={scanned: pieces}, num_fixed=len(args)
        )
        begins = map(np.int32, piecewise.starts)
        results = core.jaxpr_as_fun(piecewise.closed)(*args, *begins)
        for x, y in zip(results, jax.tree.leaves(apply(*args)), strict=True):
            np.testing.assert_allclose(x, y, rtol=0, atol=1e-12)
        assert [e.params["length"] for e in scans_of(piecewise.closed)] == [
            *pieces.sizes
        ]
        largest = max(pieces.sizes)
        made = [e for e in piecewise.closed.jaxpr.eqns if e.primitive.name == "sin"]
        assert max(e.outvars[0].aval.shape[axis] for e in made) == largest


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
        closed, _ = _inlining.trace(function, jax.ShapeDtypeStruct((), key.dtype))
        piecewise = _piecewise.run_in_pieces(closed, {}, {0: PIECES}, num_fixed=0)
        assert largest_array(piecewise.closed) <= 3 * 4 * 5
        begins = map(np.int32, piecewise.starts)
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
    assert piecewise.starts == [0, 2, 4]
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

    closed, _ = _inlining.trace(apply, *specs(stack(4), stack(4)))
    piecewise = _piecewise.run_in_pieces(closed, {0: PIECES}, {}, num_fixed=2)
    names = [eqn.primitive.name for eqn in piecewise.closed.jaxpr.eqns]
    assert "slice" in names
    assert "dynamic_slice" not in names


def test_constants_are_cut_at_inputs_beside_the_batch_alone() -> None:
    """A penalty is computed without the batch, and so without these inputs."""

    def apply(w: jax.Array, x: jax.Array) -> Any:
        weights = jnp.arange(1.0, 1 + LENGTH)
        penalty = weights @ w.sum(1)
        carry, _ = jax.lax.scan(
            lambda h, xs: (jnp.tanh(h * xs[0] + xs[1]), None), x, (w, weights)
        )
        return carry, penalty

    closed, _ = _inlining.trace(apply, *specs(stack(4), jnp.ones(4)))
    piecewise = _piecewise.run_in_pieces(closed, {0: PIECES}, {}, num_fixed=1)
    jaxpr = piecewise.closed.jaxpr
    begins = jaxpr.invars[-len(piecewise.starts) :]
    carry, penalty = jaxpr.outvars
    following = _jaxpr.descendants(jaxpr, begins)
    assert carry in following
    assert penalty not in following


def test_the_axis_of_layers_is_traced_back_to_parameters() -> None:
    """Through casts, transposes, broadcasts and reshapes, as models have them."""

    def apply(params: dict[str, jax.Array]) -> Any:
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
    closed, _ = _inlining.trace(apply, params)
    xs = {
        eqn.invars[i]: AlignedAxis(axis=0)
        for eqn in closed.jaxpr.eqns
        if eqn.primitive.name == "scan"
        for i in range(_jaxpr.carry_slice(eqn).stop, len(eqn.invars))
    }
    axes = _pieces.trace_axes_back(closed.jaxpr, xs)
    found = [axes.get(var) for var in closed.jaxpr.invars]
    assert found == [None, AlignedAxis(1), AlignedAxis(0), AlignedAxis(0)]


def test_the_axis_of_layers_is_traced_back_through_bodies() -> None:
    """Through branches, what loops carry, go along and read, and checkpoints."""

    def apply(params: dict[str, jax.Array]) -> jax.Array:
        def turn(carry: jax.Array, x: jax.Array) -> Any:
            return jax.jit(jnp.sin)(carry) * x[:, None], carry + params["constant"].T

        carried = jax.lax.cond(
            params["flag"], jnp.cos, lambda x: x * 2, params["branch"]
        )
        carried, ys = jax.lax.scan(turn, carried, params["along"])
        checked = jax.checkpoint(lambda x: x.reshape(LENGTH, -1))(params["checked"])
        return layer_scan(jnp.ones(4), carried + ys[1] + checked)[0]

    params = {
        "along": jnp.ones((3, LENGTH)),
        "branch": jnp.ones((LENGTH, 4)),
        "checked": jnp.ones((LENGTH, 2, 2)),
        "constant": jnp.ones((4, LENGTH)),
        "flag": jnp.bool_(True),
    }
    closed, _ = _inlining.trace(apply, params)
    (*_, scan) = scans_of(closed)
    (*_, xs) = _jaxpr.variables(scan.invars[-1:])
    axes = _pieces.trace_axes_back(closed.jaxpr, {xs: AlignedAxis(axis=0)})
    found = [axes.get(var) for var in closed.jaxpr.invars]
    assert found == [*map(AlignedAxis, (1, 0, 0, 1)), None]
