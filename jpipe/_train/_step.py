"""The training step: gradients of a mini-batch, then one update."""

import reprlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jax
import optax

from .._functions._objective import Objective
from .._layers import _rng
from .._run import _signature, _variables
from .._run._context import outside_of_meshes
from ._gradient import Gradient
from ._optimizer import Optimizer
from ._state import TrainState, check_state

PyTree = Any


class TrainStep:
    """``step(state, x, targets) -> (state, metrics)``; made by `Pipeline.train_step`.

    Args:
      find_gradient: gives the compiled gradient for variables and a batch.
      make_optimizer: gives the optimizer for parameters, given which are trained.
      objective: the loss.
      donate: whether the given state is overwritten.
    """

    def __init__(
        self,
        find_gradient: Callable[..., Gradient],
        make_optimizer: Callable[[PyTree, Sequence[bool]], Optimizer],
        *,
        objective: Objective,
        donate: bool,
    ) -> None:
        self._find_gradient = find_gradient
        self._make_optimizer = make_optimizer
        self._objective = objective
        self._donate = donate
        self._optimizers: dict[Any, Optimizer] = {}
        # By what the loss holds, which may be something else for each call.
        self._compiled = lru_cache(maxsize=32)(_no_programs)

    @outside_of_meshes
    def __call__(
        self, state: TrainState, x: PyTree, targets: PyTree
    ) -> tuple[TrainState, dict[str, Any]]:
        """Takes one step. Returns as soon as the work is dispatched.

        Args:
          state: the state; its memory is used again, unless ``donate=False``.
          x: the input of the mini-batch, on the host or any device.
          targets: its targets, on the host or any device.

        Returns:
          The new state, and ``{"loss": ...}`` with ``"aux"`` where there is one.

        Raises:
          ValueError: if the state or the batch does not fit; nothing is changed.
          TypeError: if a leaf of the batch is not an array; nothing is changed.
        """
        check_state(state)
        pool, tree = jax.tree.flatten((state.params, state.model_state))
        kinds = _signature.kinds([*pool, state.rng])
        kind = _signature.settings(), tree, kinds
        compiled = self._compile(kind, state, x, targets)
        weights = compiled.layout.take([pool[i] for i in compiled.order])
        compiled.optimizer.check(state.opt_state)

        key, number = _advance(state.rng, state.step)
        outcome = compiled.gradient(
            weights, jax.tree.leaves(x), jax.tree.leaves(targets), [key]
        )
        grads = [leaf for leaves in outcome.grads for leaf in leaves]
        count = compiled.num_params
        pool[:count], opt_state = compiled.optimizer.update(
            grads, state.opt_state, pool[:count]
        )
        for positions, leaves in zip(compiled.changed, outcome.changed, strict=True):
            for i, leaf in zip(positions, leaves, strict=True):
                pool[i] = leaf
        params, model_state = jax.tree.unflatten(tree, pool)
        metrics = {"loss": outcome.loss}
        if self._objective.has_aux:
            metrics["aux"] = outcome.aux
        return TrainState(number, params, opt_state, model_state, state.rng), metrics

    def _compile(
        self, kind: Any, state: TrainState, x: PyTree, targets: PyTree
    ) -> "_Compiled":
        """The programs for such a state and batch; all checks of shapes are here.

        Args:
          kind: the settings, and the structure and kinds of the leaves of the state.
          state: the state.
          x: the input of the mini-batch.
          targets: its targets.
        """
        signature = kind, _signature.of(x, targets)
        known = self._compiled(self._objective.now())
        if signature not in known:
            gradient = self._find_gradient(state.variables, x, targets, state.rng, True)
            # A batch of another size needs another gradient, not another optimizer.
            if kind not in self._optimizers:
                made = self._make_optimizer(state.params, gradient.trained)
                self._optimizers[kind] = made
            optimizer = self._optimizers[kind]
            known[signature] = _Compiled(gradient, optimizer, state)
        return known[signature]


def _no_programs(_: Objective) -> "dict[Any, _Compiled]":
    return {}


class _Compiled:
    """A step for one kind of state and batch, and how leaves are reordered.

    The leaves of a state count parameters first, then the other collections; those of
    variables count layer by layer.

    Attributes:
      num_params: the number of leaves that are parameters.
      layout: which leaves of the variables each stage uses.
      order: the positions of the leaves of the variables among those of a state.
      changed: for each stage the positions in a state of those that training changes.
    """

    def __init__(
        self, gradient: Gradient, optimizer: Optimizer, state: TrainState
    ) -> None:
        self.gradient = gradient
        self.optimizer = optimizer
        self.num_params = len(jax.tree.leaves(state.params))
        leaves, tree = jax.tree.flatten((state.params, state.model_state))
        numbered = _variables.merge(*jax.tree.unflatten(tree, range(len(leaves))))
        self.layout = gradient.program.layout
        self.order = jax.tree.leaves(numbered)
        self.changed = [
            [self.order[order[i]] for i in row[0].task.changed]
            for order, row in zip(self.layout.order, gradient.program.rows, strict=True)
        ]


@jax.jit
def _advance(rng: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _rng.step_key(rng, step), step + 1


def check_optimizer(tx: Any) -> optax.GradientTransformation:
    """Returns ``tx`` if it is an optax transformation.

    Raises:
      TypeError: if it is not.
    """
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise TypeError(
            f"tx={reprlib.repr(tx)} is a {type(tx).__name__}; needs an optax "
            f"optimizer, such as optax.adamw(1e-3)"
        )
    return tx
