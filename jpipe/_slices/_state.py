"""What a call of a model writes beside its output, of all micro-batches."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from .._faults import refuse
from .._functions._weights import is_inexact
from .._jaxprs import _flow
from .._layers import _batchnorm
from ._join import Join, mean
from ._program import Traced

Path = tuple[Any, ...]


def joins(
    traced: Traced, first: int, written: Sequence[tuple[int, Path]], sizes: Any
) -> list[Join]:
    """How what is written becomes what it is after the mini-batch.

    Statistics of Flax's batch norms become those of all micro-batches, and move once;
    other floating leaves the mean over the examples; those of integers are what the
    last micro-batch makes of them.

    Args:
      traced: the program.
      first: the number of the first such leaf in what it returns.
      written: of each the number of the variable that it is, and its path.
      sizes: of the micro-batches.

    Returns:
      Of the leaves that are not given back as they were.

    Raises:
      ValueError: if a call writes parameters, or batch norms cannot be merged.
    """
    jaxpr, consts = traced.closed.jaxpr, traced.closed.consts
    leaves = traced.beside[first:]
    closed = core.ClosedJaxpr(jaxpr.replace(outvars=leaves), consts)
    origins = _flow.origins(closed, _batchnorm.MARK)
    new = [i for i, (at, _) in enumerate(written) if origins[i] != at]
    paths = [written[i][1] for i in new]
    refuse(
        "parameters are changed by the optimizer alone; what a call writes to them "
        "would be lost when it ends. Keep what it changes in an nnx.BatchStat, or in a "
        "subclass of nnx.Variable of your own",
        [
            jax.tree_util.keystr(path, simple=True, separator="/")
            for path in paths
            if path[0].key == "params"
        ],
    )
    norms = _batchnorm.norms(paths, [origins[i] for i in new])
    if lost := _flow.names(closed, _batchnorm.MARK) - {mark for *_, mark in norms}:
        listed = ", ".join(mark.split()[-1] for mark in sorted(lost))
        raise ValueError(
            f"what batch norm {listed} leaves as its running statistics is copied or "
            f"changed in the same step by code that is not Flax's; for a rule of your "
            f"own write a norm of your own, or take num_microbatches=1"
        )
    shares = [size / sum(sizes) for size in sizes]
    found, taken = list[Join](), set[int]()
    for mean_at, var_at, mark in norms:
        at = new[mean_at], new[var_at]
        taken.update(at)
        old = tuple(written[i][0] for i in at)
        pair = first + at[0], first + at[1]
        found.append(Join(pair, _norm(_batchnorm.momentum_of(mark), shares), old))
    for i in new:
        if i not in taken:
            run = _mean(shares) if is_inexact(leaves[i].aval) else _last
            found.append(Join((first + i,), run, (written[i][0],)))
    return found


def _norm(momentum: float, shares: Sequence[float]) -> Any:
    """Statistics of micro-batches as those of the mini-batch, committed once."""

    def run(columns: Sequence[Sequence[Any]], old: Sequence[Any]) -> list[Any]:
        so_far, seen = _batchnorm.Merged(*map(jnp.zeros_like, old)), 0.0
        for new_mean, new_var, share in zip(*columns, shares, strict=True):
            so_far = _batchnorm.merge(so_far, new_mean, new_var, seen, share)
            seen += share
        pairs = zip(old, so_far, strict=True)
        return [
            _batchnorm.commit(was, new, momentum).astype(was.dtype)
            for was, new in pairs
        ]

    return run


def _mean(shares: Sequence[float]) -> Any:
    return lambda columns, old: [mean(columns[0], shares).astype(old[0].dtype)]


def _last(columns: Sequence[Sequence[Any]], old: Sequence[Any]) -> list[Any]:
    return [columns[0][-1].astype(old[0].dtype)]
