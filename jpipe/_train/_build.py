"""What `value_and_grad` or `train_step` built, to be called many times."""

from collections.abc import Callable
from typing import Any

from .._functions._objective import Objective
from .._functions._trainable import Trainable
from ._gradient import Gradient


class Build:
    """What was built for one objective.

    Args:
      objective: the loss.
      trainable: what is trained by it.

    Attributes:
      known: its mini-batches, by what they were compiled for.
    """

    def __init__(self, objective: Objective, trainable: Trainable) -> None:
        self.objective = objective
        self.trainable = trainable
        self.known = dict[Any, Gradient]()


class Gradients:
    """The gradients of a build; called with arguments, that which is for them.

    Args:
      find: gives it, for the build and the arguments.
      build: what was built. Who finds holds it, and is not held by it.
    """

    def __init__(self, find: Callable[..., Gradient], build: Build) -> None:
        self._find = find
        self.build = build

    def __call__(self, *args: Any) -> Gradient:
        """The gradient for variables, input, targets, keys, and whether to train."""
        return self._find(self.build, *args)
