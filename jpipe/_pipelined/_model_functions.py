"""The forward pass and the loss of a model, as functions for a pipeline."""

import functools
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp

from .._arguments import _microbatch
from .._arguments._batch import Axes
from .._arguments._mutable import NOTHING_MUTABLE, Mutable
from .._arguments._objective import Objective
from .._jaxprs import _jaxpr
from .._layers import _rng
from .._lower import _join
from .._lower._microbatch_outputs import MicrobatchOutputs
from .._model._model import Model
from .._trace._whole_batch import whole_batch
from ._user_function import ModelFunction, StateUse

PyTree = Any


def forward_function(
    model: Model,
    *,
    train: bool,
    mutable: Mutable = NOTHING_MUTABLE,
    created: Collection[str] = (),
) -> ModelFunction:
    """``(variables, x, rngs) -> (outputs, changed)``.

    Args:
      model: the model.
      train: True in training.
      mutable: the collections of which what changes is returned; the rest is dropped.
      created: the collections that modules of linen make anew.
    """

    def call(variables: PyTree, x: PyTree, rngs: _rng.Rngs) -> Any:
        return model.forward(
            variables, x, rngs, train=train, mutable=mutable.names, created=created
        )

    def make_joins(results: MicrobatchOutputs) -> list[_join.Join]:
        try:
            return _join.join_outputs(model.axes.out_axes, results)
        except ValueError as error:
            _note_axes(error, model.axes)
            raise

    return ModelFunction(
        call,
        make_joins,
        in_axes=(model.axes.in_axes, None),
        has_loss=False,
        model=model,
        names=("x", "rngs"),
        state_use=StateUse.JOIN if mutable.names else StateUse.WARN,
        train=train,
        mutable=mutable,
    )


def loss_function(
    model: Model, objective: Objective, outputs: list[PyTree], *, train: bool
) -> ModelFunction:
    """``(variables, x, targets, rngs) -> (loss, (aux, changed))``.

    Args:
      model: the model.
      objective: the loss of its outputs.
      outputs: a list to which each trace appends specs of the outputs of the model, on
        which the loss is checked. The function does not return them: all that it
        returns is computed, stored and joined.
      train: True in training; evaluation writes nothing.
    """

    @functools.wraps(objective.loss_fn)
    def call(variables: PyTree, x: PyTree, targets: PyTree, rngs: Any) -> Any:
        y, changed = model.forward(variables, x, rngs, train=train)
        outputs.append(jax.tree.map(lambda leaf: _jaxpr.spec(jax.typeof(leaf)), y))
        if objective.reduction == "batch":
            y = _mark(y, model.axes.out_axes, "outputs", "out_axes")
            targets = _mark(targets, model.axes.target_axes, "targets", "target_axes")
        value, aux = objective.of_part(y, targets)
        return value, (aux, changed)

    def make_joins(results: MicrobatchOutputs) -> list[_join.Join]:
        return _join.join_aux(objective.aux_axes, results)

    return ModelFunction(
        call,
        make_joins,
        in_axes=(model.axes.in_axes, model.axes.target_axes, None),
        has_aux=True,
        reduction=objective.reduction,
        model=model,
        names=("x", "targets", "rngs"),
        state_use=StateUse.RETURN if train else StateUse.WARN,
        train=train,
    )


def _mark(tree: PyTree, axes: Any, label: str, name: str) -> PyTree:
    """Marks leaves that have the rows of the whole mini-batch from there on.

    Args:
      tree: the outputs or the targets.
      axes: the axis of the examples, a reduction or ``None``; a prefix of the tree.
      label: the word for the tree in errors.
      name: the name of the argument that the axes are.
    """
    tree = jax.tree.map(jnp.asarray, tree)
    leaves, structure = jax.tree.flatten(tree)
    leaf_axes = _microbatch.leaf_axes(axes, tree, label, name, _join.REDUCTIONS)
    return structure.unflatten(map(whole_batch, leaves, leaf_axes))


def _note_axes(error: ValueError, axes: Axes) -> None:
    """Adds a note to an error: outputs may have their examples where the input has."""
    if isinstance(axes.in_axes, int) and axes.in_axes and axes.out_axes == 0:
        error.add_note(
            f"in_axes={axes.in_axes} splits the input along axis {axes.in_axes}; where "
            f"the outputs have the examples there too, type out_axes={axes.in_axes}; "
            f"where the examples are rows of the input, leave in_axes= out"
        )
