"""What tests of computations on arrays in pieces compare, and with what."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies
from jax.extend import core

from jpipe._jaxprs import _inlining, _piecewise
from jpipe._jaxprs._pieces import Pieces
from jpipe._jaxprs._piecewise import PiecewiseJaxpr

LENGTH = 6
PIECES = Pieces(0, (2, 3, 1))


def stack(*shape: int) -> jax.Array:
    size = math.prod(shape)
    return jnp.cos(jnp.arange(LENGTH * size, dtype=jnp.float32)).reshape(LENGTH, *shape)


# Of the largest number in any result: sums of some hundred numbers in another order.
TOLERANCES = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 1e-2}
# Cotangents of random programs may be much larger than the gradients that they add up
# to: 1.1e-12 was met where these are 0.01.
GRADIENT_TOLERANCES = {**TOLERANCES, "float64": 1e-10}


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
    closed, _ = _inlining.trace(function, *specs(*args))
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
    flat += map(np.int32, piecewise.starts)
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


def assert_equal_grads(
    function: Callable[..., Any],
    args: list[Any],
    input_pieces: dict[int, Pieces],
) -> None:
    """Compares the gradients of the last result."""
    piecewise = rewritten(function, args, input_pieces, {})
    run = core.jaxpr_as_fun(piecewise.closed)
    flat = list[Any]()
    for i, arg in enumerate(args):
        flat += map(jnp.asarray, cut(arg, input_pieces[i]))
    begins = [*map(np.int32, piecewise.starts)]
    grads = iter(jax.jit(jax.grad(lambda x: run(*x, *begins)[-1]))(flat))
    expected = jax.jit(jax.grad(lambda x: jax.tree.leaves(function(*x))[-1]))(args)
    for i, grad in enumerate(expected):
        parts = [np.asarray(next(grads)) for _ in input_pieces[i].sizes]
        tolerance = GRADIENT_TOLERANCES[str(grad.dtype)] * max(
            float(abs(grad).max()), 1
        )
        np.testing.assert_allclose(
            np.concatenate(parts, input_pieces[i].axis), grad, rtol=0, atol=tolerance
        )


def scans_of(closed: core.ClosedJaxpr) -> list[core.JaxprEqn]:
    return [eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name == "scan"]


@strategies.composite
def partitions(draw: Any, length: int, axis: int) -> Pieces:
    inner = list(range(1, length))
    ends = draw(strategies.sets(strategies.sampled_from(inner), max_size=3))
    bounds = [0, *sorted(ends), length]
    return Pieces(axis, tuple(b - a for a, b in itertools.pairwise(bounds)))
