"""What `value_and_grad` or `train_step` built, to be called many times."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from .._functions._objective import Objective
from .._functions._trainable import Trainable
from ._gradient import Gradient


class Build:
    """Gradients of one objective; called with arguments, that which is for them.

    Args:
      find: gives it, for this build and the arguments.
      objective: the loss.
      trainable: what is trained by it.

    Attributes:
      known: the mini-batches of a loss, by what it holds: one that changes would keep
        its programs for ever.
      calls: how often it was called, or what was made of it.
    """

    def __init__(
        self, find: Callable[..., Gradient], objective: Objective, trainable: Trainable
    ) -> None:
        self._find = find
        self.objective = objective
        self.trainable = trainable
        self.known = lru_cache(maxsize=32)(_no_gradients)
        self.calls = 0

    def __call__(self, *args: Any) -> Gradient:
        """The gradient for variables, input, targets, keys, and whether to train."""
        self.calls += 1
        return self._find(self, *args)


def _no_gradients(_: Objective) -> dict[Any, Gradient]:
    return {}
