"""The loss of a mini-batch, composed of its micro-batches on one device."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from .._functions._batch import Batch
from .._jaxprs import _jaxpr
from ._program import Traced

PyTree = Any


def loss(
    programs: Mapping[int, Traced],
    batch: Batch,
    params: Sequence[Any],
    args: Sequence[PyTree],
) -> jax.Array:
    """What a pipeline computes, in one trace.

    Args:
      programs: by the sizes of micro-batches.
      batch: the mini-batch.
      params: the leaves of the parameters.
      args: the other arguments.
    """
    total, weight, start, rest = [], [], 0, []
    for number, size in enumerate(batch.sizes):
        traced = programs[size]
        own = [
            leaf
            if axis is None
            else jax.lax.slice_in_dim(leaf, start, start + size, axis=axis)
            for leaf, axis in zip(jax.tree.leaves(args), batch.axes, strict=True)
        ]
        outvars = [*traced.loss, *traced.weight, *traced.rest]
        jaxpr = traced.closed.jaxpr.replace(outvars=outvars)
        run = _jaxpr.as_traced(core.ClosedJaxpr(jaxpr, traced.closed.consts))
        constants = map(jnp.asarray, traced.constants)
        one, *more = run(*params, *constants, *own, np.int32(number), *traced.numbers)
        total.append(one)
        weight += more[: len(traced.weight)]
        rest = more[len(traced.weight) :]
        start += size
    value = sum(total[1:], total[0]) + sum(rest)
    return value / sum(weight[1:], weight[0]).astype(value.dtype) if weight else value
