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
    trace_once = _Tracer(extra, train)
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
        task = trace_once(
            stage,
            own,
            x,
            objective=objective if stage is stages[-1] else None,
            differentiate=tuple(wanted),
            ports=ports,
        )
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


class _Tracer:
    """Traces stages; of equal ones the first.

    Args:
      extra: specs of what a micro-batch brings beside its input, by name.
      train: whether this is training.
    """

    def __init__(self, extra: Mapping[str, PyTree], train: bool) -> None:
        self._extra = extra
        self._train = train
        self._known: dict[Hashable, Task] = {}

    def __call__(
        self,
        stage: StageFunction,
        weights: Weights,
        x: PyTree,
        *,
        objective: Objective | None,
        differentiate: tuple[bool, ...],
        ports: Ports,
    ) -> Task:
        """The task of a stage: see `_trace.trace`."""
        leaves, tree = jax.tree.flatten(x)
        layers = tuple(map(_alike.behaviour, stage.layers))
        given = weights, tree, tuple(leaves), differentiate
        key = layers, given, objective, ports
        if key in self._known:
            return replace(self._known[key], stage=stage, weights=weights)
        task = trace(
            stage,
            weights,
            x,
            self._extra,
            train=self._train,
            objective=objective,
            differentiate=differentiate,
            ports=ports,
        )
        self._known[key] = task
        return task
