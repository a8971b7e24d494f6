"""Compares numbers that a batch gives at once with those of its micro-batches."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.nnx.traversals import flatten_mapping

from .._jaxprs._jaxpr import is_inexact
from .._layers._text import shape_text

PyTree = Any

# Small numbers may be differences of larger ones beside them, and then hold the
# rounding errors of these: the scale is at least this fraction of the largest number.
_SMALLEST_SCALE = 1e-3


@dataclass(frozen=True)
class Difference:
    """The largest difference between a batch at once and its micro-batches.

    Attributes:
      quantity: ``"outputs"``, ``"state"`` or ``"gradients"``.
      array_name: the array that differs, such as ``"gradients by input[0]"``.
      example: the index of the example; ``None`` if it is of none.
      at_once: the number that all examples give at once.
      in_microbatches: the number that they give in micro-batches.
      size: the difference of the two, in tolerances.
      reason: the fault, where no numbers can be compared.
    """

    quantity: str
    array_name: str
    example: int | None = None
    at_once: complex = 0.0
    in_microbatches: complex = 0.0
    size: float = float("inf")
    reason: str = ""

    def __str__(self) -> str:
        if self.reason:
            return f"{self.array_name} {self.reason}"
        where = "" if self.example is None else f", most in example {self.example}"
        return (
            f"{self.array_name} differ{where}: {self.at_once:.6g} at once, "
            f"{self.in_microbatches:.6g} in micro-batches"
        )


class Unlike(Exception):
    """Results of micro-batches that cannot be joined: raised with a `Difference`."""


def tolerance(dtypes: Iterable[Any]) -> float:
    """The largest relative difference that rounding explains.

    It is a thousand units in the last place, the error of a sum of a million numbers;
    or four units of dtypes of 16 bits and fewer, in which XLA rounds once after adding
    up in 32 bits.

    Args:
      dtypes: the dtypes that are computed in; the narrowest counts.
    """
    floating_dtypes = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact)]
    eps = max((float(jnp.finfo(dtype).eps) for dtype in floating_dtypes), default=0.0)
    return (4 if eps > 1e-4 else 1000) * eps


def axis_of(whole: Any, part: Any) -> int | None:
    """The axis of the examples: the one in which two arrays have other lengths."""
    pairs = zip(whole.shape, part.shape, strict=False)
    for axis, (whole_length, part_length) in enumerate(pairs):
        if whole_length != part_length:
            return axis
    return None


def floating_axes(tree: PyTree, axes: Sequence[int | None]) -> list[int | None]:
    """The axes of floating leaves, which have a gradient."""
    pairs = zip(jax.tree.leaves(tree), axes, strict=True)
    return [axis for leaf, axis in pairs if is_inexact(leaf)]


def join(quantity: str, whole: PyTree, parts: Sequence[PyTree]) -> PyTree:
    """Joins the results of micro-batches along their examples.

    Args:
      quantity: see `Difference`.
      whole: specs of the results of all examples at once.
      parts: the results of each micro-batch.

    Returns:
      Arrays; those without an axis of examples are stacked along a new first axis.

    Raises:
      Unlike: if they cannot be joined to arrays like those of all examples.
    """

    def join_leaf(leaf: Any, *leaves: Any) -> jax.Array:
        axis = axis_of(leaf, leaves[0])
        if axis is None:
            array = jnp.stack(leaves)
            shape = array.shape[1:]
        else:
            array = jnp.concatenate(leaves, axis)
            shape = array.shape
        if shape != leaf.shape:
            raise TypeError(f"{array.shape} is not {leaf.shape}")
        return array

    structures = {*map(jax.tree.structure, (whole, *parts))}
    try:
        if len(structures) == 1:
            return jax.tree.map(join_leaf, whole, *parts)
    except (TypeError, ValueError):  # of shapes that do not fit
        pass
    part_shapes = " and ".join(map(shape_text, parts))
    reason = f"are {shape_text(whole)} at once, {part_shapes} in micro-batches"
    raise Unlike(Difference(quantity, quantity, reason=reason))


def comparable_state(state: Mapping[str, PyTree]) -> dict[str, Any]:
    """The variables that training changes besides parameters, by their paths.

    Each variance beside a mean, as of a batch norm, is replaced by the mean square:
    that of all examples is the mean of those of the micro-batches.
    """
    leaves = flatten_mapping(state)
    for path, leaf in leaves.items():
        mean = leaves.get((*path[:-1], "mean"))
        if path[0] == "batch_stats" and path[-1] == "var" and mean is not None:
            leaves[path] = leaf + jnp.abs(mean) ** 2
    return {"/".join(map(str, path)): leaf for path, leaf in leaves.items()}


def compare(
    quantity: str,
    *,
    inputs_name: str = "",
    at_once: PyTree,
    in_microbatches: PyTree,
    axes: Sequence[int | None],
    sizes: Sequence[int],
    limit: float,
    smallest_scale: float = 0.0,
    reductions: Sequence[Sequence[str]] | None = None,
) -> Difference | None:
    """The largest difference of all leaves; ``None`` if all are within tolerance.

    Args:
      quantity: see `Difference`.
      inputs_name: the inputs by which gradients are taken, in words.
      at_once: the arrays of all examples at once.
      in_microbatches: the arrays of micro-batches: see `join`.
      axes: the axis of the examples in each leaf.
      sizes: the number of examples of each micro-batch.
      limit: the tolerance, relative to the largest number of the same example.
      smallest_scale: the smallest number that differences are relative to.
      reductions: for each leaf without an axis of examples, the reductions of those of
        micro-batches that it may equal: their ``"mean"``, which of integers is the
        last, their ``"sum"``, or ``"each"`` of them; default: the mean.
    """
    title = f"{quantity} by {inputs_name}" if inputs_name else quantity
    paths = jax.tree_util.tree_leaves_with_path(at_once)
    if reductions is None:
        reductions = [("mean",)] * len(paths)
    differences: list[Difference] = []
    for (path, leaf), microbatch_leaf, axis, names in zip(
        paths, jax.tree.leaves(in_microbatches), axes, reductions, strict=True
    ):
        array = numbers(leaf)
        stacked = numbers(microbatch_leaf)
        candidates = [stacked]
        scale = smallest_scale
        if stacked.ndim > array.ndim:
            # A mean or a sum is rounded as the numbers that it is made of.
            scale = max(scale, max_magnitude(stacked))
            candidates = [_reduce(array, stacked, name, sizes) for name in names]

        distances = [
            _distances(array, candidate, axis, limit=limit, smallest_scale=scale)
            for candidate in candidates
        ]
        largest = [np.max(distance, initial=0) for distance in distances]
        best = min(range(len(candidates)), key=largest.__getitem__)
        distance = distances[best]
        if largest[best] <= 1:
            continue

        index = np.unravel_index(np.argmax(distance), distance.shape)
        example = None
        if axis is not None:  # tokens may be merged with examples
            example = int(index[axis] * sum(sizes) // array.shape[axis])
        label = jax.tree_util.keystr(path) if len(paths) > 1 else ""
        differences.append(
            Difference(
                quantity=quantity,
                array_name=f"{title}{label}",
                example=example,
                at_once=array[index].item(),
                in_microbatches=candidates[best][index].item(),
                size=float(distance[index]),
            )
        )
    return max(differences, key=lambda difference: difference.size, default=None)


def _reduce(array: Any, stacked: Any, name: str, sizes: Sequence[int]) -> Any:
    """Reduces the arrays of micro-batches: see `compare`.

    Args:
      array: the array of all examples at once.
      stacked: the arrays of micro-batches, stacked on a first axis.
      name: the name of the reduction.
      sizes: the number of examples of each micro-batch.
    """
    if name == "sum":
        return stacked.sum(0)
    if name == "each":  # the micro-batch that differs most
        axes = tuple(range(1, stacked.ndim))
        return stacked[np.argmax(np.sum(stacked != array, axes))]
    return np.average(stacked, 0, sizes) if stacked.dtype.kind in "fc" else stacked[-1]


def max_magnitude(tree: PyTree) -> float:
    """The largest finite number of a pytree."""
    arrays = [np.abs(numbers(leaf)) for leaf in jax.tree.leaves(tree)]
    largest = [np.max(x, initial=0, where=np.isfinite(x)) for x in arrays]
    return float(max(largest, default=0.0))


def _distances(
    x: Any, y: Any, axis: int | None, *, limit: float, smallest_scale: float
) -> Any:
    """The distance of each two numbers of two arrays, in tolerances.

    Tolerances are relative to the largest number of the same example. NaN equals NaN,
    and infinity equals infinity.

    Args:
      x: the numbers of all examples at once.
      y: the numbers of micro-batches.
      axis: the axis of the examples; ``None``: there is none.
      limit: the relative tolerance.
      smallest_scale: the smallest number that a tolerance is relative to.
    """
    if x.dtype.kind not in "fc":
        return np.where(x == y, 0.0, np.inf)
    with np.errstate(all="ignore"):
        distance = np.abs(x - y)
        is_equal = (x == y) | (np.isnan(x) & np.isnan(y))
        distance = np.where(is_equal, 0.0, distance)

        values = np.maximum(np.abs(x), np.abs(y))
        values = np.where(np.isfinite(values), values, 0.0)
        other_axes = tuple(i for i in range(values.ndim) if i != axis)
        scale = np.max(values, axis=other_axes, keepdims=True, initial=0.0)
        scale_of_array = _SMALLEST_SCALE * np.max(values, initial=0.0)
        scale = np.maximum(scale, max(smallest_scale, scale_of_array))

        distance = np.where(distance == 0, 0.0, distance / (limit * scale))
    return np.where(np.isnan(distance), np.inf, distance)


def numbers(leaf: Any) -> Any:
    """An array of NumPy in double precision; keys of random numbers as their data."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    is_complex = jnp.issubdtype(leaf.dtype, jnp.complexfloating)
    wide_dtype = complex if is_complex else float
    is_floating = jnp.issubdtype(leaf.dtype, jnp.inexact)
    return np.asarray(leaf).astype(wide_dtype) if is_floating else np.asarray(leaf)
