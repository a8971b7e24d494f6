"""Layers on a mini-batch, and how what its micro-batches return becomes one result."""

from collections.abc import Sequence
from typing import Any

import jax

from .._functions import _microbatch
from .._functions._objective import Objective
from . import _join
from ._built import Built
from ._listed import Listed

PyTree = Any


def forward(listed: Listed, out_axes: Any) -> Built:
    """The forward pass of layers.

    Args:
      listed: the layers.
      out_axes: on which axes the outputs of the micro-batches are joined.
    """
    batch, y = listed.batch, listed.y
    axes = _microbatch.flat_axes(out_axes, y, "outputs", "out_axes")
    if batch.num_parts > 1:
        _microbatch.check_joinable(y, axes, batch.sizes[0], out_axes)
    joins = _join.by_axes(out_axes, y, [], "out")
    return Built(listed.pipe, listed.stages, batch, listed.layout, joins, y)


def gradient(listed: Listed, objective: Objective) -> Built:
    """The loss of layers and its gradients.

    Args:
      listed: the layers and the loss.
      objective: the loss.

    Raises:
      ValueError: if aux of micro-batches cannot be joined.
    """
    sizes = listed.batch.sizes
    aux, last = listed.aux[sizes[0]], listed.aux[sizes[-1]]
    _check_aux(aux, last, _join.flat_axes(objective.aux_axes, aux), sizes)
    each = [size for size in sizes for _ in range(listed.batch.num_shards)]
    shares = [size / sum(each) for size in each]
    joins = _join.by_axes(objective.aux_axes, aux, shares)
    parts = listed.pipe, listed.stages, listed.batch, listed.layout
    return Built(*parts, joins, aux)


def _check_aux(
    first: PyTree, last: PyTree, axes: Sequence[int | None], sizes: Sequence[int]
) -> None:
    """Checks that aux of all micro-batches, of two sizes maybe, can be joined.

    Raises:
      ValueError: with every leaf that lacks the axis or differs elsewhere.
    """
    triples = zip(
        jax.tree_util.tree_leaves_with_path(first),
        jax.tree.leaves(last),
        axes,
        strict=True,
    )
    lacking, ragged = [], []
    for (path, a), b, axis in triples:
        label = f"aux{jax.tree_util.keystr(path)}"
        if axis is not None and not -a.ndim <= axis < a.ndim:
            lacking.append(f"{label} of shape {a.shape} has no axis {axis}")
        elif _without_axis(a.shape, axis) != _without_axis(b.shape, axis):
            on = "" if axis is None else f", joined on axis {axis}"
            ragged.append(f"{label}{on}: {a.shape} and {b.shape}")
    if lacking:
        raise ValueError("cannot join aux on aux_axes: " + "; ".join(lacking))
    if ragged:
        raise ValueError(
            f"the sizes {sizes} of micro-batches differ and so do the shapes of aux: "
            + "; ".join(ragged)
            + "; return sums or means, name in aux_axes= the axis of the examples, or "
            "give a batch that num_microbatches divides"
        )


def _without_axis(shape: tuple[int, ...], axis: int | None) -> tuple[int, ...]:
    """A shape without one axis."""
    return shape if axis is None else (*shape[:axis], *shape[axis:][1:])
