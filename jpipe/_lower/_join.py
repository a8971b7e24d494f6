"""How what micro-batches return becomes what the mini-batch returns.

Each leaf by itself, and it is what follows from what that decides:

* A leaf that follows from an example differs between micro-batches. They are joined on
  the axis of the examples, stacked (aux), or reduced by `MEAN` or `SUM`. There is no
  single value for it, so that ``out_axes=None`` is refused, as by `jax.vmap`.
* A leaf that follows from none is what one device returns. Its shape there is that of
  a trace of the whole mini-batch: a codebook of shape ``(2, 3)`` keeps it, and
  ``jnp.zeros((len(x), 3))`` has a row for each example.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from .._arguments import _microbatch
from .._jaxprs._jaxpr import is_inexact
from .._layers._text import shape_text
from .._messages import raise_all
from .._trace._accumulation import accumulate, extend_mean, sum_spec
from .._trace._microbatch_outputs import MicrobatchOutputs

PyTree = Any
# values of all micro-batches -> the value of the mini-batch
Run = Callable[[Sequence[Any]], Any]


class Reduction:
    """A reduction of the values of micro-batches, typed in place of an axis."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"jpipe.{self._name}"


MEAN: Any = Reduction("MEAN")
SUM: Any = Reduction("SUM")


@dataclass(frozen=True)
class Join:
    """A leaf of what micro-batches return, as one.

    Attributes:
      leaf: which of what is returned it is.
      run: of the values of all micro-batches one.
    """

    leaf: int
    run: Run


def of_aux(axes: Any, results: MicrobatchOutputs) -> list[Join]:
    """The join of each leaf of aux.

    Args:
      axes: a prefix of aux: an axis, `MEAN`, `SUM`, or ``None`` for a new axis.
      results: what micro-batches return.

    Raises:
      ValueError: if aux of micro-batches cannot be joined.
    """
    flat = _flat_axes(axes, results, "aux", "aux_axes")
    _check_aux(flat, results)
    runs = [
        jnp.stack if axis is None else _run(i, axis, results)
        for i, axis in enumerate(flat)
    ]
    for i, axis in enumerate(flat):
        # Several rows to an example, such as one for each token.
        if runs[i] is None and _is_axis(axis) and results.joins_to_whole(i, axis):
            runs[i] = _along(axis)
    return _joins(
        runs,
        results,
        f"aux of a micro-batch of {results.sizes[0]} cannot be joined on aux_axes="
        f"{axes!r}; return the examples on that axis, or type aux_axes= with None for "
        f"what each micro-batch returns, jpipe.MEAN for a mean over the examples, "
        f"jpipe.SUM for a sum or a count, as in aux_axes=(0, jpipe.MEAN)",
        "aux",
    )


def of_outputs(axes: Any, results: MicrobatchOutputs) -> list[Join]:
    """The join of each leaf of outputs.

    Args:
      axes: a prefix of outputs: an axis, `MEAN`, `SUM`, or ``None`` for what follows
        from no example.
      results: what micro-batches return.

    Raises:
      ValueError: if outputs of micro-batches cannot be joined.
    """
    flat = _flat_axes(axes, results, "outputs", "out_axes")
    raise_all(
        "out_axes=None is for what follows from no example, as in jax.vmap; of these "
        "outputs each micro-batch makes another. Type jpipe.MEAN for a mean over the "
        "examples, jpipe.SUM for a sum or a count, or the axis of the examples, as in "
        "out_axes=(0, jpipe.MEAN); for all else, such as a maximum, return it for each "
        "example, or type num_microbatches=1",
        [
            _label("outputs", path, leaf)
            for (path, leaf), axis, follows in zip(
                results.leaves, flat, results.depends_on_examples, strict=True
            )
            if axis is None and follows and len(results.sizes) > 1
        ],
    )
    raise_all(
        "out_axes=jpipe.MEAN is for floating dtypes; of a count type jpipe.SUM, else "
        "x.astype(float)",
        [
            f"outputs{jax.tree_util.keystr(path)} is {leaf.dtype}"
            for (path, leaf), axis, follows in zip(
                results.leaves, flat, results.depends_on_examples, strict=True
            )
            if axis is MEAN and follows and not is_inexact(leaf)
        ],
    )
    return _joins(
        [_run(i, axis, results) for i, axis in enumerate(flat)],
        results,
        f"outputs of a micro-batch of {results.sizes[0]} cannot be joined on out_axes="
        f"{axes!r}; return the examples on that axis, or type num_microbatches=1, or "
        f"out_axes=, with jpipe.MEAN for a mean over the examples, jpipe.SUM for a sum "
        f"or a count, as in out_axes=(0, jpipe.MEAN)",
        "outputs",
    )


def _flat_axes(
    axes: Any, results: MicrobatchOutputs, what: str, name: str
) -> list[Any]:
    """An axis, `MEAN`, `SUM` or ``None`` for each leaf.

    Raises:
      ValueError: if they do not fit, or micro-batches return other trees.
    """
    if jax.tree.structure(results.first) != jax.tree.structure(results.last):
        raise ValueError(
            f"the sizes {tuple(results.sizes)} of micro-batches differ and so does "
            f"what is in {what}: {shape_text(results.first)} and "
            f"{shape_text(results.last)}; return the same for each, or give a batch "
            f"that num_microbatches divides"
        )
    flat = _microbatch.leaf_axes(axes, results.first, what, name, (MEAN, SUM))
    pairs = zip(results.leaves, flat, strict=True)
    raise_all(
        "jpipe.SUM is for numbers; type x.astype(int)",
        [
            f"{what}{jax.tree_util.keystr(path)} is {leaf.dtype}"
            for (path, leaf), axis in pairs
            if axis is SUM and not jnp.issubdtype(leaf.dtype, jnp.number)
        ],
    )
    return flat


def _joins(
    runs: Sequence[Run | None], results: MicrobatchOutputs, title: str, what: str
) -> list[Join]:
    """Joins of all leaves; refuses those that cannot be joined."""
    pairs = zip(results.leaves, runs, strict=True)
    raise_all(title, [_label(what, *leaf) for leaf, run in pairs if run is None])
    return [Join(i, run) for i, run in enumerate(runs) if run is not None]


def _run(i: int, axis: Any, results: MicrobatchOutputs) -> Run | None:
    """The function that joins the values of a leaf; ``None`` if there is none.

    Args:
      i: which leaf.
      axis: an axis, `MEAN` or `SUM`; or ``None``, of what follows from no example.
      results: what micro-batches return.
    """
    if len(results.sizes) == 1:
        return _first
    _, leaf = results.leaves[i]
    first, last = results.shapes_of(i)
    if axis is MEAN:
        shares = [size / sum(results.sizes) for size in results.sizes]
        run = _mean(shares) if is_inexact(leaf) else _last
        return run if first == last else None
    if not results.depends_on_examples[i]:
        return _of_one_device(i, axis, results)
    if axis is SUM:
        return _sum if first == last else None
    is_joined = results.has_row_per_example(i, axis)
    is_joined &= _without_axis(first, axis) == _without_axis(last, axis)
    return _along(axis) if is_joined else None


def _of_one_device(i: int, axis: Any, results: MicrobatchOutputs) -> Run | None:
    """The function that joins a leaf without examples as one device returns it.

    Args:
      i: which leaf.
      axis: what ``out_axes`` or ``aux_axes`` says of it.
      results: what micro-batches return.

    Returns:
      What makes it; ``None`` if micro-batches do not.
    """
    if results.is_input(i):
        return _first
    if closed := results.constant(i):
        return lambda values: core.jaxpr_as_fun(closed)()[0]
    if results.has_fixed_shape(i):
        return _first
    is_joined = _is_axis(axis) and results.joins_to_whole(i, axis)
    return _along(axis) if is_joined else None


def _check_aux(axes: Sequence[Any], results: MicrobatchOutputs) -> None:
    """Checks that aux of all micro-batches, of two sizes maybe, can be joined.

    Raises:
      ValueError: with every leaf that lacks the axis or differs elsewhere.
    """
    lacking, ragged = [], []
    if len(results.sizes) == 1:
        return
    for i, ((path, leaf), axis) in enumerate(zip(results.leaves, axes, strict=True)):
        label = f"aux{jax.tree_util.keystr(path)}"
        first, last = results.shapes_of(i)
        is_axis = _is_axis(axis)
        if is_axis and not results.depends_on_examples[i]:
            continue
        if is_axis and not -leaf.ndim <= axis < leaf.ndim:
            lacking.append(f"{label} of shape {first} has no axis {axis}")
            continue
        along = axis if is_axis else None
        if _without_axis(first, along) != _without_axis(last, along):
            on = f", joined on axis {axis}" if is_axis else ""
            ragged.append(f"{label}{on}: {first} and {last}")
    if lacking:
        raise ValueError("cannot join aux on aux_axes: " + "; ".join(lacking))
    if ragged:
        raise ValueError(
            f"the sizes {tuple(results.sizes)} of micro-batches differ and so do the "
            f"shapes of aux: {'; '.join(ragged)}; return sums or means, name in "
            f"aux_axes= the axis of the examples, or give a batch that "
            f"num_microbatches divides"
        )


def _is_axis(axis: Any) -> bool:
    return axis is not None and not isinstance(axis, Reduction)


def _label(what: str, path: Any, leaf: Any) -> str:
    return f"{what}{jax.tree_util.keystr(path)} has shape {leaf.shape}"


def _without_axis(shape: tuple[int, ...], axis: int | None) -> tuple[int, ...]:
    """A shape without one axis."""
    return shape if axis is None else (*shape[:axis], *shape[axis:][1:])


def _along(axis: int) -> Run:
    """A function that joins values on an axis."""
    return lambda values: jnp.concatenate(values, axis)


def _first(values: Sequence[Any]) -> Any:
    return values[0]


def _last(values: Sequence[Any]) -> Any:
    return values[-1]


def _sum(values: Sequence[Any]) -> Any:
    """The sum of values, in single precision where they are of half."""
    spec = sum_spec(values[0])
    terms = [[value.astype(spec.dtype)] for value in values]
    (total,) = functools.reduce(accumulate, terms)
    return total.astype(values[0].dtype)


def _mean(shares: Sequence[float]) -> Any:
    return lambda values: mean(values, shares)


def mean(values: Sequence[jax.Array], shares: Sequence[float]) -> jax.Array:
    """The mean over the examples; that of equal values is that value to the bit."""
    so_far, seen = values[0], shares[0]
    for value, share in zip(values[1:], shares[1:], strict=True):
        seen += share
        weight = jnp.asarray(share / seen, jnp.result_type(so_far, jnp.float32))
        so_far = extend_mean(so_far, value, weight)
    return so_far
