"""States that hold something for each example, which micro-batches cannot share."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from .._jaxprs import _jaxpr, _places
from .._jaxprs._jaxpr import zeros
from . import _nnx_kinds
from ._initialize import init_with
from ._streams import applied, retried
from ._tree import flat, nested
from ._walk import Visit

PyTree = Any
Path = tuple[Any, ...]
# Layers are met with so many examples that no other axis is as long, and that can be
# halved, or taken in groups.
_PRIMES = (251, 257, 263, 269, 271)
_GROUPS = 8


def check(
    visit: Visit, number: int, written: Mapping[Path, bool], size: int, axis: int
) -> None:
    """Checks what training writes of a layer: a pipeline keeps the mean of it.

    Args:
      visit: the layer, as it was met.
      number: its number.
      written: the paths in its variables of what training writes, and whether it
        writes only some places.
      size: how many examples a micro-batch has.
      axis: along which they lie.

    Raises:
      ValueError: with what holds single examples, or is such as a queue.
    """
    _check_metrics(visit, number, written)
    holding = _holding(visit, size, axis) if written else set()
    faults = [
        f"{jax.tree_util.keystr(path, simple=True, separator='/')}, "
        + (
            f"which holds single ones of the {size} examples"
            if path in holding
            else "of which it replaces some places, as of a queue or a table"
        )
        for path, partly in written.items()
        if partly or path in holding
    ]
    if faults:
        raise ValueError(
            f"layer {number} ({visit.layer.name}) writes what no mean of micro-batches "
            f"is, and a pipeline keeps the mean of what they write: "
            f"{'; '.join(faults)}; take it in as a part of the input and return what "
            f"it needs beside the loss (has_aux=True, aux_axes=0), or take "
            f"num_microbatches=1"
        )


def check_draws(visit: Visit, number: int, paths: Sequence[Path]) -> None:
    """Refuses counters by which a layer draws random numbers.

    Raises:
      ValueError: with them: each micro-batch finds them as they were before the step.
    """
    names = (jax.tree_util.keystr(p, simple=True, separator="/") for p in paths)
    raise ValueError(
        f"layer {number} ({visit.layer.name}) draws random numbers by what it counts, "
        f"{', '.join(names)}: all micro-batches of a step would draw the same; draw "
        f"from a stream (nnx.Rngs, or make_rng of linen), which a pipeline gives each "
        f"micro-batch of its own, or take num_microbatches=1"
    )


def _check_metrics(visit: Visit, number: int, written: Mapping[Path, bool]) -> None:
    """Checks that no state of a metric is among what training writes.

    Raises:
      ValueError: if one is: it is a sum and a count, of which there is no mean.
    """
    paths = {jax.tree_util.keystr(p, simple=True, separator="/") for p in written}
    if found := sorted(paths & _nnx_kinds.metrics(visit.layer.owner)):
        raise ValueError(
            f"layer {number} ({visit.layer.name}) updates a metric of nnx: "
            f"{', '.join(found)}; a pipeline keeps the mean of what micro-batches "
            f"write, and sums and counts have none: return what is measured beside the "
            f"loss (has_aux=True) and update the metric with it, or take "
            f"num_microbatches=1"
        )


def _holding(visit: Visit, size: int, axis: int) -> set[Path]:
    """The paths of what holds values of single examples, where training writes them."""
    given = visit.x, [*visit.skips.values()], visit.variables, visit.borrowed
    lengths = {n for leaf in jax.tree.leaves(given) for n in leaf.shape}
    prime = next(p for p in _PRIMES if not any(n % p == 0 for n in lengths if n))
    try:
        return _held(visit, size, axis, _GROUPS * prime, prime)
    except Exception:  # of that size alone it can be made
        return _held(visit, size, axis, size, size)


def _held(visit: Visit, size: int, axis: int, examples: int, number: int) -> set[Path]:
    """The same, if the layer is given so many examples.

    Args:
      visit: the layer, as it was met.
      size: how many examples it was given there.
      axis: along which they lie.
      examples: how many it is given now.
      number: an axis whose length is a multiple of it is one of examples.
    """

    def is_along(leaf: jax.ShapeDtypeStruct) -> bool:
        lengths = dict(zip(range(leaf.ndim), leaf.shape, strict=True))
        return lengths.get(axis % max(leaf.ndim, 1)) == size

    def sized(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        shape = list(leaf.shape)
        if is_along(leaf):
            shape[axis] = examples
        return jax.ShapeDtypeStruct(shape, leaf.dtype)

    x, skips = jax.tree.map(sized, (visit.x, [*visit.skips.values()]))

    def named(values: PyTree) -> dict[Any, PyTree]:
        return dict(zip(visit.skips, values, strict=True))

    def init(key: jax.Array) -> PyTree:
        return init_with(visit.layer, key, x, named(skips), {}, zeros(x))

    def call(x: PyTree, skips: PyTree, variables: PyTree, key: jax.Array) -> PyTree:
        args = visit.layer, variables, x, key, (0, 0), True, named(skips)
        return applied(*args)[1]

    key = jax.eval_shape(lambda: jax.random.key(0))
    variables = visit.variables
    if visit.borrowed:
        variables = nested(flat(variables) | flat(visit.borrowed))
    elif examples != size:
        variables = jax.eval_shape(init, key)
    args = x, skips, variables, key
    closed, changed = retried(lambda: _jaxpr.trace(call, *args))
    held = [
        is_along(leaf) for leaf in jax.tree.leaves((visit.x, [*visit.skips.values()]))
    ]
    held += [False] * len(jax.tree.leaves((variables, key)))
    found = jax.tree_util.tree_leaves_with_path(changed)
    results = _places.holding(_jaxpr.open_checkpoints(closed), held, number)
    return {tuple(path) for (path, _), one in zip(found, results, strict=True) if one}
