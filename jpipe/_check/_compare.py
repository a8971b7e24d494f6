"""What is computed of a batch at once, compared with what its parts give."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._jaxprs._jaxpr import is_inexact
from .._layers._stage import shapes
from .._layers._tree import flat

PyTree = Any

# Much smaller numbers than those around them are differences of larger ones, and hold
# the rounding errors of these. So much the largest counts at least.
_SMALL = 1e-3


@dataclass(frozen=True)
class Difference:
    """Where a batch at once and its micro-batches differ most.

    Attributes:
      what: what differs, such as ``"outputs"``.
      example: the number of the example; ``None`` if it is of none.
      at_once: the value that all examples give at once.
      in_microbatches: the value that they give in micro-batches.
      size: how far they are apart, in tolerances.
      reason: what is wrong, where no values can be compared.
    """

    what: str
    example: int | None = None
    at_once: complex = 0.0
    in_microbatches: complex = 0.0
    size: float = float("inf")
    reason: str = ""

    def __str__(self) -> str:
        where = "" if self.example is None else f", most in example {self.example}"
        return f"{self.what} " + (
            self.reason
            or f"differ{where}: {self.at_once:.6g} at once, "
            f"{self.in_microbatches:.6g} in micro-batches"
        )


class Unlike(Exception):
    """Results of micro-batches that cannot be joined: raised with a `Difference`."""


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


def floating(tree: PyTree, axes: Sequence[int | None]) -> list[int | None]:
    """The axes of leaves that have a gradient."""
    pairs = zip(jax.tree.leaves(tree), axes, strict=True)
    return [axis for leaf, axis in pairs if is_inexact(leaf)]


def joined(what: str, whole: PyTree, parts: Sequence[PyTree]) -> PyTree:
    """What micro-batches give, as that of all examples.

    Args:
      what: what it is, for the message.
      whole: specs of what all examples give at once.
      parts: what each micro-batch gives.

    Returns:
      Arrays; what has no axis of examples, of each micro-batch along a new first axis.

    Raises:
      Unlike: if they cannot be joined.
    """

    def join(leaf: Any, *each: Any) -> jax.Array:
        axis = axis_of(leaf, each[0])
        made = jnp.stack(each) if axis is None else jnp.concatenate(each, axis)
        if made.shape[axis is None :] != leaf.shape:
            raise TypeError(f"{made.shape} is not {leaf.shape}")
        return made

    structures = {*map(jax.tree.structure, (whole, *parts))}
    try:
        if len(structures) == 1:
            return jax.tree.map(join, whole, *parts)
    except (TypeError, ValueError):  # of shapes that do not fit
        pass
    given = " and ".join(map(shapes, parts))
    reason = f"are {shapes(whole)} at once, {given} in micro-batches"
    raise Unlike(Difference(what, reason=reason))


def named(state: Mapping[str, PyTree]) -> dict[str, Any]:
    """What training changes besides parameters, by name, to be compared as ``"state"``.

    In place of each variance next to a mean, as of a batch norm, is the mean square: of
    all examples that is the mean of those of its parts.
    """
    found = flat(state)
    for names, leaf in found.items():
        mean = found.get((*names[:-1], "mean"))
        if names[0] == "batch_stats" and names[-1] == "var" and mean is not None:
            found[names] = leaf + jnp.abs(mean) ** 2
    return {"/".join(map(str, names)): leaf for names, leaf in found.items()}


def compare(
    what: str,
    whole: PyTree,
    parts: PyTree,
    axes: Sequence[int | None],
    sizes: Sequence[int],
    limit: float,
    least: float = 0.0,
    reductions: Sequence[Sequence[str]] | None = None,
) -> Difference | None:
    """The largest difference of all leaves, if there is one.

    Args:
      what: what is compared, for the message.
      whole: that of all examples at once.
      parts: that of micro-batches: see `joined`.
      axes: where the examples are in each leaf.
      sizes: how many examples each micro-batch has.
      limit: how far numbers may be apart, relative to the largest next to them.
      least: how large the largest is at least.
      reductions: what a leaf without an axis of examples may be of those of the
        micro-batches, for each leaf: the ``"mean"``, which of integers is the last,
        the ``"sum"``, or ``"each"`` of them; default: the mean.
    """
    paths, found = jax.tree_util.tree_leaves_with_path(whole), []
    if reductions is None:
        reductions = [("mean",)] * len(paths)
    for (path, leaf), other, axis, names in zip(
        paths, jax.tree.leaves(parts), axes, reductions, strict=True
    ):
        leaf, other = numbers(leaf), numbers(other)
        made, around = [other], least
        if other.ndim > leaf.ndim:
            # A mean or a sum is rounded as what it is made of.
            around = max(least, size(other))
            made = [_reduce(leaf, other, name, sizes) for name in names]
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


def _reduce(whole: Any, parts: Any, name: str, sizes: Sequence[int]) -> Any:
    """The values of micro-batches, stacked on a first axis, as one: see `compare`."""
    if name == "sum":
        return parts.sum(0)
    if name == "each":  # the one that differs most
        axes = tuple(range(1, parts.ndim))
        return parts[np.argmax(np.sum(parts != whole, axes))]
    return np.average(parts, 0, sizes) if parts.dtype.kind in "fc" else parts[-1]


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
