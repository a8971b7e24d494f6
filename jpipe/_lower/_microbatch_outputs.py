"""The results of micro-batches besides the loss, and what these follow from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.extend import core

from .._jaxprs import _dataflow
from .._layers._text import shape_text
from .._trace._traced_function import TracedFunction

PyTree = Any


@dataclass(frozen=True)
class MicrobatchOutputs:
    """The results of micro-batches besides the loss.

    Attributes:
      traced: the function on the first micro-batch.
      has_examples: one bool per leaf of the batch; True if it is split by examples.
      first: specs of the results of the first micro-batch.
      last: specs of the results of the last micro-batch.
      sizes: the number of examples in each micro-batch, the larger ones first.
      state_axes: the axis of the examples of each of the function's state inputs.
      trace_whole: traces the mini-batch as one micro-batch.
    """

    traced: TracedFunction
    has_examples: Sequence[bool]
    first: PyTree
    last: PyTree
    sizes: Sequence[int]
    trace_whole: Callable[[], tuple[TracedFunction, PyTree]]
    state_axes: Sequence[int | None] = ()

    @cached_property
    def leaves(self) -> list[tuple[Any, Any]]:
        """The path and spec of each result of the first micro-batch."""
        return jax.tree_util.tree_leaves_with_path(self.first)

    @property
    def depends_on_examples(self) -> list[bool]:
        """One bool per leaf; True if it follows from an example."""
        return self.aux_depends_on_examples[: len(self.leaves)]

    @cached_property
    def aux_depends_on_examples(self) -> list[bool]:
        """The same, for new values of state behind the leaves too."""
        traced = self.traced
        jaxpr = traced.closed.jaxpr.replace(outvars=traced.aux_vars)
        closed = core.ClosedJaxpr(jaxpr, traced.closed.consts)
        inputs = [False] * len(jaxpr.invars)
        end = traced.num_params + len(self.has_examples)
        inputs[traced.num_params : end] = self.has_examples
        return _dataflow.dependent_results(closed, inputs)

    @cached_property
    def _whole(self) -> tuple[TracedFunction, list[Any]]:
        """The program of the whole mini-batch at once, and specs of its results."""
        traced, specs = self.trace_whole()
        if jax.tree.structure(specs) != jax.tree.structure(self.first):
            raise ValueError(
                f"what is returned has another structure for the whole mini-batch: "
                f"{shape_text(self.first)} for a micro-batch and {shape_text(specs)}; "
                f"return the same for each number of examples"
            )
        return traced, jax.tree.leaves(specs)

    def shapes_of(self, i: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of a leaf of the first and of the last micro-batch."""
        return self.leaves[i][1].shape, jax.tree.leaves(self.last)[i].shape

    def has_row_per_example(self, i: int, axis: int) -> bool:
        """True if a leaf has, on an axis, a row for each example of a micro-batch."""
        pairs = zip(self.shapes_of(i), (self.sizes[0], self.sizes[-1]), strict=True)
        return all(
            -len(shape) <= axis < len(shape) and shape[axis] == size
            for shape, size in pairs
        )

    def joins_to_whole(self, i: int, axis: int) -> bool:
        """True if the concatenation of a leaf has the shape that one device returns."""
        _, specs = self._whole
        first, last = self.shapes_of(i)
        if not -len(first) <= axis < len(first):
            return False
        num_first = list(self.sizes).count(self.sizes[0])
        num_last = len(self.sizes) - num_first
        joined = list(first)
        joined[axis] = num_first * first[axis] + num_last * last[axis]
        return tuple(joined) == specs[i].shape

    def constant_jaxpr(self, i: int) -> core.ClosedJaxpr | None:
        """``() -> leaf`` of one device, if it follows from no input at all."""
        traced, _ = self._whole
        return traced.constant_jaxpr(traced.aux_vars[i])

    def is_input(self, i: int) -> bool:
        """True if a leaf is an input, unchanged."""
        return self.traced.aux_vars[i] in self.traced.closed.jaxpr.invars

    def has_fixed_shape(self, i: int) -> bool:
        """True if a leaf has the same shape for any number of examples."""
        _, specs = self._whole
        return {specs[i].shape} == {*self.shapes_of(i)}
