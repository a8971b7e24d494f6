"""The loss and its gradients through a pipeline."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._functions import _microbatch
from .._functions._objective import Objective
from .._functions._vjp import Leaves
from .._run import _execute, _transfer
from .._run._program import Program

PyTree = Any


class Outcome(NamedTuple):
    """What a mini-batch gives, as flat leaves per stage.

    Attributes:
      loss: the loss of the whole mini-batch, a scalar on the last device.
      aux: what the loss function returned beside it, of all micro-batches.
      grads: the gradients of the trainable leaves of each stage, on its device.
      changed: the new values of the leaves that training changes, of each stage.
    """

    loss: jax.Array
    aux: PyTree
    grads: Sequence[Sequence[jax.Array]]
    changed: Sequence[Sequence[jax.Array]]


class Gradient:
    """A program with a loss, and how to read its results.

    Args:
      program: the compiled mini-batch.
      objective: its loss.

    Attributes:
      trained: whether each leaf of the parameters has a gradient.
    """

    def __init__(self, program: Program, objective: Objective) -> None:
        self.program = program
        self.trained = program.layout.trained
        self._ties = program.layout.ties
        self._num_losses = objective.num_tallies
        tasks = [row[0].task for row in program.rows]
        weights = [task.weights for task in tasks]
        self._grad_dtypes = self._ties.gradient_dtypes(weights)
        self._commits = [row[0].programs.commit for row in program.rows]
        self._changed = [task.changed for task in tasks]
        self._loss_dtypes = (program.last_task.closed.out_avals[0].dtype,)
        aux = program.last_task.y
        axes = _microbatch.flat_axes(objective.aux_axes, aux, "aux", "aux_axes")
        _check_aux(program, axes)
        self._aux_tree = jax.tree.structure(aux)
        self._join = _joiner(axes)

    def __call__(
        self,
        weights: list[Leaves],
        x: Sequence[Any],
        targets: Sequence[Any],
        rngs: Sequence[jax.Array],
        observe: Callable[..., None] | None = None,
    ) -> Outcome:
        """Runs the mini-batch. Never waits.

        Args:
          weights: the leaves of each stage's variables, in place.
          x: the leaves of the input, anywhere.
          targets: the leaves of the targets, anywhere.
          rngs: the leaves of the keys of the step, anywhere.
          observe: see `_execute.execute`.

        Returns:
          The loss, aux, gradients and changed leaves.
        """
        live = self.program.feed(weights, x, targets, rngs)
        _execute.execute(self.program.steps, live, observe)
        tally = live.tally
        losses, states = tally[-1][: self._num_losses], tally[-1][self._num_losses :]
        tally[-1] = states
        live.grads[:] = self._ties.gather(live.grads, self.program.devices)
        (loss,) = self._finish([losses[0]], self._loss_dtypes, losses[1:], -1)
        grads = [
            self._finish(leaves, dtypes, losses[1:], s)
            for s, (leaves, dtypes) in enumerate(
                zip(live.grads, self._grad_dtypes, strict=True)
            )
        ]
        changed = [
            commit([weights[s][i] for i in self._changed[s]], tally[s])
            if commit
            else []
            for s, commit in enumerate(self._commits)
        ]
        return Outcome(loss, self._aux(live.emitted[-1]), grads, changed)

    def _finish(
        self,
        sums: Sequence[jax.Array],
        dtypes: tuple[Any, ...],
        divisor: Sequence[jax.Array],
        s: int,
    ) -> Sequence[jax.Array]:
        """Makes sums over micro-batches what they stand for, on the device of a stage.

        Sums in another precision than their leaves are cast; those of a weighted loss
        are divided by the sum of weights. Mostly there is nothing to do.
        """
        if sums and divisor:
            (weight,) = _transfer.put(divisor, self.program.devices[s])
            sums = _divide(sums, weight)
        same = all(x.dtype == dtype for x, dtype in zip(sums, dtypes, strict=True))
        return sums if same else _cast(sums, dtypes)

    def _aux(self, rows: list[Any]) -> PyTree:
        leaves = [] if not rows[0] else self._join(rows)
        return jax.tree.unflatten(self._aux_tree, leaves)


def _joiner(axes: Sequence[int | None]) -> Callable[[list[Any]], list[jax.Array]]:
    """Leaves per micro-batch -> flat leaves; stacked where there is no axis."""

    @jax.jit
    def join(rows: list[Any]) -> list[jax.Array]:
        return [
            jnp.stack(column) if axis is None else jnp.concatenate(column, axis)
            for column, axis in zip(zip(*rows, strict=True), axes, strict=True)
        ]

    return join


def _check_aux(program: Program, axes: Sequence[int | None]) -> None:
    """Checks that aux of all micro-batches, of two sizes maybe, can be joined.

    Raises:
      ValueError: with every leaf that lacks the axis or differs elsewhere.
    """
    rows, sizes = program.rows[-1], program.batch.sizes
    triples = zip(
        jax.tree_util.tree_leaves_with_path(rows[0].task.y),
        jax.tree.leaves(rows[-1].task.y),
        axes,
        strict=True,
    )
    lacking, ragged = [], []
    for (path, a), b, axis in triples:
        label = f"aux{jax.tree_util.keystr(path)}"
        if axis is not None and not -a.ndim <= axis < a.ndim:
            lacking.append(f"{label} of shape {a.shape} has no axis {axis}")
        elif _beside(a.shape, axis) != _beside(b.shape, axis):
            on = "" if axis is None else f", joined on axis {axis}"
            ragged.append(f"{label}{on}: {a.shape} and {b.shape}")
    if lacking:
        raise ValueError("cannot join aux on aux_axes: " + "; ".join(lacking))
    if ragged:
        raise ValueError(
            f"the sizes {sizes} of micro-batches differ and so do the shapes of aux: "
            + "; ".join(ragged)
            + "; return sums or means, name in aux_axes= the axis of the examples, or "
            "give a batch that num_microbatches divides"
        )


def _beside(shape: tuple[int, ...], axis: int | None) -> tuple[int, ...]:
    """A shape without one axis."""
    return shape if axis is None else (*shape[:axis], *shape[axis:][1:])


@partial(jax.jit, donate_argnums=0)
def _divide(sums: Sequence[jax.Array], divisor: jax.Array) -> list[jax.Array]:
    return [x / divisor.astype(x.dtype) for x in sums]


@partial(jax.jit, static_argnums=1)
def _cast(sums: Sequence[jax.Array], dtypes: tuple[Any, ...]) -> list[jax.Array]:
    return [x.astype(dtype) for x, dtype in zip(sums, dtypes, strict=True)]
