"""Runs a function with all examples at once and in micro-batches.

    function:          (inputs, nondiff_args)              -> (outputs, results)
    at once:           (inputs, nondiff_args, cotangents)  -> (results, gradient)
    in micro-batches:  (inputs, nondiff_args, cotangents)  -> (results, gradient)

``outputs`` are the arrays that are differentiated, ``results`` are the arrays that are
compared. The gradient is that of one projection of the outputs, by their cotangents,
with respect to the inputs.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _compat
from .._jaxprs import (
    _dataflow,
    _inlining,
    _jaxpr,
    _sharding_constraints,
    _structural_key,
)
from .._jaxprs._jaxpr import is_inexact
from . import _comparison

PyTree = Any
# ``(inputs, nondiff_args) -> (outputs, results)``
Differentiated = Callable[[PyTree, PyTree], tuple[list[jax.Array], PyTree]]


@dataclass(frozen=True)
class SplitOutputs:
    """The numbers that a function computed, as arrays of NumPy.

    Attributes:
      results: the results of the function.
      gradient: the gradient by its inputs; ``None`` for each leaf that is not of
        floating numbers, and where nothing is differentiated.
    """

    results: PyTree
    gradient: PyTree


class SplitFunction:
    """A function to be run at once and in micro-batches.

    Args:
      at_once: the function of all examples.
      in_microbatches: the function of micro-batches.
      inputs: the arguments by which both are differentiated.
      nondiff_args: the other arguments.

    Attributes:
      outputs: specs of the arrays that are differentiated.
      limit: the tolerance for the narrowest dtype in which anything is computed.
      error: the reason why it cannot be differentiated; empty if it can.
      fingerprint: equal for functions that compute the same.
    """

    def __init__(
        self,
        at_once: Differentiated,
        in_microbatches: Differentiated,
        inputs: PyTree,
        nondiff_args: PyTree,
    ) -> None:
        closed, results = _inlining.trace(at_once, inputs, nondiff_args)
        microbatch_closed, microbatch_results = _inlining.trace(
            in_microbatches, inputs, nondiff_args
        )
        self.outputs, _ = results
        self._closed = closed
        trees = jax.tree.structure((inputs, nondiff_args, results, microbatch_results))
        self.fingerprint = (
            trees,
            _structural_key.structural_key(closed),
            _structural_key.structural_key(microbatch_closed),
        )
        dtypes = [
            *_dataflow.all_dtypes(closed),
            *_dataflow.all_dtypes(microbatch_closed),
        ]
        self.limit = _comparison.tolerance(dtypes)
        self.error = ""
        self._at_once = _compiled(at_once)
        self._in_microbatches = _compiled(in_microbatches)

    def reads_any_of_last(self, count: int) -> bool:
        """True if it reads any of its last inputs, of which there are ``count``."""
        used_inputs = _jaxpr.used_inputs(self._closed)
        return any(used_inputs[len(used_inputs) - count :])

    def run(
        self, inputs: PyTree, nondiff_args: PyTree, cotangents: Sequence[Any]
    ) -> tuple[SplitOutputs, SplitOutputs]:
        """Runs it at once, then in micro-batches.

        Args:
          inputs: the arguments by which it is differentiated.
          nondiff_args: the other arguments.
          cotangents: the cotangents of its outputs; with none there is no gradient.
        """

        def run_both(cotangents: Sequence[Any]) -> tuple[SplitOutputs, SplitOutputs]:
            at_once = self._at_once(inputs, nondiff_args, cotangents)
            in_microbatches = self._in_microbatches(inputs, nondiff_args, cotangents)
            return _on_host(at_once), _on_host(in_microbatches)

        if cotangents and not self.error:
            try:
                return run_both(cotangents)
            except Exception as error:  # as of a jax.lax.while_loop
                self.error = first_line(error)
        return run_both([])


def _compiled(function: Differentiated) -> Callable[..., Any]:
    """``(inputs, nondiff_args, cotangents) -> (results, gradient)``."""

    def differentiate(
        inputs: PyTree, nondiff_args: PyTree, cotangents: Sequence[Any]
    ) -> Any:
        if not cotangents:
            _, results = function(inputs, nondiff_args)
            return results, None
        _, pullback, results = jax.vjp(
            lambda inputs: function(inputs, nondiff_args), inputs, has_aux=True
        )
        (gradient,) = pullback([*cotangents])
        return results, jax.tree.map(_or_none, gradient)

    options = _compat.quick_to_compile()
    return jax.jit(
        _sharding_constraints.without_constraints(differentiate),
        compiler_options=options,
    )


def _on_host(results_and_gradient: tuple[PyTree, PyTree]) -> SplitOutputs:
    results, gradient = jax.tree.map(to_host, results_and_gradient)
    return SplitOutputs(results, gradient)


def _or_none(leaf: Any) -> Any:
    """A gradient; ``None`` in place of JAX's zeros for the gradient by an integer."""
    return None if leaf.dtype == jax.dtypes.float0 else leaf


def differentiated(loss: Callable[[PyTree, PyTree], Any]) -> Differentiated:
    """A loss as a function whose output is its result."""

    def outputs_and_results(
        inputs: PyTree, nondiff_args: PyTree
    ) -> tuple[list[jax.Array], jax.Array]:
        value = loss(inputs, nondiff_args)
        return [value], value

    return outputs_and_results


def split_examples(
    tree: PyTree, axes: Sequence[int | None], sizes: Sequence[int]
) -> list[PyTree]:
    """Splits the arrays of a mini-batch into those of its micro-batches.

    Args:
      tree: the arrays of all examples.
      axes: the axis of the examples in each of them.
      sizes: the number of examples of each micro-batch.
    """
    ends = [0, *itertools.accumulate(sizes)]
    return [
        slice_examples(tree, axes, start=start, stop=stop, count=ends[-1])
        for start, stop in itertools.pairwise(ends)
    ]


def slice_examples(
    tree: PyTree, axes: Sequence[int | None], *, start: int, stop: int, count: int
) -> PyTree:
    """The arrays of some examples, each of which may have several rows.

    Args:
      tree: the arrays of all examples.
      axes: the axis of the examples in each of them.
      start: the first example.
      stop: the first example behind them.
      count: the number of all examples.
    """

    def slice_leaf(leaf: Any, axis: int | None) -> Any:
        if axis is None:
            return leaf
        rows = leaf.shape[axis]
        first = rows * start // count
        end = rows * stop // count
        return jax.lax.slice_in_dim(leaf, first, end, axis=axis)

    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten(
        slice_leaf(leaf, axis) for leaf, axis in zip(leaves, axes, strict=True)
    )


def join_examples(parts: Sequence[PyTree], axes: Sequence[int | None]) -> PyTree:
    """The arrays of the examples of all parts; one without examples is the same in all.

    Args:
      parts: the arrays of some examples each.
      axes: the axis of the examples in each of the arrays.
    """

    def join_leaves(axis: int | None, *leaves: Any) -> Any:
        return leaves[0] if axis is None else jnp.concatenate(leaves, axis)

    structure = jax.tree.structure(parts[0])
    leaves_of_parts = [jax.tree.leaves(part) for part in parts]
    return structure.unflatten(
        join_leaves(axis, *leaves)
        for axis, *leaves in zip(axes, *leaves_of_parts, strict=True)
    )


def with_values_of(
    tree: PyTree, microbatch_values: Sequence[Any], microbatch: int
) -> PyTree:
    """A micro-batch with its own values of the arrays that have no examples.

    Args:
      tree: the micro-batch; its arrays without examples are those of all examples.
      microbatch_values: for each leaf the values of all micro-batches along the first
        axis; ``None`` where all have those of the tree. Empty: there are none.
      microbatch: the index of the micro-batch.

    Returns:
      Its arrays. The gradients of values are added up as those of the leaves that they
      replace.
    """
    if not microbatch_values:
        return tree
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten(
        leaf if values is None else _in_place_of(leaf, values[microbatch])
        for leaf, values in zip(leaves, microbatch_values, strict=True)
    )


def _in_place_of(leaf: Any, value: Any) -> Any:
    """A value in place of a leaf, which gets its gradient."""
    return _with_gradient_of(leaf, value) if is_inexact(leaf) else value


@jax.custom_jvp
def _with_gradient_of(leaf: Any, value: Any) -> Any:
    """A value, whose gradient goes to another leaf."""
    del leaf
    return value


_with_gradient_of.defjvp(lambda primals, tangents: (primals[1], tangents[0]))


def to_host(leaf: Any) -> Any:
    """An array of NumPy, of a dtype that JAX has; random keys as they are."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return leaf
    return np.asarray(leaf, jax.dtypes.canonicalize_dtype(leaf.dtype))


def first_line(error: Exception) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
