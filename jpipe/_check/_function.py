"""A function, run with all examples at once and with those of each micro-batch."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from .. import _compat
from .._functions._weights import is_inexact
from .._jaxprs import _flow, _jaxpr
from . import _compare

PyTree = Any


class Given(NamedTuple):
    """The arguments of a function.

    Attributes:
      free: by what it is differentiated.
      fixed: the rest.
    """

    free: PyTree
    fixed: PyTree


class Result(NamedTuple):
    """What a function made of its arguments, as arrays of NumPy.

    Attributes:
      made: what is differentiated where it is of floating numbers.
      aux: what else it returned.
      gradient: of a projection of ``made``, by ``free``; ``None`` for each leaf that is
        not of floating numbers, and for all of it where nothing is differentiated.
    """

    made: PyTree
    aux: PyTree
    gradient: PyTree


class Function:
    """``(free, fixed) -> (made, aux)``, traced for several arguments.

    Args:
      function: the function.
      given: all examples first, then each micro-batch.

    Attributes:
      made: for each of the arguments the specs of what it makes.
      limit: the tolerance for the narrowest dtype in which anything is computed.
      error: why it cannot be differentiated; empty if it can.
    """

    def __init__(
        self, function: Callable[[PyTree, PyTree], Any], given: Sequence[Given]
    ) -> None:
        traced = [_jaxpr.trace(function, *one) for one in given]
        self._closed = [closed for closed, _ in traced]
        self._out = [out for _, out in traced]
        self.made = [made for made, _ in self._out]
        self.limit = _compare.tolerance(
            dtype for closed in self._closed for dtype in _flow.dtypes(closed)
        )
        self.error = ""
        options = _compat.quick_to_compile()
        self._run = [
            jax.jit(_with_gradient(closed, made), compiler_options=options)
            for closed, made in zip(self._closed, self.made, strict=True)
        ]

    def reads(self, last: int) -> bool:
        """Whether it needs one of its last leaves, with all examples."""
        return any(_jaxpr.live_inputs(self._closed[0])[-last:] if last else ())

    def __call__(
        self,
        given: Sequence[Given],
        projections: Sequence[PyTree] | None,
        like: Sequence[int] | None = None,
    ) -> list[Result]:
        """Runs it.

        Args:
          given: arguments.
          projections: for each the cotangents of the floating leaves of ``made``;
            ``None``: nothing is differentiated.
          like: of each the number of those that it was traced for which have its
            shapes; ``None``: the first ones.
        """
        like = range(len(given)) if like is None else like
        if projections is not None and not self.error:
            try:
                return [*map(self._result, like, given, projections)]
            except Exception as error:  # as of a jax.lax.while_loop
                self.error = first_line(error)
        return [
            self._result(at, one, None) for at, one in zip(like, given, strict=True)
        ]

    def _result(self, at: int, given: Given, projection: PyTree) -> Result:
        leaves, gradient = jax.tree.map(host, self._run[at](*given, projection))
        made, aux = jax.tree.unflatten(jax.tree.structure(self._out[at]), leaves)
        if projection is not None:
            free, structure = jax.tree.flatten(given.free)
            found = iter(gradient)
            gradient = jax.tree.unflatten(
                structure, [next(found) if is_inexact(x) else None for x in free]
            )
        return Result(made, aux, gradient)


def _with_gradient(closed: core.ClosedJaxpr, made: PyTree) -> Callable[..., Any]:
    """``(free, fixed, projection) -> (results, gradient)`` of a traced function."""
    floating = [i for i, leaf in enumerate(jax.tree.leaves(made)) if is_inexact(leaf)]

    def run(free: PyTree, fixed: PyTree, projection: PyTree) -> Any:
        leaves, rest = jax.tree.leaves(free), jax.tree.leaves(fixed)
        at = [i for i, leaf in enumerate(leaves) if is_inexact(leaf)]

        def projected(chosen: Sequence[jax.Array]) -> tuple[list[jax.Array], Any]:
            given = list(leaves)
            for i, leaf in zip(at, chosen, strict=True):
                given[i] = leaf
            results = _jaxpr.as_traced(closed)(*given, *rest)
            return [results[i] for i in floating], results

        chosen = [leaves[i] for i in at]
        if projection is None:
            return projected(chosen)[1], None
        _, pull, results = jax.vjp(projected, chosen, has_aux=True)
        return results, pull(projection)[0]

    return run


def floating(tree: PyTree) -> list[Any]:
    """The leaves that have a gradient."""
    return [leaf for leaf in jax.tree.leaves(tree) if is_inexact(leaf)]


def noise(made: Sequence[PyTree]) -> list[list[Any]]:
    """Cotangents of random numbers, for all examples and for each micro-batch.

    What is not of examples, a mean, say, is of other weight in each: it has none.
    """
    random = np.random.default_rng(0)
    whole, *parts = map(floating, made)

    def drawn(leaf: Any, part: Any) -> Any:
        size = leaf.shape if _compare.axis_of(leaf, part) is not None else ()
        numbers = random.normal(size=size) if size else np.zeros(leaf.shape)
        return np.asarray(numbers, leaf.dtype)

    first = [drawn(*pair) for pair in zip(whole, parts[0], strict=True)]
    return [first, *_compare.cut(first, parts)]


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
