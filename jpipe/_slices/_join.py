"""How what micro-batches return becomes what the mini-batch returns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from .._faults import refuse
from .._functions import _microbatch
from .._functions._weights import is_inexact
from .._instructions._graph import Graph, Place, Value
from .._jaxprs._function import Function

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
    joins: Sequence[Join],
    rows: Sequence[Sequence[Value]],
    weights: Sequence[Value],
) -> dict[int, Value]:
    """Writes the joins into a graph.

    Args:
      graph: the graph.
      joins: what is joined how.
      rows: what each micro-batch returns.
      weights: the parameters.

    Returns:
      By the number of a leaf what becomes of it.
    """
    by_place: dict[Place, list[Join]] = {}
    for join in joins:
        first = weights[join.old[0]] if join.old else rows[0][join.leaves[0]]
        by_place.setdefault(graph.places[first], []).append(join)
    found: dict[int, Value] = {}
    for place, own in by_place.items():
        reads = [
            value
            for join in own
            for value in (
                *(row[i] for i in join.leaves for row in rows),
                *(weights[k] for k in join.old),
            )
        ]
        run = _in_one(own, len(rows))
        function = Function.like("join_aux", run, *(graph.specs[v] for v in reads))
        made = iter(graph.call(function, place, reads))
        for join in own:
            # Two statistics of a norm may stay in two places.
            at = [graph.places[weights[k]] for k in join.old] or [place]
            for i, (leaf, value) in enumerate(zip(join.leaves, made, strict=False)):
                found[leaf] = graph.at(value, at[i])
    return found


def _in_one(joins: Sequence[Join], count: int) -> Callable[..., list[Any]]:
    """Several joins of so many micro-batches as a function of flat leaves."""

    def run(*leaves: Any) -> list[Any]:
        given, results = iter(leaves), list[Any]()
        for join in joins:
            columns = [[next(given) for _ in range(count)] for _ in join.leaves]
            results += join.run(columns, [next(given) for _ in join.old])
        return results

    return run
