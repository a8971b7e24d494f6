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
from .._instructions._sharding import WHOLE
from .._jaxprs._function import Function
from .._run._totals import apart

PyTree = Any


class _Mean:
    """What stands in ``aux_axes`` for the mean over the examples."""

    def __repr__(self) -> str:
        return "jpipe.MEAN"


MEAN: Any = _Mean()


@dataclass(frozen=True)
class Join:
    """Some of what micro-batches return, as one.

    Attributes:
      leaves: which of what is returned it takes.
      run: of each leaf the values of all micro-batches, then the old values, to a
        result for each leaf.
      old: the parameters of which they are new values; where these are, it runs.
    """

    leaves: tuple[int, ...]
    run: Callable[[Sequence[Sequence[Any]], Sequence[Any]], Sequence[Any]]
    old: tuple[int, ...] = ()


def by_axes(
    axes: Any, aux: PyTree, shares: Sequence[float], name: str = "aux"
) -> list[Join]:
    """Each leaf on its own, as ``aux_axes`` or ``out_axes`` says.

    Args:
      axes: a prefix of ``aux``: an axis, `MEAN`, or ``None``: of aux for a new axis, of
        outputs for what is the same for all.
      aux: specs of what a micro-batch returns.
      shares: the part of the examples that each micro-batch has.
      name: ``"aux"`` or ``"out"``.
    """
    means = jax.tree.map(
        lambda axis: axis is MEAN, axes, is_leaf=lambda node: node is None
    )
    plain = jax.tree.map(
        lambda axis: None if axis is MEAN else axis,
        axes,
        is_leaf=lambda node: node is None,
    )
    flat = _microbatch.flat_axes(plain, aux, name, f"{name}_axes")
    is_mean = jax.tree.leaves(jax.tree.broadcast(means, aux)) if flat else []
    leaves = jax.tree_util.tree_leaves_with_path(aux)
    refuse(
        "jpipe.MEAN is for floating dtypes; type x.astype(float)",
        [
            f"aux{jax.tree_util.keystr(path)} is {leaf.dtype}"
            for (path, leaf), mean in zip(leaves, is_mean, strict=True)
            if mean and not is_inexact(leaf)
        ],
    )
    return [
        Join((i,), _mean(shares) if mean else _on(axis, name == "aux"))
        for i, (axis, mean) in enumerate(zip(flat, is_mean, strict=True))
    ]


def _on(axis: int | None, stacks: bool) -> Any:
    if axis is None and not stacks:
        return lambda columns, old: [columns[0][0]]
    join = _microbatch.joiner([axis])
    return lambda columns, old: join(*columns[0])


def _mean(shares: Sequence[float]) -> Any:
    def run(columns: Sequence[Sequence[Any]], old: Any) -> list[Any]:
        return [mean(columns[0], shares)]

    return run


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
    graph: Graph,
    batch: Batch,
    joins: Sequence[Join],
    rows: Sequence[Sequence[Value]],
    weights: Sequence[Value],
) -> dict[int, Value]:
    """Writes the joins into a graph.

    Args:
      graph: the graph.
      batch: the mini-batch.
      joins: what is joined how.
      rows: what each micro-batch returns; its shards give a row each.
      weights: the parameters.

    Returns:
      By the number of a leaf what becomes of it.
    """
    by_place: dict[Place, list[Join]] = {}
    shardings = graph.shardings
    for join in joins:
        first = weights[join.old[0]] if join.old else rows[0][join.leaves[0]]
        by_place.setdefault(graph.places[first], []).append(join)
    found: dict[int, Value] = {}
    for place, own in by_place.items():
        old = [weights[k] for join in own for k in join.old]
        leaves = [i for join in own for i in join.leaves]
        given = [[row[i] for i in leaves] for row in rows]
        run = _in_one(own, len(old), apart(graph, batch, given))
        reads = [*old, *(value for row in given for value in row)]
        specs = [_spec(graph, batch, value) for value in reads]
        function = Function.like("join_aux", run, *specs)
        # New values of parameters lie as the old ones.
        how = [
            shardings[weights[join.old[i]]] if join.old else WHOLE
            for join in own
            for i in range(len(join.leaves))
        ]
        made = iter(graph.call(function, place, reads, how=how))
        for join in own:
            # Two statistics of a norm may stay in two places.
            at = [graph.places[weights[k]] for k in join.old] or [place]
            for i, (leaf, value) in enumerate(zip(join.leaves, made, strict=False)):
                found[leaf] = graph.at(value, at[i])
    return found


def _spec(graph: Graph, batch: Batch, value: Value) -> Any:
    """What a function sees of a value: of what is stacked, all shards."""
    spec = graph.specs[value]
    if not graph.shardings[value].stacked:
        return spec
    return spec.update(shape=(batch.num_shards, *spec.shape))


def _in_one(
    joins: Sequence[Join], num_old: int, apart: Callable[..., list[list[Any]]]
) -> Callable[..., list[Any]]:
    """Several joins as a function of flat leaves: the old values, then all rows."""

    def run(*leaves: Any) -> list[Any]:
        old, columns = (
            iter(leaves[:num_old]),
            zip(*apart(leaves[num_old:]), strict=True),
        )
        return [
            result
            for join in joins
            for result in join.run(
                [next(columns) for _ in join.leaves], [next(old) for _ in join.old]
            )
        ]

    return run
