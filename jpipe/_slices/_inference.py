"""A forward pass of a mini-batch through a list of layers."""

from typing import Any

import jax

from .._functions import _microbatch
from .._run import _variables
from . import _join
from ._built import Built
from ._listed import Listed

PyTree = Any


class Inference(Built):
    """``(variables, x, rngs) -> y`` for a whole mini-batch.

    Args:
      listed: the layers on it.
      out_axes: on which axes the outputs of the micro-batches are joined.
    """

    def __init__(self, listed: Listed, out_axes: Any) -> None:
        batch, y = listed.batch, listed.y
        axes = _microbatch.flat_axes(out_axes, y, "outputs", "out_axes")
        if batch.num_parts > 1:
            _microbatch.check_joinable(y, axes, batch.sizes[0], out_axes)
        joins = _join.by_axes(out_axes, y, [], "out")
        parts = listed.pipe, listed.stages, batch, listed.layout
        super().__init__(*parts, joins, y)

    def __call__(self, variables: PyTree, x: PyTree, rngs: PyTree) -> PyTree:
        """Runs the forward pass. Never waits."""
        leaves = jax.tree.leaves(tuple(variables))
        self.layout.check(leaves)
        given = jax.tree.leaves((x, rngs))
        _variables.check_concrete(given)
        return jax.tree.unflatten(self.aux_tree, self.program(leaves + given))
