"""A forward pass of a mini-batch through a list of layers."""

from typing import Any

import jax

from .._functions import _microbatch
from .._instructions._collector import paused
from .._instructions._graph import OUTSIDE
from .._instructions._program import Program
from .._run import _facts, _variables
from . import _join
from ._listed import Listed
from ._lower import Lowering

PyTree = Any


class Inference:
    """``(variables, x, rngs) -> y`` for a whole mini-batch.

    Args:
      listed: the layers on it.
      out_axes: on which axes the outputs of the micro-batches are joined.
    """

    @paused
    def __init__(self, listed: Listed, out_axes: Any) -> None:
        batch, layout, y = listed.batch, listed.layout, listed.y
        axes = _microbatch.flat_axes(out_axes, y, "outputs", "out_axes")
        if batch.num_parts > 1:
            _microbatch.check_joinable(y, axes, batch.sizes[0], out_axes)
        self._layout, self._tree = layout, jax.tree.structure(y)
        graph = listed.pipe.graph()
        graph.facts |= _facts.of_stages(listed.pipe, layout)
        variables = layout.arguments(graph)
        given = [graph.argument(spec, OUTSIDE) for spec in jax.tree.leaves(batch.x)]
        parts = graph, listed.pipe, listed.stages, batch, variables, given
        lowering = Lowering(*parts)
        lowering.forwards()
        rows = lowering.aux(len(axes))
        outputs = rows[0]
        if batch.num_parts > 1:
            shares = [1.0] * batch.num_parts
            joins = _join.by_axes(out_axes, y, shares, "out")
            made = _join.joined(graph, batch, joins, rows)
            outputs = [made[i] for i in range(len(axes))]
        graph.facts |= _facts.of_batch(batch)
        self.program = Program(graph, graph.own(outputs), listed.pipe.places)

    def __call__(self, variables: PyTree, x: PyTree, rngs: PyTree) -> PyTree:
        """Runs the forward pass. Never waits."""
        leaves = jax.tree.leaves(tuple(variables))
        self._layout.check(leaves)
        given = jax.tree.leaves((x, rngs))
        _variables.check_concrete(given)
        return jax.tree.unflatten(self._tree, self.program(leaves + given))
