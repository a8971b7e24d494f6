"""States that hold something for each example, which micro-batches cannot share."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from .._jaxprs._jaxpr import zeros
from . import _nnx_kinds
from ._initialize import init_with
from ._walk import Visit

PyTree = Any
Path = tuple[Any, ...]


def check(visit: Visit, number: int, written: Mapping[Path, bool], size: int) -> None:
    """Checks what training writes of a layer: a pipeline keeps the mean of it.

    Args:
      visit: the layer, as it was met.
      number: its number.
      written: the paths in its variables of what training writes, and whether it
        writes only some places.
      size: how many examples a micro-batch has.

    Raises:
      ValueError: with what has an axis for the examples, or is such as a queue.
    """
    _check_metrics(visit, number, written)
    growing = _growing(visit, size)
    faults = [
        f"{jax.tree_util.keystr(path, simple=True, separator='/')}, "
        + (
            f"which has an axis for the {size} examples"
            if path in growing
            else "of which it replaces some places, as of a queue or a table"
        )
        for path, partly in written.items()
        if partly or path in growing
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


def _growing(visit: Visit, size: int) -> set[Path]:
    """The paths of what has an axis for the examples."""
    try:
        small, large = (_shapes(visit, size, more) for more in (0, 1))
    except Exception:  # of that size alone it can be made
        return set()
    return {path for path in small if small[path] != large.get(path)}


def _shapes(visit: Visit, size: int, more: int) -> dict[Path, tuple[int, ...]]:
    """The shapes of what a layer holds if it is made for more examples."""

    def grown(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        shape: Sequence[int] = leaf.shape
        if shape and shape[0] == size:
            shape = (size + more, *shape[1:])
        return jax.ShapeDtypeStruct(shape, leaf.dtype)

    x, skips = jax.tree.map(grown, (visit.x, visit.skips))

    def init(key: jax.Array) -> PyTree:
        return init_with(visit.layer, key, x, skips, {}, zeros(x))

    made = jax.eval_shape(init, jax.random.key(0))
    found = jax.tree_util.tree_leaves_with_path(made)
    return {tuple(path): leaf.shape for path, leaf in found}
