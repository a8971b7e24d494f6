"""The stages traced one after the other, each on what the one before gives."""

import itertools
import operator
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from .._layers import _alike
from .._layers._skip import Ports, Route
from .._layers._stage import StageFunction
from ._objective import Objective
from ._task import Task
from ._trace import trace
from ._weights import Weights

PyTree = Any


def tasks(
    stages: Sequence[StageFunction],
    weights: Sequence[Weights],
    x: PyTree,
    extra: Mapping[str, PyTree],
    *,
    train: bool,
    objective: Objective | None,
    routes: Sequence[Route],
) -> list[Task]:
    """Traces all stages on micro-batches of one size; of equal ones the first.

    Args:
      stages: their layers.
      weights: the variables of each.
      x: specs of the input of the first.
      extra: specs of what a micro-batch brings beside it, by name.
      train: whether this is training.
      objective: the loss; ``None`` for a forward pass.
      routes: the skip connections between stages.

    Returns:
      One task per stage; those of equal stages have one jaxpr.
    """
    traced: list[Task] = []
    known: dict[Hashable, Task] = {}
    skips: dict[Any, PyTree] = {}
    # Whether the gradient of a stage's output is of use: to itself or before.
    useful = list(
        itertools.accumulate((any(w.trainable) for w in weights), operator.or_)
    )
    for stage, own in zip(stages, weights, strict=True):
        ports = Ports.of(routes, stage.index)
        before = stage.index > 0 and useful[stage.index - 1]
        wanted = [before] * len(jax.tree.leaves(x))
        if ports.incoming:
            arrived = tuple(skips.pop(route.key) for route in ports.incoming)
            wanted = _wanted(arrived, ports.incoming, useful) + wanted
            x = arrived, x
        loss = objective if stage is stages[-1] else None
        leaves, tree = jax.tree.flatten(x)
        key = (
            tuple(map(_alike.behaviour, stage.layers)),
            (own, tree, tuple(leaves), tuple(wanted)),
            loss,
            ports,
        )
        if key not in known:
            known[key] = trace(
                stage,
                own,
                x,
                extra,
                train=train,
                objective=loss,
                differentiate=wanted,
                ports=ports,
            )
        task = replace(known[key], stage=stage, weights=own)
        traced.append(task)
        x = task.y
        if ports.outgoing:
            left, x = task.y
            keys = [route.key for route in ports.outgoing]
            skips.update(zip(keys, left, strict=True))
    return traced


def _wanted(
    arrived: Sequence[PyTree], routes: Sequence[Route], useful: Sequence[bool]
) -> list[bool]:
    """Of each leaf of the skip connections, whether its gradient is of use."""
    return [
        useful[route.source]
        for route, skip in zip(routes, arrived, strict=True)
        for _ in jax.tree.leaves(skip)
    ]
