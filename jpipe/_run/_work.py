"""What each stage does on each micro-batch: its task, and the programs that do it.

Equal stages, as the middle ones of a Transformer are, are traced and differentiated
once; on one device they are compiled once too.
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from .._functions import _chain, _remat
from .._functions._batch import Batch
from .._functions._derivatives import Derivatives
from .._functions._objective import Objective
from .._functions._task import Task
from .._functions._weights import Weights
from .._layers._skip import Route
from ._compile import StagePrograms
from ._pipe import Pipe
from ._transfer import Device


class Work(NamedTuple):
    """One stage on one micro-batch.

    Attributes:
      task: what it computes, and where that goes.
      programs: what computes it; equal work on one device has one object.
    """

    task: Task
    programs: StagePrograms


Rows = Sequence[Sequence[Work]]


def rows_of(
    pipe: Pipe,
    weights: Sequence[Weights],
    batch: Batch,
    *,
    train: bool,
    objective: Objective | None,
    routes: Sequence[Route],
) -> Rows:
    """All work on a mini-batch: stages are traced, nothing is compiled.

    Args:
      pipe: the stages, where they run and what they keep.
      weights: the variables of each stage.
      batch: the mini-batch.
      train: whether this is training.
      objective: the loss; ``None`` for a forward pass.
      routes: the skip connections between stages.

    Returns:
      By stage and micro-batch.
    """
    tasks = {
        size: _chain.tasks(
            pipe.stages,
            weights,
            *batch.part(size),
            train=train,
            objective=objective,
            routes=routes,
        )
        for size in dict.fromkeys(batch.sizes)
    }
    shared = _SharedPrograms(pipe.devices)
    count = len(batch.sizes)

    def work(stage: int, microbatch: int) -> Work:
        task = tasks[batch.sizes[microbatch]][stage]
        mode = _remat.mode(pipe.remat[stage], microbatch, count)
        return Work(task, shared.of(task, mode))

    return [[work(s, m) for m in range(count)] for s in range(len(pipe.stages))]


class _SharedPrograms:
    """What was made for a task, to be found for an equal one.

    Args:
      devices: the device of each stage.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = devices
        self._derivatives: dict[Hashable, Derivatives] = {}
        self._programs: dict[Hashable, StagePrograms] = {}

    def of(self, task: Task, mode: _remat.Mode) -> StagePrograms:
        """The programs of a task; equal tasks have one jaxpr: see `_chain.tasks`."""
        stage, device = task.index, self._devices[task.index]
        function = id(task.closed), mode
        if function not in self._derivatives:
            self._derivatives[function] = Derivatives(task, mode)
        owns_x = stage > 0
        key = function, device, owns_x
        if key not in self._programs:
            derivatives = self._derivatives[function]
            self._programs[key] = StagePrograms(derivatives, device, owns_x)
        self._programs[key].serve(stage)
        return self._programs[key]
