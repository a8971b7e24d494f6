"""Compares numbers that a batch gives at once with those of its micro-batches."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._jaxprs._jaxpr import is_inexact
from .._layers._text import shape_text
from .._layers._variable_paths import flatten_variables

PyTree = Any

# Small numbers may be differences of larger ones beside them, and then hold the
# rounding errors of these: the scale is at least this fraction of the largest number.
_SMALLEST_SCALE = 1e-3


@dataclass(frozen=True)
class Difference:
    """The largest difference between a batch at once and its micro-batches.

    Attributes:
      kind: ``"outputs"``, ``"state"`` or ``"gradients"``.
      what: the array that differs, in words, such as ``"gradients by input[0]"``.
      example: the index of the example; ``None`` if it is of none.
      at_once: the number that all examples give at once.
      in_microbatches: the number that they give in micro-batches.
      size: the difference of the two, in tolerances.
      reason: the fault, where no numbers can be compared.
    """

    kind: str
    what: str
    example: int | None = None
    at_once: complex = 0.0
    in_microbatches: complex = 0.0
    size: float = float("inf")
    reason: str = ""

    def __str__(self) -> str:
        if self.reason:
            return f"{self.what} {self.reason}"
        where = "" if self.example is None else f", most in example {self.example}"
        return (
            f"{self.what} differ{where}: {self.at_once:.6g} at once, "
            f"{self.in_microbatches:.6g} in micro-batches"
        )


class Unlike(Exception):
    """Results of micro-batches that cannot be joined: raised with a `Difference`."""


def tolerance(dtypes: Iterable[Any]) -> float:
    """The largest relative difference that rounding explains.

    A thousand units in the last place: errors of a sum of a million numbers. Of dtypes
    of 16 bits and fewer it is four: XLA adds up in 32 bits, and rounds once.

    Args:
      dtypes: the dtypes that are computed in; the narrowest counts.
    """
    floating = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact)]
    eps = max((float(jnp.finfo(dtype).eps) for dtype in floating), default=0.0)
    return (4 if eps > 1e-4 else 1000) * eps


def axis_of(whole: Any, part: Any) -> int | None:
    """The axis of the examples: the one in which two arrays have other lengths."""
    pairs = zip(whole.shape, part.shape, strict=False)
    return next((i for i, (n, m) in enumerate(pairs) if n != m), None)


def floating(tree: PyTree, axes: Sequence[int | None]) -> list[int | None]:
    """The axes of leaves that have a gradient."""
    pairs = zip(jax.tree.leaves(tree), axes, strict=True)
    return [axis for leaf, axis in pairs if is_inexact(leaf)]


def join(kind: str, whole: PyTree, parts: Sequence[PyTree]) -> PyTree:
    """Joins the results of micro-batches along their examples.

    Args:
      kind: see `Difference`.
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
    raise Unlike(Difference(kind, kind, reason=reason))


def comparable_state(state: Mapping[str, PyTree]) -> dict[str, Any]:
    """The variables that training changes besides parameters, by their paths.

    In place of each variance beside a mean, as of a batch norm, is the mean square: of
    all examples that is the mean of those of its parts.
    """
    leaves = flatten_variables(state)
    for path, leaf in leaves.items():
        mean = leaves.get((*path[:-1], "mean"))
        if path[0] == "batch_stats" and path[-1] == "var" and mean is not None:
            leaves[path] = leaf + jnp.abs(mean) ** 2
    return {"/".join(map(str, path)): leaf for path, leaf in leaves.items()}


def compare(
    kind: str,
    *,
    by: str = "",
    whole: PyTree,
    parts: PyTree,
    axes: Sequence[int | None],
    sizes: Sequence[int],
    limit: float,
    smallest_scale: float = 0.0,
    reductions: Sequence[Sequence[str]] | None = None,
) -> Difference | None:
    """The largest difference of all leaves; ``None`` if all are within tolerance.

    Args:
      kind: see `Difference`.
      by: of gradients, the inputs by which they are, in words.
      whole: the arrays of all examples at once.
      parts: the arrays of micro-batches: see `join`.
      axes: the axis of the examples in each leaf.
      sizes: the number of examples of each micro-batch.
      limit: the tolerance, relative to the largest number of the same example.
      smallest_scale: the least number that differences are relative to.
      reductions: what each leaf without an axis of examples may be of those of the
        micro-batches: their ``"mean"``, which of integers is the last, their ``"sum"``,
        or ``"each"`` of them; default: the mean.
    """
    what = f"{kind} by {by}" if by else kind
    paths = jax.tree_util.tree_leaves_with_path(whole)
    if reductions is None:
        reductions = [("mean",)] * len(paths)
    differences: list[Difference] = []
    for (path, leaf), part_leaf, axis, names in zip(
        paths, jax.tree.leaves(parts), axes, reductions, strict=True
    ):
        at_once = numbers(leaf)
        stacked = numbers(part_leaf)
        candidates = [stacked]
        scale = smallest_scale
        if stacked.ndim > at_once.ndim:
            # A mean or a sum is rounded as the numbers that it is made of.
            scale = max(scale, size(stacked))
            candidates = [_reduce(at_once, stacked, name, sizes) for name in names]

        gaps = [
            _distances(at_once, one, axis, limit=limit, smallest_scale=scale)
            for one in candidates
        ]
        best = min(range(len(gaps)), key=lambda i: np.max(gaps[i], initial=0))
        gap = gaps[best]
        if np.max(gap, initial=0) <= 1:
            continue

        index = np.unravel_index(np.argmax(gap), gap.shape)
        example = None
        if axis is not None:  # tokens may be merged with examples
            example = int(index[axis] * sum(sizes) // at_once.shape[axis])
        label = jax.tree_util.keystr(path) if len(paths) > 1 else ""
        differences.append(
            Difference(
                kind=kind,
                what=what + label,
                example=example,
                at_once=at_once[index].item(),
                in_microbatches=candidates[best][index].item(),
                size=float(gap[index]),
            )
        )
    return max(differences, key=lambda one: one.size, default=None)


def _reduce(whole: Any, parts: Any, name: str, sizes: Sequence[int]) -> Any:
    """Reduces the arrays of micro-batches, stacked on a first axis: see `compare`."""
    if name == "sum":
        return parts.sum(0)
    if name == "each":  # the one that differs most
        axes = tuple(range(1, parts.ndim))
        return parts[np.argmax(np.sum(parts != whole, axes))]
    return np.average(parts, 0, sizes) if parts.dtype.kind in "fc" else parts[-1]


def size(tree: PyTree) -> float:
    """The largest finite number of a pytree."""
    arrays = [np.abs(numbers(leaf)) for leaf in jax.tree.leaves(tree)]
    largest = [np.max(x, initial=0, where=np.isfinite(x)) for x in arrays]
    return float(max(largest, default=0.0))


def _distances(
    x: Any, y: Any, axis: int | None, *, limit: float, smallest_scale: float
) -> Any:
    """The distance of each two numbers of two arrays, in tolerances.

    These are relative to the largest number of the same example. NaN equals NaN, and
    infinity equals infinity.
    """
    if x.dtype.kind not in "fc":
        return np.where(x == y, 0.0, np.inf)
    with np.errstate(all="ignore"):
        gap = np.abs(x - y)
        gap = np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0.0, gap)
        values = np.maximum(np.abs(x), np.abs(y))
        values = np.where(np.isfinite(values), values, 0.0)
        other_axes = tuple(i for i in range(values.ndim) if i != axis)
        scale = np.max(values, axis=other_axes, keepdims=True, initial=0.0)
        least = max(smallest_scale, _SMALLEST_SCALE * np.max(values, initial=0.0))
        scale = np.maximum(scale, least)
        gap = np.where(gap == 0, 0.0, gap / (limit * scale))
    return np.where(np.isnan(gap), np.inf, gap)


def numbers(leaf: Any) -> Any:
    """An array of NumPy in double precision; keys of random numbers as their data."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    is_complex = jnp.issubdtype(leaf.dtype, jnp.complexfloating)
    wide = complex if is_complex else float
    is_inexact = jnp.issubdtype(leaf.dtype, jnp.inexact)
    return np.asarray(leaf).astype(wide) if is_inexact else np.asarray(leaf)
