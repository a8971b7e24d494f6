"""What each stage does on each micro-batch: its task, and the functions that do it.

Equal stages, as the middle ones of a Transformer are, are traced and differentiated
once; in one place they are compiled once too.
"""

from collections.abc import Sequence

from .._functions import _chain, _remat
from .._functions._batch import Batch
from .._functions._derivatives import Derivatives
from .._functions._kept import Kept
from .._functions._objective import Objective
from .._functions._task import Task
from .._functions._weights import Weights
from .._layers import _batchnorm
from .._layers._skip import Route
from ._layout import Layout
from ._pipe import Pipe


class Works:
    """All stages on the micro-batches of a mini-batch: traced, not yet compiled.

    Args:
      pipe: the stages, where they run and what they keep.
      weights: the variables of each stage.
      batch: the mini-batch.
      train: whether this is training.
      objective: the loss; ``None`` for a forward pass.
      routes: the skip connections between stages.

    Attributes:
      num_stages: how many stages there are.
    """

    def __init__(
        self,
        pipe: Pipe,
        weights: Sequence[Weights],
        batch: Batch,
        *,
        train: bool,
        objective: Objective | None,
        routes: Sequence[Route],
    ) -> None:
        self._sizes = batch.sizes
        self.num_stages = len(pipe.stages)
        self._remat = pipe.remat
        with _batchnorm.merging(batch.num_parts > 1):
            self._tasks = {
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
        self._derivatives: dict[tuple[int, _remat.Mode], Derivatives] = {}

    def task(self, stage: int, microbatch: int = 0) -> Task:
        """What a stage computes on a micro-batch."""
        return self._tasks[self._sizes[microbatch]][stage]

    def changed(self, layout: Layout) -> list[int]:
        """The positions among the variables of the leaves that training changes."""
        return sorted(
            order[i]
            for stage, order in enumerate(layout.order)
            for i in self.task(stage).changed
        )

    def mode(self, stage: int, microbatch: int) -> _remat.Mode:
        """What a stage keeps of a micro-batch."""
        count = len(self._sizes)
        return _remat.mode(self._remat[stage], microbatch, count)

    def derivatives(
        self, stage: int, microbatch: int, mode: _remat.Mode = "none"
    ) -> Derivatives:
        """The functions of a task; equal tasks have one jaxpr: see `_chain.tasks`."""
        task = self.task(stage, microbatch)
        key = id(task.closed), mode
        if key not in self._derivatives:
            self._derivatives[key] = Derivatives(task, mode)
        return self._derivatives[key]

    def kept(self, stage: int) -> Kept:
        """What a stage keeps of the first micro-batch."""
        return self.derivatives(stage, 0, self.mode(stage, 0)).kept
