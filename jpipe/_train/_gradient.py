"""The loss and its gradients through a list of layers."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import jax

from .._functions import _microbatch
from .._functions._objective import Objective
from .._instructions._collector import paused
from .._instructions._program import Program
from .._run import _variables
from .._run._layout import Layout
from .._slices import _join
from .._slices._built import Built
from .._slices._listed import Listed

PyTree = Any


class Gradient(Built):
    """A mini-batch with a loss: traced, and written into a graph when asked.

    Args:
      listed: the layers and the loss on it.
      objective: the loss.
    """

    layout: Layout

    def __init__(self, listed: Listed, objective: Objective) -> None:
        self.listed, sizes = listed, listed.batch.sizes
        aux, last = listed.aux[sizes[0]], listed.aux[sizes[-1]]
        axes = _microbatch.flat_axes(objective.aux_axes, aux, "aux", "aux_axes")
        _check_aux(aux, last, axes, sizes)
        joins = _join.by_axes(objective.aux_axes, aux, [])
        parts = listed.pipe, listed.stages, listed.batch, listed.layout
        super().__init__(*parts, joins, aux)

    @cached_property
    def changed(self) -> list[int]:
        """The positions among the variables of the leaves that training changes."""
        return sorted(self.listed.state.at)

    @cached_property
    def program(self) -> Program:
        """``(*variables, *x, *targets, *rngs) -> (loss, *aux, *grads)``."""
        return self._with_state([])

    @cached_property
    def program_with_state(self) -> Program:
        """The same, which gives what is no parameter too, as it is after training."""
        return self._with_state(self.layout.state)

    @paused
    def _with_state(self, state: Sequence[int]) -> Program:
        graph = self.pipe.graph()
        variables, given = self.arguments(graph)
        loss, aux, grads, changed = self.into(graph, variables, given)
        new = [changed.get(i, variables[i]) for i in state]
        own = graph.own([*loss, *aux, *(grads[i] for i in sorted(grads)), *new])
        count = 1 + len(aux)
        metrics = map(graph.everywhere, own[:count])
        return Program(graph, [*metrics, *own[count:]], self.pipe.places)

    def given(
        self,
        variables: PyTree,
        x: PyTree,
        targets: PyTree,
        rngs: PyTree,
        tree: str = "variables",
    ) -> list[Any]:
        """What the program is given; ``tree`` is what errors call the variables.

        Raises:
          ValueError: if variables were overwritten or are not in place.
          TypeError: if a leaf belongs to a trace.
        """
        leaves = jax.tree.leaves(tuple(variables))
        self.layout.check(leaves, tree)
        batch = jax.tree.leaves((x, targets, rngs))
        _variables.check_concrete(batch)
        return leaves + batch


def _check_aux(
    first: PyTree, last: PyTree, axes: Sequence[int | None], sizes: Sequence[int]
) -> None:
    """Checks that aux of all micro-batches, of two sizes maybe, can be joined.

    Raises:
      ValueError: with every leaf that lacks the axis or differs elsewhere.
    """
    triples = zip(
        jax.tree_util.tree_leaves_with_path(first),
        jax.tree.leaves(last),
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
