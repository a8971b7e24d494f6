"""What differentiation makes of a task: traced when first asked, not yet compiled."""

from functools import cached_property
from typing import Any

from .._jaxprs import _jaxpr
from . import _remat, _split, _vjp
from ._task import Task
from ._vjp import Leaves


class Derivatives:
    """A task as forwards and backwards; equal stages on any device have one.

    Attributes:
      task: that of the first of the equal stages, whose number and whose neighbours
        are not those of the others.
      mode: what is kept between forward and backward.
    """

    def __init__(self, task: Task, mode: _remat.Mode) -> None:
        self.task = task
        self.mode = mode

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
            task.has_loss,
        )

    @cached_property
    def halves(self) -> _split.Halves:
        """The backward in two halves; its data are kept, extra, carried, cotangents."""
        cut = self.cut
        num_grads = sum(self.task.wanted.weights)
        is_first = [i >= num_grads for i in range(len(cut.pullback.jaxpr.outvars))]
        return _split.split(cut.pullback, len(self.task.weights.specs), is_first)

    def fused(self, weights: Leaves, x: Leaves, extra: Leaves) -> Any:
        """``(outputs, aux, weight_grads, x_grads)``: nothing is kept in between."""
        return _vjp.value_and_vjp(self.task.run, weights, x, extra, self.task.wanted)

    @cached_property
    def fused_halves(self) -> _split.Halves:
        """Forward and backward of the stage with the loss, cut in two.

        The first half gives the gradient of the input and all that the forward does;
        the data are x and extra.
        """
        task = self.task
        closed, results = _jaxpr.trace(
            self.fused, task.weights.specs, task.x, task.extra_specs
        )
        is_first = [i != 2 for i, part in enumerate(results) for _ in part]
        return _split.split(closed, len(task.weights.specs), is_first)

    @property
    def has_weight_grads(self) -> bool:
        """Whether a backward has gradients of weights to compute."""
        return any(self.task.wanted.weights)

    @property
    def has_x_grads(self) -> bool:
        """Whether a backward has a gradient of the input to compute."""
        return any(self.task.wanted.x)
