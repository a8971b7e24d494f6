"""From a schedule and the functions of its stages to the steps of the executor."""

import itertools
import operator
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import _lower, _microbatch, _remat, _tied, _transfer, _variables
from ._compile import StagePrograms
from ._execute import Live
from ._objective import Objective
from ._skip import Ports, Route
from ._stage import StageFunction
from ._task import Task
from ._trace import trace
from ._transfer import Device
from ._vjp import Leaves
from ._weights import Weights
from .schedules import Action, Schedule

PyTree = Any


@dataclass(frozen=True)
class Batch:
    """A mini-batch as abstract values: what a program is compiled for.

    Attributes:
      x: specs of the whole input.
      x_axes: the batch axis of each of its leaves.
      targets: specs of the whole targets; ``()`` where there is no loss.
      target_axes: the batch axis of each of their leaves.
      rngs: specs of the keys of a step, or ``None``.
      sizes: the number of examples in each micro-batch.
    """

    x: PyTree
    x_axes: list[int | None]
    targets: PyTree
    target_axes: list[int | None]
    rngs: PyTree
    sizes: tuple[int, ...]

    def part(self, size: int) -> tuple[PyTree, dict[str, PyTree]]:
        """Specs of the input and of the rest of a micro-batch: see `_task.EXTRA`."""
        extra = {
            "targets": _part(self.targets, self.target_axes, size),
            "share": jax.ShapeDtypeStruct((), jnp.result_type(float)),
        }
        if self.rngs is not None:
            extra["rngs"] = self.rngs
            extra["microbatch"] = jax.ShapeDtypeStruct((), np.dtype(np.int32))
        return _part(self.x, self.x_axes, size), extra


def _no_sums() -> tuple[list[Any], list[Any]]:
    """Without a loss there are no gradients to sum."""
    return [], []


def _part(tree: PyTree, axes: Sequence[int | None], size: int) -> PyTree:
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, _microbatch.part_specs(leaves, axes, size))


@dataclass(frozen=True)
class Pipe:
    """What is fixed for all batches: stages, their devices, the schedule, remat."""

    stages: tuple[StageFunction, ...]
    devices: tuple[Device, ...]
    schedule: Schedule
    remat: tuple[Any, ...]

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """For each layer the one that owns its variables."""
        return _tied.owners(self.stages)


class Program:
    """A mini-batch compiled: how to feed it, and the steps to run.

    Attributes:
      batch: what it is compiled for.
      devices: the device of each stage.
      schedule: who runs which action when.
      owners: for each layer the one that owns its variables.
      rows: the programs of each stage and micro-batch; equal ones are one object.
      steps: what `_execute.execute` runs, in order.
      ran: with a loss, by scheduled action the one that runs in its place: itself, or
        the whole backward for a half. Others have nothing to do by themselves.
    """

    def __init__(
        self,
        pipe: Pipe,
        weights: Sequence[Weights],
        batch: Batch,
        *,
        train: bool,
        objective: Objective | None = None,
        routes: Sequence[Route] = (),
    ) -> None:
        self.batch = batch
        self.weights = weights
        self.devices = pipe.devices
        self.schedule = pipe.schedule
        self.owners = pipe.owners
        self.rows = _stage_programs(pipe, weights, batch, train, objective, routes)
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
            row[0].zeros(device) if objective else _no_sums
            for row, device in zip(self.rows, self.devices, strict=True)
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
            [list(weights.specs) for weights in self.weights],
            [jax.tree.leaves(self.batch.part(size)[0]) for size in self.batch.sizes],
            [
                [
                    self._abstract_extra(program, size)
                    for program, size in zip(row, self.batch.sizes, strict=True)
                ]
                for row in self.rows
            ],
            [jax.eval_shape(zeros) for zeros in self._zeros],
        )

    def _abstract_extra(
        self, program: StagePrograms, size: int
    ) -> list[jax.ShapeDtypeStruct]:
        _, extra = self.batch.part(size)
        return jax.tree.leaves([extra[name] for name in program.task.extra])

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
        total = sum(self.batch.sizes)
        columns = {
            "microbatch": [np.int32(m) for m in range(len(self.batch.sizes))],
            "share": [np.float64(size / total) for size in self.batch.sizes],
        }
        wanted = self.rows[s][0].task.extra
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


def _stage_programs(
    pipe: Pipe,
    weights: Sequence[Weights],
    batch: Batch,
    train: bool,
    objective: Objective | None,
    routes: Sequence[Route],
) -> list[list[StagePrograms]]:
    tasks = {
        size: _tasks(pipe, weights, batch, size, train, objective, routes)
        for size in dict.fromkeys(batch.sizes)
    }
    made: dict[Any, StagePrograms] = {}

    def program(s: int, m: int) -> StagePrograms:
        size = batch.sizes[m]
        mode = _remat.mode(pipe.remat[s], m, len(batch.sizes))
        if (s, size, mode) not in made:
            made[s, size, mode] = StagePrograms(tasks[size][s], mode)
        return made[s, size, mode]

    return [
        [program(s, m) for m in range(len(batch.sizes))]
        for s in range(len(pipe.stages))
    ]


def _tasks(
    pipe: Pipe,
    weights: Sequence[Weights],
    batch: Batch,
    size: int,
    train: bool,
    objective: Objective | None,
    routes: Sequence[Route],
) -> list[Task]:
    """Traces the stages one after the other, on micro-batches of one size."""
    x, extra = batch.part(size)
    tasks: list[Task] = []
    skips: dict[Any, PyTree] = {}
    # Whether the gradient of a stage's output is of use: to itself or before.
    useful = list(
        itertools.accumulate((any(w.trainable) for w in weights), operator.or_)
    )
    for stage, own in zip(pipe.stages, weights, strict=True):
        last = stage.index == len(pipe.stages) - 1
        ports = Ports.of(routes, stage.index)
        wanted = [stage.index > 0 and useful[stage.index - 1]] * len(jax.tree.leaves(x))
        if ports.incoming:
            arrived = tuple(skips.pop(route.key) for route in ports.incoming)
            of_skips = [
                useful[route.source]
                for route, skip in zip(ports.incoming, arrived, strict=True)
                for _ in jax.tree.leaves(skip)
            ]
            x, wanted = (arrived, x), of_skips + wanted
        task = trace(
            stage,
            own,
            x,
            extra,
            train=train,
            objective=objective if last else None,
            differentiate=wanted,
            ports=ports,
        )
        tasks.append(task)
        x = task.y
        if ports.outgoing:
            left, x = task.y
            skips.update(
                zip((route.key for route in ports.outgoing), left, strict=True)
            )
    _assert_moves_fit(tasks)
    return tasks


def _assert_moves_fit(tasks: Sequence[Task]) -> None:
    """What each stage sends to another is what that one takes for it, leaf for leaf.

    Leaves travel without names: that both sides sort the skip connections alike is
    worth a look, once, on shapes.
    """
    sent: dict[tuple[int, int], list[Any]] = defaultdict(list)
    received: dict[tuple[int, int], list[Any]] = defaultdict(list)
    for task in tasks:
        leaves = iter([] if task.has_loss else jax.tree.leaves(task.y))
        for target, count in task.sent:
            sent[task.index, target] += itertools.islice(leaves, count)
        leaves = iter(task.x)
        for source, count in task.received:
            received[source, task.index] += itertools.islice(leaves, count)
    for (source, target), specs in received.items():
        moved = [(spec.shape, spec.dtype) for spec in specs]
        given = [(spec.shape, spec.dtype) for spec in sent[source, target]]
        assert source < 0 or moved == given, (source, target, given, moved)
