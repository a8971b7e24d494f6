"""The loss of a mini-batch and its gradients, in the structures that users hold."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from .._arguments import _variables
from .._arguments._wrong_call import explain_call
from .._instructions._program import Program
from .._layers._rng import Rngs
from .._messages import warn
from .._pipelined._specialization import Specialization
from .._placed._mesh_context import outside_of_meshes
from ._pipelined_loss import PipelinedLoss

PyTree = Any


@dataclass(eq=False, repr=False)
class ValueAndGrad:
    """``f(variables, x, targets)``: see `Pipeline.value_and_grad`, which makes it.

    Attributes:
      pipelined_loss: its loss and gradients, in stages.
      has_aux: True if the loss function returns aux beside the loss.
      has_state: True if the collections that training changes are returned too.
      feed: ``(x, targets, rngs) -> (x, targets)``, with specs for what this process
        lacks.
      has_warned: True after the warning of collections that it does not return.
    """

    pipelined_loss: PipelinedLoss
    has_aux: bool
    has_state: bool
    feed: Callable[..., tuple[PyTree, PyTree]]
    has_warned: bool = False

    @outside_of_meshes
    @explain_call("f(variables, x, targets) of f = pipe.value_and_grad(loss_fn)")
    def __call__(
        self,
        variables: PyTree,
        x: PyTree,
        targets: PyTree,
        *,
        rngs: Rngs = None,
        train: bool = True,
    ) -> Any:
        """Computes the loss and its gradients; returns as soon as both are dispatched.

        Args:
          variables: one entry per layer, or the model's own tree, in place.
          x: the input of the mini-batch, on the host or any device; of several
            processes those that do not run the first stage may give ``None``.
          targets: its targets, likewise, for the last stage.
          rngs: a key, or keys by stream name.
          train: the value for layers that ask whether they are trained.

        Returns:
          ``(loss, grads)``; ``((loss, aux), grads)``, ``((loss, state), grads)`` or
          ``((loss, aux, state), grads)``.

        Raises:
          ValueError: if batch, targets or variables do not fit.
          TypeError: if the loss function does not return a loss, or loss and aux.
        """
        x, targets = self.feed(x, targets, rngs)
        specialization = self.pipelined_loss(variables, x, targets, rngs, train=train)
        program = self._program(specialization)
        leaves = specialization.check_arguments(variables, (x, targets, rngs))
        outputs = program(leaves)
        # An iterator over the gradients, then the new state.
        loss, aux, results = specialization.split_outputs(outputs)

        layout = specialization.layout
        # The variables, with gradients in place of parameters.
        result_leaves = leaves[: len(layout.specs)]
        for index, is_trained in zip(
            layout.params, layout.is_param_trained, strict=True
        ):
            result_leaves[index] = (
                next(results) if is_trained else self._no_grad(leaves[index])
            )
        if self.has_state:
            for index in layout.state:
                result_leaves[index] = next(results)
        result_tree = layout.close_params(result_leaves)

        extra = [aux] if self.has_aux else []
        if self.has_state:
            extra.append(_variables.model_state(result_tree))
        elif specialization.written and not self.has_warned:
            self.has_warned = True
            written = [index for index, _ in specialization.written]
            _warn_of_state(_variables.collections(variables, written))
        value = (loss, *extra) if extra else loss
        return value, _variables.params(result_tree)

    @outside_of_meshes
    def program(
        self,
        variables: PyTree,
        x: PyTree,
        targets: PyTree,
        *,
        rngs: Rngs = None,
        train: bool = True,
    ) -> Program:
        """The program that a call with these arguments runs."""
        specialization = self.pipelined_loss(variables, x, targets, rngs, train=train)
        return self._program(specialization)

    def _program(self, specialization: Specialization) -> Program:
        if self.has_state:
            return specialization.program_with_state
        return specialization.program

    def _no_grad(self, leaf: Any) -> Any:
        """The placeholder for the gradient of a leaf that has none.

        It is ``None``, or, if ``trainable`` was left out, that of `jax.grad` for
        integers.
        """
        if not self.pipelined_loss.trainable.selects_all:
            return None
        return np.zeros(leaf.shape, jax.dtypes.float0)


def _warn_of_state(collections: str) -> None:
    """Warns that a call without ``has_state`` does not return what training changes."""
    warn(
        f"value_and_grad leaves {collections} as given, which training changes; type "
        f"value_and_grad(..., has_state=True), which returns ((loss, state), grads), "
        f"or take a train_step, which keeps them"
    )
