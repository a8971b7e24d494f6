"""What is computed of a batch at once, compared with what its parts give.

Pure functions of pytrees: of whatever was computed on all examples together, and on
those of each of several micro-batches.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._layers._tree import flat

PyTree = Any

# Much smaller numbers than those around them are differences of larger ones, and hold
# the rounding errors of these. So much the largest counts at least.
_SMALL = 1e-3


@dataclass(frozen=True)
class Difference:
    """Where a batch at once and its parts differ most.

    Attributes:
      what: what differs, such as ``"outputs"``.
      example: the number of the example; ``None`` if it is of none.
      whole: the value for the batch at once.
      parts: the value that the parts give.
      size: how far they are apart, in tolerances.
      reason: what is wrong, where no values can be compared.
    """

    what: str
    example: int | None = None
    whole: complex = 0.0
    parts: complex = 0.0
    size: float = float("inf")
    reason: str = ""

    def __str__(self) -> str:
        where = "" if self.example is None else f", most in example {self.example}"
        return f"{self.what} " + (
            self.reason
            or f"differ{where}: {self.whole:.6g} at once, {self.parts:.6g} in "
            f"micro-batches"
        )


def tolerance(dtypes: Iterable[Any]) -> float:
    """The largest relative difference that rounding explains.

    A thousand units in the last place: errors of a sum of a million numbers. Of dtypes
    of 16 bits and fewer it is four: XLA adds up in 32 bits, and rounds once.

    Args:
      dtypes: those in which something is computed; the narrowest counts.
    """
    floating = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact)]
    eps = max((float(jnp.finfo(dtype).eps) for dtype in floating), default=0.0)
    return (4 if eps > 1e-4 else 1000) * eps


def axis_of(whole: Any, part: Any) -> int | None:
    """Where the examples are: the axis of two arrays that has different lengths."""
    pairs = zip(whole.shape, part.shape, strict=False)
    return next((i for i, (n, m) in enumerate(pairs) if n != m), None)


def cut(whole: PyTree, parts: Sequence[PyTree]) -> list[PyTree]:
    """A pytree of all examples, cut as its parts are.

    Args:
      whole: arrays of all examples.
      parts: the same of each micro-batch. What has no axis of examples is that of the
        part.
    """
    leaves, structure = jax.tree.flatten(whole)
    starts, pieces = [0] * len(leaves), []
    for part in parts:
        piece = jax.tree.leaves(part)
        for i, (leaf, own) in enumerate(zip(leaves, piece, strict=True)):
            axis = axis_of(leaf, own)
            if axis is not None:
                stop = starts[i] + own.shape[axis]
                piece[i] = leaf[(slice(None),) * axis + (slice(starts[i], stop),)]
                starts[i] = stop
        pieces.append(jax.tree.unflatten(structure, piece))
    return pieces


def why_not(whole: PyTree, parts: Sequence[PyTree]) -> str:
    """Why parts cannot be joined to a whole; empty if they can. Specs will do."""
    structure = jax.tree.structure(whole)
    if any(jax.tree.structure(part) != structure for part in parts):
        return "have another structure in micro-batches"
    for leaf, *own in zip(*map(jax.tree.leaves, (whole, *parts)), strict=True):
        axis, joined = axis_of(leaf, own[0]), list(own[0].shape)
        if axis is not None:
            joined[axis] = sum(one.shape[axis] for one in own if axis < len(one.shape))
        if tuple(joined) != leaf.shape:
            shapes = " and ".join(str(list(one.shape)) for one in own)
            return f"have shape {list(leaf.shape)} at once, {shapes} in micro-batches"
    return ""


def named(state: PyTree) -> dict[str, Any]:
    """What training changes besides parameters, by name, to be compared as ``"state"``.

    In place of each variance next to a mean, as of a batch norm, is the mean square: of
    all examples that is the mean of those of its parts.
    """
    found = flat(state)
    for names, leaf in found.items():
        mean = found.get((*names[:-1], "mean"))
        if names[0] == "batch_stats" and names[-1] == "var" and mean is not None:
            found[names] = numbers(leaf) + np.abs(numbers(mean)) ** 2
    return {"/".join(map(str, names)): leaf for names, leaf in found.items()}


def mean_or_sum(each: Sequence[Any], sizes: Sequence[int]) -> list[Any]:
    """What an output without an axis of examples may be for all of them."""
    return [np.average(each, axis=0, weights=sizes), sum(each)]


def mean_or_last(each: Sequence[Any], sizes: Sequence[int]) -> list[Any]:
    """What a state becomes: the mean, or of integers what the last part has."""
    is_number = each[0].dtype.kind in "fc"
    return [np.average(each, axis=0, weights=sizes) if is_number else each[-1]]


def total(each: Sequence[Any], sizes: Sequence[int]) -> list[Any]:
    """What a gradient without an axis of examples is: the sum."""
    return [sum(each)]


def compare(
    what: str,
    whole: PyTree,
    parts: Sequence[PyTree],
    sizes: Sequence[int],
    limit: float,
    merge: Callable[..., list[Any]] = total,
    least: float = 0.0,
) -> Difference | None:
    """The largest difference of all leaves, if there is one.

    Args:
      what: what is compared, for the message.
      whole: that of all examples.
      parts: those of the micro-batches.
      sizes: how many examples each has.
      limit: how far numbers may be apart, relative to the largest next to them.
      merge: what a leaf without an axis of examples may be for all of them.
      least: how large the largest is at least.
    """
    if reason := why_not(whole, parts):
        return Difference(what, reason=reason)
    paths, found = jax.tree_util.tree_leaves_with_path(whole), []
    columns = zip(*map(jax.tree.leaves, parts), strict=True)
    for (path, leaf), own in zip(paths, columns, strict=True):
        axis, each, leaf = axis_of(leaf, own[0]), [*map(numbers, own)], numbers(leaf)
        # A mean or a sum is rounded as what it is made of.
        around = max(least, size(each)) if axis is None else least
        made = merge(each, sizes) if axis is None else [np.concatenate(each, axis)]
        gaps = [_apart(leaf, one, axis, limit, around) for one in made]
        best = min(range(len(made)), key=lambda i: np.max(gaps[i], initial=0))
        gap, nearest = gaps[best], made[best]
        if np.max(gap, initial=0) > 1:
            at = np.unravel_index(np.argmax(gap), gap.shape)
            # Tokens may be merged with examples.
            example = None
            if axis is not None:
                example = int(at[axis] * sum(sizes) // leaf.shape[axis])
            label = what + (jax.tree_util.keystr(path) if len(paths) > 1 else "")
            values = leaf[at].item(), nearest[at].item()
            found.append(Difference(label, example, *values, float(gap[at])))
    return max(found, key=lambda one: one.size, default=None)


def size(tree: PyTree) -> float:
    """The largest finite number of a pytree."""
    sizes = [np.abs(numbers(leaf)) for leaf in jax.tree.leaves(tree)]
    found = [np.max(one, initial=0, where=np.isfinite(one)) for one in sizes]
    return float(max(found, default=0.0))


def _apart(one: Any, two: Any, axis: int | None, limit: float, least: float) -> Any:
    """How far each two numbers are apart, in tolerances.

    These are relative to the largest number of the same example. NaN is as NaN, and
    infinity as infinity.
    """
    if one.dtype.kind not in "fc":
        return np.where(one == two, 0.0, np.inf)
    with np.errstate(all="ignore"):
        gap = np.abs(one - two)
        gap = np.where((one == two) | (np.isnan(one) & np.isnan(two)), 0.0, gap)
        values = np.maximum(np.abs(one), np.abs(two))
        values = np.where(np.isfinite(values), values, 0.0)
        others = tuple(i for i in range(values.ndim) if i != axis)
        scale = np.max(values, axis=others, keepdims=True, initial=0.0)
        scale = np.maximum(scale, max(least, _SMALL * np.max(values, initial=0.0)))
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
