"""The compiled programs of one stage, for micro-batches of one size.

Each is one `jax.jit` call over flat leaves; sums are kept inside it, in donated
buffers, so that an action of the schedule costs a single dispatch.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from . import _remat, _vjp
from ._task import Task, accumulate, sum_spec
from ._transfer import Device
from ._vjp import Leaves

Compiled = Callable[..., Any]


class StagePrograms:
    """What one stage can be asked to do; compiled when it is first asked.

    Attributes:
      task: the function of the stage.
      mode: what is kept between forward and backward.
      owns_x: whether the input belongs to the pipeline, which may then reuse its
        memory, and not to the caller, as that of the first stage.
    """

    def __init__(self, task: Task, mode: _remat.Mode) -> None:
        self.task = task
        self.mode = mode
        self.owns_x = task.index > 0

    @cached_property
    def cut(self) -> _vjp.Cut:
        """Forward and backward as two functions, and what passes between them."""
        task = self.task
        return _vjp.cut(
            task.run,
            task.weights.specs,
            task.x,
            task.extra_specs,
            task.wanted,
            _remat.wrapper(self.mode),
        )

    @cached_property
    def infer(self) -> Compiled:
        """``(weights, x, extra) -> y``: a forward of which nothing is kept."""

        def infer(weights: Leaves, x: Leaves, extra: Leaves) -> list[Any]:
            outputs, aux = self.task.run(weights, x, extra)
            return self.task.send(outputs, aux)

        y = jax.tree.leaves(self.task.y)
        donated = self._reusable([(1, self.task.x, self.owns_x)], y)
        return self._jit(infer, donated)

    @cached_property
    def forward(self) -> Compiled:
        """``(weights, x, extra, tally) -> (y, carried, tally, emitted)``."""
        task, cut = self.task, self.cut

        def forward(weights: Leaves, x: Leaves, extra: Leaves, tally: Leaves) -> Any:
            outputs, aux, carried = cut.forward(weights, x, extra)
            sums = task.tally(tally, outputs, aux, extra)
            return task.send(outputs, aux), carried, sums, task.emit(aux)

        y = [] if task.has_loss else jax.tree.leaves(task.y)
        donated = self._reusable([(1, task.x, self.owns_x and not cut.kept)], y)
        return self._jit(forward, (*donated, 3))

    @cached_property
    def backward(self) -> Compiled:
        """``(weights, kept, extra, carried, cotangents, grads) -> (x_grads, grads)``.

        The gradients of the weights are added to the sums that it is given.
        """
        task, cut = self.task, self.cut

        def backward(
            weights: Leaves,
            kept: Leaves,
            extra: Leaves,
            carried: Leaves,
            cotangents: Leaves,
            grads: Leaves,
        ) -> Any:
            if task.has_loss:
                cotangents = [jnp.ones((), spec.dtype) for spec in cut.outputs]
            new, x_grads = cut.backward(weights, kept, extra, carried, cotangents)
            return x_grads, accumulate(grads, new)

        x_grads = _chosen(task.x, task.wanted.x)
        kept = [task.x[i] for i in cut.kept]
        cotangents = [] if task.has_loss else cut.outputs
        groups = [(1, kept, self.owns_x), (4, cotangents, True), (3, cut.carried, True)]
        return self._jit(backward, (*self._reusable(groups, x_grads), 5))

    @cached_property
    def fused(self) -> Compiled:
        """``(weights, x, extra, tally, grads) -> (x_grads, tally, emitted, grads)``.

        Forward and backward of the stage with the loss in one: nothing leaves in
        between and nothing is computed twice.
        """
        task = self.task

        def forward_backward(
            weights: Leaves, x: Leaves, extra: Leaves, tally: Leaves, grads: Leaves
        ) -> Any:
            outputs, aux, new, x_grads = _vjp.value_and_vjp(
                task.run, weights, x, extra, task.wanted
            )
            sums = task.tally(tally, outputs, aux, extra)
            return x_grads, sums, task.emit(aux), accumulate(grads, new)

        x_grads = _chosen(task.x, task.wanted.x)
        donated = self._reusable([(1, task.x, self.owns_x)], x_grads)
        return self._jit(forward_backward, (*donated, 3, 4))

    @property
    def has_backward(self) -> bool:
        """Whether a backward has anything to compute."""
        return any(self.task.wanted.weights) or any(self.task.wanted.x)

    def zeros(self, device: Device) -> Compiled:
        """``() -> (grads, tally)``: the sums before the first micro-batch."""
        trainable = _chosen(self.task.weights.specs, self.task.wanted.weights)
        specs = [[sum_spec(leaf) for leaf in trainable], self.task.tally_specs]
        if not any(specs):
            return lambda: ([], [])

        def zeros() -> Any:
            return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), specs)

        zeros.__name__ = f"stage{self.task.index}_zeros"
        return jax.jit(zeros, out_shardings=SingleDeviceSharding(device))

    def _jit(self, function: Callable[..., Any], donated: Sequence[int]) -> Compiled:
        function.__name__ = f"stage{self.task.index}_{function.__name__}"
        return jax.jit(function, donate_argnums=tuple(donated))

    @staticmethod
    def _reusable(
        groups: Sequence[tuple[int, Leaves, bool]], results: Leaves
    ) -> list[int]:
        """The arguments whose memory the results can take over, leaf for leaf.

        JAX warns of a donated array that no result fits, so an argument is donated
        only if all its leaves find one.
        """
        free = Counter((leaf.shape, leaf.dtype) for leaf in results)
        donated = []
        for argument, leaves, owned in groups:
            wanted = Counter((leaf.shape, leaf.dtype) for leaf in leaves)
            if owned and leaves and wanted <= free:
                free -= wanted
                donated.append(argument)
        return donated


def _chosen(leaves: Leaves, chosen: Sequence[bool]) -> list[Any]:
    return [leaf for leaf, yes in zip(leaves, chosen, strict=True) if yes]
