"""States that hold something for each example, which micro-batches cannot share."""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
_PRIMES = (61, 67, 71, 73, 79)
_GROUPS = 4


class Meeting:
    """The layers, met with some number of examples.

    Args:
      visits: those that were met: after one that takes no such number, none.
      number: an axis whose length is a multiple of it is one of examples.
    """

    def __init__(self, visits: Sequence[Visit], number: int) -> None:
        self.visits = visits
        self._number = number
        # Of each layer, in order, what it is given: see `_held`.
        self._given: list[list[bool]] = []

    def holding(self, number: int) -> set[Path]:
        """The paths of what holds values of single examples, where a layer writes it.

        Args:
          number: that of the layer.
        """
        while len(self._given) <= number:
            self._given.append(self._held(len(self._given)))
        written, *_ = self._results(number)
        return {tuple(path) for path, one in written if one}

    def _held(self, number: int) -> list[bool]:
        """Which leaves that a layer is given, of input and skips, hold values of some.

        What does not go along the examples may be single ones, by the layer before.
        """
        visit = self.visits[number]
        leaves = jax.tree.leaves((visit.x, [*visit.skips.values()]))
        along = [_places.is_along(leaf, self._number) for leaf in leaves]
        if all(along) or number == 0:
            return along
        _, *passed = self._results(number - 1)
        pairs = zip(along, itertools.chain(*passed), strict=True)
        return [one or single for one, (_, single) in pairs]

    def _results(self, number: int) -> list[list[tuple[Any, bool]]]:
        """Whether they do: what a layer writes, its output, the skips after it."""
        visit = self.visits[number]

        def call(x: PyTree, skips: PyTree, variables: PyTree, key: jax.Array) -> PyTree:
            popped = dict(zip(visit.skips, skips, strict=True))
            args = visit.layer, variables, x, key, (0, 0), True, popped
            y, changed = applied(*args)
            return changed, y, [*popped.values()]

        variables = visit.variables
        if visit.borrowed:
            variables = nested(flat(variables) | flat(visit.borrowed))
        args = visit.x, [*visit.skips.values()], variables, _rng.key_spec()
        closed, results = retried(lambda: _jaxpr.trace(call, *args))
        held = self._given[number]
        held = held + [False] * (len(closed.jaxpr.invars) - len(held))
        closed = _jaxpr.open_checkpoints(closed)
        found = iter(_places.holding(closed, held, self._number))
        return [
            [
                (path, next(found))
                for path, _ in jax.tree_util.tree_leaves_with_path(result)
            ]
            for result in results
        ]


class Many:
    """The layers, and how they are met with many examples.

    Args:
      stages: all stages, in order.
      visits: the layers, as they were met.
      sized: the input of the model with so many examples, as specs.
      size: how many examples a micro-batch has.
    """

    def __init__(
        self,
        stages: Sequence[StageFunction],
        visits: Sequence[Visit],
        sized: Callable[[int], PyTree],
        size: int,
    ) -> None:
        self.visits = visits
        self.size = size
        self._stages = stages
        self._sized = sized
        given = [
            [visit.x, [*visit.skips.values()], visit.variables] for visit in visits
        ]
        lengths = {n for leaf in jax.tree.leaves(given) for n in leaf.shape}
        # Where each divides some other axis, that one counts as one of examples too.
        free = (p for p in _PRIMES if not any(n % p == 0 for n in lengths if n))
        self._prime = next(free, _PRIMES[0])
        # Layers may take them in groups of which a micro-batch has some.
        self._groups = sorted({_GROUPS, math.lcm(_GROUPS, size)})
        self._meet = functools.cache(self._met)

    def holding(self, number: int) -> tuple[set[Path], int | None]:
        """The paths of what holds values of single examples, where a layer writes it.

        Args:
          number: that of the layer.

        Returns:
          And the number of a layer that takes no other number of examples, if one does.
        """
        last = number
        for groups in self._groups:
            meeting = self._meet(groups)
            last = min(number, len(meeting.visits))
            if number < len(meeting.visits):
                with contextlib.suppress(Exception):
                    return meeting.holding(number), None
        return Meeting(self.visits, self.size).holding(number), last

    def _met(self, groups: int) -> Meeting:
        spec = self._sized(groups * self._prime)
        return Meeting(reach(self._stages, _rng.key_spec(), spec), self._prime)


def check(many: Many, number: int, written: Mapping[Path, bool]) -> None:
    """Checks what training writes of a layer: a pipeline keeps the mean of it.

    Args:
      many: all layers.
      number: the number of the layer.
      written: the paths in its variables of what training writes, and whether it
        writes only some places.

    Raises:
      ValueError: with what holds single examples, or is such as a queue.
    """
    visit, size = many.visits[number], many.size
    _check_metrics(visit, number, written)
    holding, fixed = many.holding(number) if written else (set(), None)
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
        told = "" if fixed is None else _told(many, fixed)
        raise ValueError(
            f"layer {number} ({visit.layer.name}) writes what no mean of micro-batches "
            f"is, and a pipeline keeps the mean of what they write, of integers what "
            f"the last did: {'; '.join(faults)}; take it in as a part of the input and "
            f"return what it needs beside the loss (has_aux=True, aux_axes=0), or take "
            f"num_microbatches=1{told}"
        )


def _told(many: Many, number: int) -> str:
    """What to do where all that is as long as a micro-batch counts as examples."""
    return (
        f"; or is it none of single ones? Layer {number} "
        f"({many.visits[number].layer.name}) takes no other number of examples than "
        f"{many.size}, so each axis that is as long, or a multiple of it, counts as "
        f"one of examples: let it take any number, as by a reshape to -1"
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
