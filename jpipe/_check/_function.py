"""A function, run with all examples at once and in micro-batches."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import _compat
from .._jaxprs import _alike, _constraints, _flow, _jaxpr
from .._jaxprs._jaxpr import is_inexact
from . import _compare

PyTree = Any
# Is given what a function is differentiated by, and what is fixed; returns arrays that
# are differentiated, and results.
Way = Callable[[PyTree, PyTree], tuple[list[jax.Array], PyTree]]


class Result(NamedTuple):
    """What a function computed, as arrays of NumPy.

    Attributes:
      results: what it returned.
      gradient: of a projection; ``None`` for each leaf that is not of floating numbers,
        and where nothing is differentiated.
    """

    results: PyTree
    gradient: PyTree


class Function:
    """A function, to be run at once and in micro-batches.

    Args:
      at_once: the function.
      in_parts: the same, of micro-batches.
      free: by what both are differentiated.
      fixed: what is fixed.

    Attributes:
      projected: specs of what is differentiated.
      limit: the tolerance for the narrowest dtype in which anything is computed.
      error: why it cannot be differentiated; empty if it can.
      form: what is equal for functions that compute the same.
    """

    def __init__(
        self, at_once: Way, in_parts: Way, free: PyTree, fixed: PyTree
    ) -> None:
        ways = at_once, in_parts
        traced = [_jaxpr.trace(way, free, fixed) for way in ways]
        (self._whole, (self.projected, _)), _ = traced
        trees = jax.tree.structure((free, fixed, [made for _, made in traced]))
        self.form = trees, *(_alike.form(closed) for closed, _ in traced)
        self.limit = _compare.tolerance(
            dtype for closed, _ in traced for dtype in _flow.dtypes(closed)
        )
        self.error = ""
        options = _compat.quick_to_compile()
        runs = [_constraints.without(_with_gradient(way)) for way in ways]
        self._runs = [jax.jit(run, compiler_options=options) for run in runs]

    def reads(self, last: int) -> bool:
        """Whether it needs one of its last leaves."""
        return any(_jaxpr.live_inputs(self._whole)[-last:] if last else ())

    def __call__(
        self, free: PyTree, fixed: PyTree, cotangents: Sequence[Any]
    ) -> list[Result]:
        """Runs it at once, then in micro-batches.

        Args:
          free: by what it is differentiated.
          fixed: what is fixed.
          cotangents: of what is differentiated; with none there is no gradient.
        """

        def run(cotangents: Sequence[Any]) -> list[Result]:
            found = [run(free, fixed, cotangents) for run in self._runs]
            return [Result(*jax.tree.map(host, one)) for one in found]

        if cotangents and not self.error:
            try:
                return run(cotangents)
            except Exception as error:  # as of a jax.lax.while_loop
                self.error = first_line(error)
        return run(())


def _with_gradient(way: Way) -> Callable[..., Any]:
    """``(free, fixed, cotangents) -> (results, gradient)``."""

    def run(free: PyTree, fixed: PyTree, cotangents: Sequence[Any]) -> Any:
        if not cotangents:
            return way(free, fixed)[1], None
        _, pull, results = jax.vjp(lambda free: way(free, fixed), free, has_aux=True)
        (gradient,) = pull([*cotangents])
        return results, jax.tree.map(_or_none, gradient)

    return run


def _or_none(leaf: Any) -> Any:
    """A gradient; ``None`` for what JAX has in place of that by an integer."""
    return None if leaf.dtype == jax.dtypes.float0 else leaf


def differentiated(loss: Callable[[PyTree, PyTree], Any]) -> Way:
    """A loss as a function that is differentiated."""

    def run(free: PyTree, fixed: PyTree) -> tuple[list[jax.Array], jax.Array]:
        value = loss(free, fixed)
        return [value], value

    return run


def in_parts(
    function: Callable[..., PyTree], axes: Sequence[int | None], sizes: Sequence[int]
) -> Callable[..., list[PyTree]]:
    """What a function returns for each of several micro-batches.

    Args:
      function: of any arguments.
      axes: where the examples are in each leaf of these.
      sizes: how many each micro-batch has.
    """
    ends = [0, *itertools.accumulate(sizes)]

    def run(*args: PyTree) -> list[PyTree]:
        return [
            function(*part(args, axes, start, stop, ends[-1]))
            for start, stop in itertools.pairwise(ends)
        ]

    return run


def part(
    tree: PyTree, axes: Sequence[int | None], start: int, stop: int, count: int
) -> PyTree:
    """Some of as many examples as there are, which may have several rows each.

    Args:
      tree: what has examples.
      axes: where they are in each leaf.
      start: the first of them.
      stop: where they end.
      count: how many there are.
    """

    def some(leaf: Any, axis: int | None) -> Any:
        if axis is None:
            return leaf
        rows = leaf.shape[axis]
        ends = rows * start // count, rows * stop // count
        return jax.lax.slice_in_dim(leaf, *ends, axis=axis)

    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten(some(*pair) for pair in zip(leaves, axes, strict=True))


def with_own(tree: PyTree, own: Sequence[Any], number: int) -> PyTree:
    """A micro-batch, with what it has by itself in place of what has no examples.

    Args:
      tree: the micro-batch; what it has no examples in is that of all of them.
      own: for each leaf what each micro-batch has, along the first axis; ``None``: what
        all have. The gradients of both are added up. Empty: nothing.
      number: that of the micro-batch.
    """
    if not own:
        return tree
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten(
        leaf if each is None else _in_place_of(leaf, each[number])
        for leaf, each in zip(leaves, own, strict=True)
    )


def _in_place_of(leaf: Any, value: Any) -> Any:
    return _with_gradient_of(leaf, value) if is_inexact(leaf) else value


@jax.custom_jvp
def _with_gradient_of(leaf: Any, value: Any) -> Any:
    """A value, whose gradient is that of something else."""
    del leaf
    return value


_with_gradient_of.defjvp(lambda primals, tangents: (primals[1], tangents[0]))


def host(leaf: Any) -> Any:
    """An array of NumPy, of a dtype that JAX has; random keys as they are."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return leaf
    return np.asarray(leaf, jax.dtypes.canonicalize_dtype(leaf.dtype))


def first_line(error: Exception) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
