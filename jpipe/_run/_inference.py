"""A forward pass of a mini-batch, of which nothing is kept."""

import operator
from typing import Any

import jax

from .._functions import _microbatch
from .._functions._batch import Batch
from .._instructions._collector import paused
from .._instructions._graph import OUTSIDE
from .._instructions._program import Program
from . import _variables
from ._layout import Layout
from ._lower import Lowering
from ._pipe import Pipe
from ._totals import joined
from ._work import Works

PyTree = Any


class Inference:
    """``(variables, x, rngs) -> y`` for a whole mini-batch.

    Args:
      pipe: the stages.
      layout: which variables each uses.
      batch: the mini-batch.
      works: what each stage does on each micro-batch.
      out_axes: on which axes the outputs of the micro-batches are joined.
    """

    @paused
    def __init__(
        self, pipe: Pipe, layout: Layout, batch: Batch, works: Works, out_axes: Any
    ) -> None:
        y = works.task(len(pipe.stages) - 1).y
        axes = _microbatch.flat_axes(out_axes, y, "outputs", "out_axes")
        if batch.num_parts > 1:
            _microbatch.check_joinable(y, axes, batch.sizes[0], out_axes)
        self._layout = layout
        self._tree = jax.tree.structure(y)
        graph = pipe.graph()
        variables = layout.arguments(graph)
        x, rngs = (
            [graph.argument(spec, OUTSIDE) for spec in jax.tree.leaves(tree)]
            for tree in (batch.x, batch.rngs)
        )
        lowering = Lowering(graph, pipe, layout, batch, works, variables, x, (), rngs)
        rows = lowering.inference()
        outputs = rows[0]
        if batch.num_parts > 1:
            first = operator.itemgetter(0)
            outputs = joined(graph, pipe, batch, "join", rows, axes, first)
        self.program = Program(graph, graph.own(outputs), pipe.places)

    def __call__(self, variables: PyTree, x: PyTree, rngs: PyTree) -> PyTree:
        """Runs the forward pass. Never waits."""
        leaves = jax.tree.leaves(tuple(variables))
        self._layout.check(leaves)
        given = jax.tree.leaves((x, rngs))
        _variables.check_concrete(given)
        return jax.tree.unflatten(self._tree, self.program(leaves + given))
