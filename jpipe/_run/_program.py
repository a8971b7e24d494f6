"""A mini-batch compiled: how it is fed, and the steps that run it."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from .._functions import _microbatch
from .._functions._batch import Batch
from .._functions._objective import Objective
from .._functions._task import Task
from .._functions._vjp import Leaves
from .._layers._skip import Route
from ..schedules import Action
from . import _lower, _transfer, _variables
from ._execute import Live
from ._layout import Layout
from ._pipe import Pipe
from ._work import rows_of

PyTree = Any


def _no_sums() -> tuple[list[Any], list[Any]]:
    """Without a loss there are no gradients to sum."""
    return [], []


class Program:
    """A mini-batch compiled: how to feed it, and the steps to run.

    Attributes:
      batch: what it is compiled for.
      devices: the device of each stage.
      schedule: who runs which action when.
      layout: which leaves of all variables each stage uses.
      rows: the work of each stage on each micro-batch.
      steps: what `_execute.execute` runs, in order.
      ran: with a loss, by scheduled action the one that runs in its place: itself, or
        the whole backward for a half. Others have nothing to do by themselves.
    """

    def __init__(
        self,
        pipe: Pipe,
        layout: Layout,
        batch: Batch,
        *,
        train: bool,
        objective: Objective | None = None,
        routes: Sequence[Route] = (),
    ) -> None:
        self.batch = batch
        self.layout = layout
        self.devices = pipe.devices
        self.schedule = pipe.schedule
        self.rows = rows_of(
            pipe,
            layout.weights,
            batch,
            train=train,
            objective=objective,
            routes=routes,
        )
        placed = pipe.schedule, pipe.devices, self.rows
        self.ran: dict[Action, Action] = {}
        if objective:
            self.steps, self.ran = _lower.training(*placed)
        else:
            self.steps = _lower.inference(*placed)
        self._split_x = _microbatch.splitter(batch.x_axes, batch.sizes)
        self._split_targets = _microbatch.splitter(batch.target_axes, batch.sizes)
        self._constants = [self._constant_extra(s) for s in range(len(self.rows))]
        self._zeros = [
            row[0].programs.zeros if objective else _no_sums for row in self.rows
        ]

    @property
    def last_task(self) -> Task:
        """The task of the last stage on the first micro-batch."""
        return self.rows[-1][0].task

    def reads_rngs(self) -> bool:
        """Whether any layer is random."""
        return any("rngs" in row[0].task.extra for row in self.rows)

    def feed(
        self,
        weights: list[Leaves],
        x: Sequence[Any],
        targets: Sequence[Any] = (),
        rngs: Sequence[jax.Array] = (),
    ) -> Live:
        """Moves a mini-batch to where it is read and cuts it in micro-batches.

        Args:
          weights: the leaves of each stage's variables, in place.
          x: the leaves of the input, anywhere.
          targets: the leaves of the targets, anywhere.
          rngs: the leaves of the step's keys, anywhere.

        Returns:
          What the executor starts from, with every sum at zero.

        Raises:
          TypeError: if one of them belongs to a trace.
        """
        _variables.check_concrete([*x, *targets, *rngs])
        return self._live(
            weights,
            self._split_x(_transfer.put(x, self.devices[0])),
            [self._extra(s, targets, rngs) for s in range(len(self.rows))],
            [zeros() for zeros in self._zeros],
        )

    def abstract_feed(self) -> Live:
        """What `feed` gives, as specs: one object for what is one array."""
        return self._live(
            [list(weights.specs) for weights in self.layout.weights],
            [jax.tree.leaves(self.batch.part(size)[0]) for size in self.batch.sizes],
            [
                [
                    self._abstract_extra(work.task, size)
                    for work, size in zip(row, self.batch.sizes, strict=True)
                ]
                for row in self.rows
            ],
            [jax.eval_shape(zeros) for zeros in self._zeros],
        )

    def _abstract_extra(self, task: Task, size: int) -> list[jax.ShapeDtypeStruct]:
        _, extra = self.batch.part(size)
        return jax.tree.leaves([extra[name] for name in task.extra])

    def _live(
        self,
        weights: list[Leaves],
        x: list[list[Any]],
        extra: list[list[list[Any]]],
        sums: Sequence[tuple[list[Any], list[Any]]],
    ) -> Live:
        stages, count = len(self.rows), len(self.batch.sizes)

        def empty(rows: int) -> list[list[Any]]:
            return [[None] * count for _ in range(rows)]

        live = Live(
            weights=weights,
            x=[x, *empty(stages)],
            extra=extra,
            held=empty(stages),
            cotangents=empty(stages),
            emitted=empty(stages),
            grads=[grads for grads, _ in sums],
            tally=[tally for _, tally in sums],
        )
        for s, row in enumerate(self.rows):
            # No gradient comes to the loss, or to a stage whose output has none.
            if row[0].task.has_loss or not row[0].task.num_outputs:
                live.cotangents[s] = [()] * count
        return live

    def _constant_extra(self, s: int) -> list[list[jax.Array]]:
        """What never changes from step to step, so that it is moved only once."""
        total, task = sum(self.batch.sizes), self.rows[s][0].task
        columns = {
            "numbers": [
                np.array([m, task.stage.first], np.int32)
                for m in range(len(self.batch.sizes))
            ],
            "share": [np.float64(size / total) for size in self.batch.sizes],
        }
        wanted = task.extra
        return [
            _transfer.put(column, self.devices[s])
            for name, column in columns.items()
            if name in wanted
        ]

    def _extra(
        self, s: int, targets: Sequence[Any], rngs: Sequence[jax.Array]
    ) -> list[list[jax.Array]]:
        """What the micro-batches bring to a stage, in the order of `_task.EXTRA`."""
        wanted, device = self.rows[s][0].task.extra, self.devices[s]
        extra: list[list[jax.Array]] = [[] for _ in self.batch.sizes]
        if "targets" in wanted:
            extra = self._split_targets(_transfer.put(targets, device))
        if "rngs" in wanted:
            keys = _transfer.put(rngs, device)
            extra = [[*row, *keys] for row in extra]
        for column in self._constants[s]:
            extra = [[*row, leaf] for row, leaf in zip(extra, column, strict=True)]
        return extra
