"""States that hold something for each example, which micro-batches cannot share."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from .._jaxprs import _jaxpr, _places
from . import _nnx_kinds, _rng
from ._stage import StageFunction
from ._streams import applied, retried
from ._tree import flat, nested
from ._walk import Visit, reach

PyTree = Any
Path = tuple[Any, ...]
# Layers are met with so many examples that no other axis is as long, and that can be
# halved, or taken in groups.
_PRIMES = (251, 257, 263, 269, 271)
_GROUPS = 8


class Many(NamedTuple):
    """The layers, met with many examples.

    Attributes:
      visits: those that were met: after one that takes no other number, none.
      number: an axis whose length is a multiple of it is one of examples.
    """

    visits: list[Visit]
    number: int


def many(
    stages: Sequence[StageFunction],
    visits: Sequence[Visit],
    sized: Callable[[int], PyTree],
) -> Many:
    """Meets the layers with many examples.

    Args:
      stages: all stages, in order.
      visits: the layers, as they were met.
      sized: the input of the model with so many examples, as specs.
    """
    given = [[visit.x, [*visit.skips.values()], visit.variables] for visit in visits]
    lengths = {n for leaf in jax.tree.leaves(given) for n in leaf.shape}
    # Where each divides some other axis, that one counts as one of examples too.
    free = (p for p in _PRIMES if not any(n % p == 0 for n in lengths if n))
    prime = next(free, _PRIMES[0])
    spec = sized(_GROUPS * prime)
    return Many(reach(stages, _rng.key_spec(), spec), prime)


def check(
    visit: Visit, many: Many, number: int, written: Mapping[Path, bool], size: int
) -> None:
    """Checks what training writes of a layer: a pipeline keeps the mean of it.

    Args:
      visit: the layer, as it was met.
      many: all layers, as they were met with many examples.
      number: its number.
      written: the paths in its variables of what training writes, and whether it
        writes only some places.
      size: how many examples a micro-batch has.

    Raises:
      ValueError: with what holds single examples, or is such as a queue.
    """
    _check_metrics(visit, number, written)
    holding = _holding(visit, many, number, size) if written else set()
    faults = [
        f"{jax.tree_util.keystr(path, simple=True, separator='/')}, "
        + (
            f"which holds single ones of the {size} examples"
            if path in holding
            else "of which it replaces places that it chooses, as of a table"
        )
        for path, partly in written.items()
        if partly or path in holding
    ]
    if faults:
        raise ValueError(
            f"layer {number} ({visit.layer.name}) writes what no mean of micro-batches "
            f"is, and a pipeline keeps the mean of what they write, of integers what "
            f"the last did: {'; '.join(faults)}; take it in as a part of the input and "
            f"return what it needs beside the loss (has_aux=True, aux_axes=0), or take "
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


def _holding(visit: Visit, many: Many, number: int, size: int) -> set[Path]:
    """The paths of what holds values of single examples, where training writes them."""
    if number < len(many.visits):
        with contextlib.suppress(Exception):  # of that size alone it can be made
            return _held(many.visits[number], many.number)
    return _held(visit, size)


def _held(visit: Visit, number: int) -> set[Path]:
    """The same.

    Args:
      visit: the layer, as it was met.
      number: an axis whose length is a multiple of it is one of examples.
    """

    def call(x: PyTree, skips: PyTree, variables: PyTree, key: jax.Array) -> PyTree:
        popped = dict(zip(visit.skips, skips, strict=True))
        args = visit.layer, variables, x, key, (0, 0), True, popped
        return applied(*args)[1]

    variables = visit.variables
    if visit.borrowed:
        variables = nested(flat(variables) | flat(visit.borrowed))
    given = visit.x, [*visit.skips.values()]
    args = *given, variables, _rng.key_spec()
    closed, changed = retried(lambda: _jaxpr.trace(call, *args))
    held = [_places.is_along(leaf, number) for leaf in jax.tree.leaves(given)]
    held += [False] * (len(closed.jaxpr.invars) - len(held))
    found = jax.tree_util.tree_leaves_with_path(changed)
    results = _places.holding(_jaxpr.open_checkpoints(closed), held, number)
    return {tuple(path) for (path, _), one in zip(found, results, strict=True) if one}
