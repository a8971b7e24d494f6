"""The loss of a mini-batch and its gradients, in the structures that users hold."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from .._instructions._program import Program
from .._layers._rng import Rngs
from .._run import _variables
from .._run._context import outside_of_meshes
from .._warn import warn
from ._gradients import Gradients

PyTree = Any


@dataclass(eq=False, repr=False)
class ValueAndGrad:
    """``f(variables, x, targets)``: see `Pipeline.value_and_grad`, which makes it.

    Attributes:
      gradients: of its loss.
      has_aux: whether the loss function returns something besides the loss.
      has_state: whether what training changes besides parameters is returned too.
      feed: gives what this process has to know of an input, targets and keys.
      has_warned: whether it has warned of what it does not return.
    """

    gradients: Gradients
    has_aux: bool
    has_state: bool
    feed: Callable[..., tuple[PyTree, PyTree]]
    has_warned: bool = False

    @outside_of_meshes
    def __call__(
        self,
        variables: PyTree,
        x: PyTree,
        targets: PyTree,
        *,
        rngs: Rngs = None,
        train: bool = True,
    ) -> Any:
        """Returns as soon as the work is dispatched.

        Args:
          variables: one entry per layer, or the model's own tree, in place.
          x: the input of the mini-batch, on the host or any device; of several
            processes those that do not run the first stage may give ``None``.
          targets: its targets, likewise, for the last stage.
          rngs: a key, or keys by stream name.
          train: given to layers that ask whether they are trained.

        Returns:
          ``(loss, grads)``; ``((loss, aux), grads)``, ``((loss, state), grads)`` or
          ``((loss, aux, state), grads)``.

        Raises:
          ValueError: if batch, targets or variables do not fit.
          TypeError: if the loss function does not return what was agreed.
        """
        x, targets = self.feed(x, targets, rngs)
        built = self.gradients(variables, x, targets, rngs, train)
        program = built.program_with_state if self.has_state else built.program
        outputs = program(built.given(variables, (x, targets, rngs)))
        loss, aux, found = built.returned(outputs)
        leaves, tree = jax.tree.flatten(variables)
        layout = built.layout
        grads = [
            next(found) if trained else self._without(leaves[at])
            for at, trained in zip(layout.params, layout.trained, strict=True)
        ]
        extra = [aux] if self.has_aux else []
        if self.has_state:
            for at in built.state:
                leaves[at] = next(found)
            extra.append(_variables.model_state(tree.unflatten(leaves)))
        elif built.written and not self.has_warned:
            self.has_warned = True
            at = [at for at, _ in built.written]
            _warn_of_state(_variables.collections(variables, at))
        value = (loss, *extra) if extra else loss
        params = jax.tree.structure(_variables.params(variables))
        return value, params.unflatten(grads)

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
        """What a call with such arguments runs."""
        built = self.gradients(variables, x, targets, rngs, train)
        return built.program_with_state if self.has_state else built.program

    def _without(self, leaf: Any) -> Any:
        """What stands for the gradient of a leaf that has none.

        Where ``trainable`` was left out, that of `jax.grad` for integers.
        """
        if not self.gradients.trainable.selects_all:
            return None
        return np.zeros(leaf.shape, jax.dtypes.float0)


def _warn_of_state(collections: str) -> None:
    """Warns that a call without ``has_state`` does not return what training changes."""
    warn(
        f"value_and_grad leaves {collections} as given, which training changes; type "
        f"value_and_grad(..., has_state=True), which returns ((loss, state), grads), "
        f"or take a train_step, which keeps them"
    )
