"""A function, run with all examples at once and with those of each micro-batch."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import _compat
from .._functions._weights import is_inexact
from .._jaxprs import _alike, _flow, _jaxpr
from . import _compare

PyTree = Any
# What is free, and what is fixed: only by the first a function is differentiated.
Given = tuple[PyTree, PyTree]


class Result(NamedTuple):
    """What a function made of its arguments, as arrays of NumPy.

    Attributes:
      made: what is differentiated where it is of floating numbers.
      aux: what else it returned.
      gradient: of a projection of ``made``, by what is free; ``None`` for each leaf
        that is not of floating numbers, and where nothing is differentiated.
    """

    made: PyTree
    aux: PyTree
    gradient: PyTree


class Function:
    """``(free, fixed) -> (made, aux)``, to be run with several arguments.

    Args:
      function: the function, which is differentiated by what is free.
      given: its arguments: all examples first, then each micro-batch.

    Attributes:
      made: for each of the arguments the specs of what it makes.
      limit: the tolerance for the narrowest dtype in which anything is computed.
      error: why it cannot be differentiated; empty if it can.
      form: what is equal for functions that compute the same.
    """

    def __init__(self, function: Callable[..., Any], given: Sequence[Given]) -> None:
        traced = [_jaxpr.trace(function, *one) for one in given]
        self._whole, _ = traced[0]
        trees = jax.tree.structure((tuple(given), [result for _, result in traced]))
        self.form = trees, *(_alike.form(closed) for closed, _ in traced)
        self.made = [made for _, (made, _) in traced]
        self.limit = _compare.tolerance(
            dtype for closed, _ in traced for dtype in _flow.dtypes(closed)
        )
        self.error = ""
        self._run = jax.jit(
            _with_gradient(function), compiler_options=_compat.quick_to_compile()
        )

    def reads(self, last: int) -> bool:
        """Whether it needs one of its last leaves, with all examples."""
        return any(_jaxpr.live_inputs(self._whole)[-last:] if last else ())

    def __call__(
        self, given: Sequence[Given], cotangents: Sequence[PyTree] | None = None
    ) -> list[Result]:
        """Runs it.

        Args:
          given: arguments.
          cotangents: for each those of the floating leaves of ``made``; ``None``:
            nothing is differentiated.
        """
        if cotangents is not None and not self.error:
            try:
                return [*map(self._result, given, cotangents)]
            except Exception as error:  # as of a jax.lax.while_loop
                self.error = first_line(error)
        return [*map(self._result, given)]

    def _result(self, given: Given, cotangents: PyTree = None) -> Result:
        (made, aux), gradient = self._run(*given, cotangents)
        return Result(*jax.tree.map(host, (made, aux, gradient)))


def _with_gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    """``(free, fixed, cotangents) -> (results, gradient)``."""

    def run(free: PyTree, fixed: PyTree, cotangents: PyTree) -> Any:
        def floats(free: PyTree) -> tuple[list[jax.Array], Any]:
            results = function(free, fixed)
            return floating(results[0]), results

        if cotangents is None:
            return function(free, fixed), None
        _, pull, results = jax.vjp(floats, free, has_aux=True)
        (gradient,) = pull(cotangents)
        return results, jax.tree.map(_or_none, gradient)

    return run


def _or_none(leaf: Any) -> Any:
    """A gradient; ``None`` for what JAX has in place of that by an integer."""
    return None if leaf.dtype == jax.dtypes.float0 else leaf


def floating(tree: PyTree) -> list[Any]:
    """The leaves that have a gradient."""
    return [leaf for leaf in jax.tree.leaves(tree) if is_inexact(leaf)]


def noise(made: Sequence[PyTree]) -> list[list[Any]]:
    """Cotangents of random numbers, for all examples and for each micro-batch.

    What is not of examples, such as a mean, is of other weight in each: it has none.
    """
    random = np.random.default_rng(0)
    whole, *parts = (
        [np.zeros(leaf.shape, leaf.dtype) for leaf in floating(one)] for one in made
    )
    drawn = [
        leaf
        if _compare.axis_of(leaf, part) is None
        else random.normal(size=leaf.shape).astype(leaf.dtype)
        for leaf, part in zip(whole, parts[0], strict=True)
    ]
    return [drawn, *_compare.cut(drawn, parts)]


def host(leaf: Any) -> Any:
    """An array of NumPy, of a dtype that JAX has; random keys as they are."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return leaf
    return np.asarray(leaf, jax.dtypes.canonicalize_dtype(leaf.dtype))


def split(
    tree: PyTree, axes: Sequence[int | None], sizes: Sequence[int]
) -> list[PyTree]:
    """As many examples as there are in all micro-batches, then each of these."""
    leaves, structure = jax.tree.flatten(jax.tree.map(host, tree))

    def part(start: int, stop: int) -> PyTree:
        pieces = [
            leaf
            if axis is None
            else leaf[(slice(None),) * (axis % leaf.ndim) + (slice(start, stop),)]
            for leaf, axis in zip(leaves, axes, strict=True)
        ]
        return jax.tree.unflatten(structure, pieces)

    ends = [0, *np.cumsum(sizes)]
    return [part(0, ends[-1]), *map(part, ends, ends[1:])]


def first_line(error: Exception) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
