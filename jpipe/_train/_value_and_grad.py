"""The loss of a mini-batch and its gradients, in the structures that users hold."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from .._instructions._program import Program
from .._layers._rng import Rngs
from .._run import _variables
from .._run._context import outside_of_meshes
from .._run._feed import Feed
from .._warn import warn
from ._build import Gradients
from ._gradient import Gradient

PyTree = Any


class ValueAndGrad:
    """``f(variables, x, targets)``: see `Pipeline.value_and_grad`, which makes it.

    Args:
      gradients: of its loss.
      has_aux: whether the loss function returns something beside the loss.
      has_state: whether what training changes beside parameters is returned too.
      selected: whether it was said which leaves are trained. Others have no gradient,
        ``None``; else leaves of integers have that of `jax.grad` with ``allow_int``.
      feed: what it is given, where there are several processes.
    """

    def __init__(
        self,
        gradients: Gradients,
        *,
        has_aux: bool,
        has_state: bool,
        selected: bool,
        feed: Feed,
    ) -> None:
        self._gradients = gradients
        self._feed = feed
        self._has_aux = has_aux
        self._has_state = has_state
        self._was_told = False
        self._selected = selected

    @outside_of_meshes
    def __call__(
        self,
        variables: Sequence[PyTree],
        x: PyTree,
        targets: PyTree,
        *,
        rngs: Rngs = None,
        train: bool = True,
    ) -> Any:
        """Returns as soon as the work is dispatched.

        Args:
          variables: one entry per layer, in place.
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
        x, targets = self._feed(x, targets, rngs)
        gradient = self._gradients(variables, x, targets, rngs, train)
        given = gradient.given(variables, x, targets, rngs)
        loss, *rest = self._program(gradient, variables)(given)
        found = iter(rest)
        aux = [next(found) for _ in range(gradient.aux_tree.num_leaves)]
        leaves, tree = jax.tree.flatten(_variables.params(variables))
        grads = [
            next(found) if trained else self._without(leaf)
            for leaf, trained in zip(leaves, gradient.layout.trained, strict=True)
        ]
        beside = [jax.tree.unflatten(gradient.aux_tree, aux)] if self._has_aux else []
        if self._has_state:
            leaves, whole = jax.tree.flatten(tuple(variables))
            for i, new in zip(gradient.layout.state, found, strict=True):
                leaves[i] = new
            beside.append(_variables.model_state(jax.tree.unflatten(whole, leaves)))
        value = (loss, *beside) if beside else loss
        return value, jax.tree.unflatten(tree, grads)

    def _program(self, gradient: Gradient, variables: Sequence[PyTree]) -> Program:
        """What runs; that it leaves something out is said once."""
        if self._has_state:
            return gradient.program_with_state
        if gradient.changed and not self._was_told:
            self._was_told = True
            say_what_is_left(_variables.collections(variables, gradient.changed))
        return gradient.program

    @outside_of_meshes
    def program(
        self,
        variables: Sequence[PyTree],
        x: PyTree,
        targets: PyTree,
        *,
        rngs: Rngs = None,
        train: bool = True,
    ) -> Program:
        """What a call with such arguments runs."""
        gradient = self._gradients(variables, x, targets, rngs, train)
        return self._program(gradient, variables)

    def _without(self, leaf: Any) -> Any:
        """What stands for the gradient of a leaf that has none."""
        return None if self._selected else np.zeros(leaf.shape, jax.dtypes.float0)


def say_what_is_left(collections: str) -> None:
    """Says that a call without ``has_state`` does not return what training changes."""
    warn(
        f"value_and_grad leaves {collections} as given, which training changes; type "
        f"value_and_grad(..., has_state=True), which returns ((loss, state), grads), "
        f"or take a train_step, which keeps them"
    )
