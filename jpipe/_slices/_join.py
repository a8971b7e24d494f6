"""How what micro-batches return becomes what the mini-batch returns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from .._faults import refuse
from .._functions import _microbatch
from .._functions._batch import Batch
from .._functions._weights import is_inexact
from .._instructions._graph import Graph, Place, Value
from .._jaxprs._function import Function
from .._layers._stage import shapes
from .._run._sums import apart

PyTree = Any


class _Mean:
    """What stands in ``aux_axes`` for the mean over the examples."""

    def __repr__(self) -> str:
        return "jpipe.MEAN"


MEAN: Any = _Mean()


@dataclass(frozen=True)
class Join:
    """A leaf of what micro-batches return, as one.

    Attributes:
      leaf: which of what is returned it is.
      run: of the values of all micro-batches one.
    """

    leaf: int
    run: Callable[[Sequence[Any]], Any]


def of_aux(axes: Any, aux: PyTree, last: PyTree, sizes: Sequence[int]) -> list[Join]:
    """Each leaf of aux on its own, by ``aux_axes``.

    Args:
      axes: a prefix of ``aux``: an axis, `MEAN`, or ``None`` for a new axis.
      aux: specs of what the first micro-batch returns.
      last: specs of what the last one does.
      sizes: of the micro-batches.

    Raises:
      ValueError: if aux of micro-batches cannot be joined.
    """
    shares = [size / sum(sizes) for size in sizes]
    means = jax.tree.map(lambda axis: axis is MEAN, axes, is_leaf=_is_none)
    plain = jax.tree.map(
        lambda axis: None if axis is MEAN else axis, axes, is_leaf=_is_none
    )
    flat = _microbatch.flat_axes(plain, aux, "aux", "aux_axes")
    is_mean = jax.tree.leaves(jax.tree.broadcast(means, aux)) if flat else []
    leaves = jax.tree_util.tree_leaves_with_path(aux)
    if jax.tree.structure(aux) != jax.tree.structure(last):
        raise ValueError(
            f"the sizes {tuple(sizes)} of micro-batches differ and so does what is in "
            f"aux: {shapes(aux)} and {shapes(last)}; return the same for each, or give "
            f"a batch that num_microbatches divides"
        )
    _check_aux(leaves, jax.tree.leaves(last), flat, sizes)
    refuse(
        "jpipe.MEAN is for floating dtypes; type x.astype(float)",
        [
            f"aux{jax.tree_util.keystr(path)} is {leaf.dtype}"
            for (path, leaf), mean in zip(leaves, is_mean, strict=True)
            if mean and not is_inexact(leaf)
        ],
    )
    return [
        Join(i, _mean(shares) if mean else _along(axis))
        for i, (axis, mean) in enumerate(zip(flat, is_mean, strict=True))
    ]


def of_outputs(axes: Any, outputs: PyTree, sizes: Sequence[int]) -> list[Join]:
    """Each leaf of outputs on its own, by ``out_axes``: ``None`` is the same for all.

    Raises:
      ValueError: if outputs of micro-batches cannot be joined.
    """
    flat = _microbatch.flat_axes(axes, outputs, "outputs", "out_axes")
    if len(sizes) > 1:
        _microbatch.check_joinable(outputs, flat, sizes[0], axes)
    return [
        Join(i, _first if axis is None or len(sizes) == 1 else _along(axis))
        for i, axis in enumerate(flat)
    ]


def _check_aux(
    leaves: Sequence[tuple[Any, Any]],
    others: Sequence[Any],
    axes: Sequence[int | None],
    sizes: Sequence[int],
) -> None:
    """Checks that aux of all micro-batches, of two sizes maybe, can be joined.

    Raises:
      ValueError: with every leaf that lacks the axis or differs elsewhere.
    """
    lacking, ragged = [], []
    for (path, a), b, axis in zip(leaves, others, axes, strict=True):
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
            f"the sizes {tuple(sizes)} of micro-batches differ and so do the shapes of "
            f"aux: {'; '.join(ragged)}; return sums or means, name in aux_axes= the "
            f"axis of the examples, or give a batch that num_microbatches divides"
        )


def _without_axis(shape: tuple[int, ...], axis: int | None) -> tuple[int, ...]:
    """A shape without one axis."""
    return shape if axis is None else (*shape[:axis], *shape[axis:][1:])


def _along(axis: int | None) -> Any:
    """What joins values on an axis; ``None``: on a new one."""
    if axis is None:
        return jnp.stack
    return lambda values: jnp.concatenate(values, axis)


def _first(values: Sequence[Any]) -> Any:
    return values[0]


def _is_none(node: Any) -> bool:
    return node is None


def _mean(shares: Sequence[float]) -> Any:
    return lambda values: mean(values, shares)


def mean(values: Sequence[jax.Array], shares: Sequence[float]) -> jax.Array:
    """The mean over the examples; that of equal values is that value to the bit."""
    so_far, seen = values[0], shares[0]
    for value, share in zip(values[1:], shares[1:], strict=True):
        seen += share
        weight = jnp.asarray(share / seen, jnp.result_type(so_far, jnp.float32))
        # Not by their difference, which may overflow, or be none of two infinities.
        both = (so_far * (1 - weight) + value * weight).astype(so_far.dtype)
        so_far = jnp.where(value == so_far, so_far, both)
    return so_far


def joined(
    graph: Graph, batch: Batch, joins: Sequence[Join], rows: Sequence[Sequence[Value]]
) -> dict[int, Value]:
    """Writes the joins into a graph.

    Args:
      graph: the graph.
      batch: the mini-batch.
      joins: what is joined how.
      rows: what each micro-batch returns; its shards give a row each.

    Returns:
      By the number of a leaf what becomes of it.
    """
    by_place: dict[Place, list[Join]] = {}
    for join in joins:
        by_place.setdefault(graph.places[rows[0][join.leaf]], []).append(join)
    found: dict[int, Value] = {}
    for place, own in by_place.items():
        given = [[row[join.leaf] for join in own] for row in rows]
        parts, runs = apart(graph, batch, given), [join.run for join in own]

        def run(*leaves: Any, parts: Any = parts, runs: Any = runs) -> list[Any]:
            columns = zip(*parts(leaves), strict=True)
            return [run(column) for run, column in zip(runs, columns, strict=True)]

        reads = [value for row in given for value in row]
        specs = [_spec(graph, batch, value) for value in reads]
        function = Function.like("join_aux", run, *specs)
        made = graph.call(function, place, reads)
        found |= {join.leaf: value for join, value in zip(own, made, strict=True)}
    return {join.leaf: found[join.leaf] for join in joins}


def _spec(graph: Graph, batch: Batch, value: Value) -> Any:
    """What a function sees of a value: of what is stacked, all shards."""
    spec = graph.specs[value]
    if not graph.shardings[value].stacked:
        return spec
    return spec.update(shape=(batch.num_shards, *spec.shape))
