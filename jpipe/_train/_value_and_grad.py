"""The loss of a mini-batch and its gradients, in the structures that users hold."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from .._instructions._program import Program
from .._layers._rng import Rngs
from .._run import _variables
from .._run._context import outside_of_meshes
from ._gradient import Gradient

PyTree = Any


class ValueAndGrad:
    """``f(variables, x, targets)``: see `Pipeline.value_and_grad`, which makes it.

    Args:
      find_gradient: gives the compiled gradient for variables and a batch.
      has_aux: whether the loss function returns something beside the loss.
      selected: whether it was said which leaves are trained. Others have no gradient,
        ``None``; else leaves of integers have that of `jax.grad` with ``allow_int``.
    """

    def __init__(
        self,
        find_gradient: Callable[..., Gradient],
        *,
        has_aux: bool,
        selected: bool,
    ) -> None:
        self._find_gradient = find_gradient
        self._has_aux = has_aux
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
          x: the input of the mini-batch, on the host or any device.
          targets: its targets, on the host or any device.
          rngs: a key, or keys by stream name.
          train: given to layers that ask whether they are trained.

        Returns:
          ``(loss, grads)``, or ``((loss, aux), grads)``.

        Raises:
          ValueError: if batch, targets or variables do not fit.
          TypeError: if the loss function does not return what was agreed.
        """
        gradient = self._find_gradient(variables, x, targets, rngs, train)
        given = gradient.arguments(variables, x, targets, rngs)
        loss, *rest = gradient.program(given)
        count = gradient.aux_tree.num_leaves
        aux, found = (
            jax.tree.unflatten(gradient.aux_tree, rest[:count]),
            iter(rest[count:]),
        )
        leaves, tree = jax.tree.flatten(_variables.params(variables))
        grads = [
            next(found) if trained else self._without(leaf)
            for leaf, trained in zip(leaves, gradient.layout.trained, strict=True)
        ]
        value = (loss, aux) if self._has_aux else loss
        return value, jax.tree.unflatten(tree, grads)

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
        return self._find_gradient(variables, x, targets, rngs, train).program

    def _without(self, leaf: Any) -> Any:
        """What stands for the gradient of a leaf that has none."""
        return None if self._selected else np.zeros(leaf.shape, jax.dtypes.float0)
