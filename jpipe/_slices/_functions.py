"""A slice as forwards and backwards, differentiated when first needed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from jax.extend import core

from .._functions import _remat, _split, _vjp
from .._functions._weights import accumulate, sum_spec
from .._jaxprs import _jaxpr, _loops
from .._jaxprs._function import Argument, Function, Result, Source, compose
from .._jaxprs._jaxpr import specs
from ..schedules._action import BACKWARD, INPUT, WEIGHT
from . import _residuals
from ._slice import Slice

_BACKWARDS = {BACKWARD: "backward", INPUT: "input_grad", WEIGHT: "weight_grad"}


@dataclass(frozen=True, eq=False)
class ResultSums:
    """The sums to which a stage adds what its forward returns: losses, statistics.

    Attributes:
      add: ``(sums, results, ...) -> sums``.
      sources: one per input of it: the argument or the result of the forward that it
        is; ``None`` for what it reads besides.
    """

    add: core.ClosedJaxpr
    sources: Sequence[Source | None]


class StageFunctions:
    """A slice, and what differentiation makes of it; equal slices have one.

    Args:
      part: the slice, of equal ones the first.
      mode: what is stored between forward and backward: see `_remat`.
      divisors: where it makes the loss, specs of what that is divided by, if it is;
        else ``None``.
      trained: which of its weights have a gradient.
      arrives: which of what it reads of other stages has one.

    Attributes:
      part: the slice.
      trained: one bool per weight of it; True if it has a gradient.
      arrives: one bool per value that it reads of other stages, likewise.
      num_grads: how many of its weights have a gradient.
    """

    def __init__(
        self,
        part: Slice,
        mode: Any,
        divisors: Sequence[Any] | None,
        trained: Sequence[bool],
        arrives: Sequence[bool],
    ) -> None:
        self.part, self.trained, self.arrives = part, trained, arrives
        self._mode, self._divisors = mode, divisors
        self.num_grads = sum(trained)
        # what is run: an operation, the sums of a forward, or both -> its function
        self._actions: dict[Any, Function] = {}

    @cached_property
    def _cut(self) -> _vjp.Cut:
        part, fewest = self.part, _remat.keeps_fewest(self._mode)
        closed = _loops.keep_fewest(part.closed) if fewest else part.closed
        wanted = *self.arrives, *[False] * len(part.inputs)
        return _vjp.cut(
            replace(part, closed=closed).run,
            specs(part.weights),
            specs([*part.arrives, *part.inputs]),
            specs(part.batch),
            _vjp.Differentiable(tuple(self.trained), wanted),
            _remat.wrapper(self._mode),
            fewest,
            self._divisors,
        )

    @cached_property
    def forward(self) -> Function:
        """``(weights, x, extra) -> (outputs, aux, residuals)``."""
        return Function.of("forward", self._cut.forward)

    @cached_property
    def backward(self) -> Function:
        """``(weights, x, extra, residuals, cotangents) -> (weight_grads, x_grads)``.

        Of a loss with its divisors in place of cotangents: see `_vjp.cut`.
        """
        return Function.of("backward", self._cut.backward)

    @cached_property
    def _halves(self) -> _split.Halves:
        backward, count = self._cut.backward, self.num_grads
        is_first = [i >= count for i in range(len(backward.jaxpr.outvars))]
        fewest = _remat.halves_keep_fewest(self._mode)
        return _split.split(backward, len(self.part.weights), is_first, fewest)

    @cached_property
    def input_grad(self) -> Function:
        """``(weights, x, extra, residuals, cotangents) -> (x_grads, residuals)``."""
        return Function.of("input_grad", self._halves.first)

    @cached_property
    def weight_grad(self) -> Function:
        """``(*what input_grad reads, *residuals of it) -> weight_grads``."""
        return Function.of("weight_grad", self._halves.second)

    @property
    def num_input_grads(self) -> int:
        """The number of cotangents that it sends back."""
        return sum(self.arrives)

    @property
    def num_residuals(self) -> int:
        """The number of residuals of its forward."""
        return len(self._cut.residuals)

    # ---------------------------------------- what an action runs: one jaxpr, with sums

    def forward_adding(self, results: ResultSums | None) -> Function:
        """A forward that adds its results to sums, if there are.

        ``(weights, x, extra, *other operands of the sums) -> (outputs, aux, residuals,
        sums)``
        """
        if results is None:
            return self.forward
        if results not in self._actions:
            closed = self._forward_adding(results)
            self._actions[results] = Function.of("forward_add_results", closed)
        return self._actions[results]

    def backward_adding(self, op: str) -> Function:
        """A backward, or a half of one, that adds weight gradients to their sums.

        B: ``(weights, x, extra, residuals, cotangents, sums) -> (x_grads, sums)``
        I: ``(weights, x, extra, residuals, cotangents) -> (x_grads, residuals of I)``
        W: ``(*what I reads, *residuals of I, sums) -> sums``
        """
        if op not in self._actions:
            closed = self._backward_adding(op)
            self._actions[op] = Function.of(self._backward_name(op), closed)
        return self._actions[op]

    def forward_backward(self, op: str, results: ResultSums | None) -> Function:
        """A forward, and the backward, or its first half, right after it.

        ``(weights, x, extra, *operands of the sums of results, cotangents, sums) ->
        (*results of forward_adding, *results of backward_adding)``
        """
        if (op, results) not in self._actions:
            closed = self._forward_backward(op, results)
            forward = "forward_add_results" if results else "forward"
            name = f"{forward}_{self._backward_name(op)}"
            self._actions[op, results] = Function.of(name, closed)
        return self._actions[op, results]

    def _backward_name(self, op: str) -> str:
        name = _BACKWARDS[op]
        return f"{name}_add_grads" if self._adds(op) else name

    def _adds(self, op: str) -> bool:
        """Whether a backward makes gradients of weights."""
        return op != INPUT and self.num_grads > 0

    def _forward_adding(self, results: ResultSums | None) -> core.ClosedJaxpr:
        forward = self._cut.forward
        return compose(forward, results.add, results.sources) if results else forward

    def _backward_adding(self, op: str) -> core.ClosedJaxpr:
        if op == INPUT:
            return self._halves.first
        closed = self._cut.backward if op == BACKWARD else self._halves.second
        if not self._adds(op):
            return closed
        grads: list[Source] = [Result(i) for i in range(self.num_grads)]
        added = compose(closed, self._add_grads, [*[None] * self.num_grads, *grads])
        outvars = added.jaxpr.outvars[self.num_grads :]
        return core.ClosedJaxpr(added.jaxpr.replace(outvars=outvars), added.consts)

    def _forward_backward(
        self, op: str, results: ResultSums | None
    ) -> core.ClosedJaxpr:
        forward, backward = self._forward_adding(results), self._backward_adding(op)
        num_args = len(self.part.closed.jaxpr.invars)
        num_outputs = len(self.part.closed.jaxpr.outvars)
        sources: list[Source | None] = [Argument(i) for i in range(num_args)]
        sources += [Result(num_outputs + i) for i in range(self.num_residuals)]
        sources += [None] * (len(backward.jaxpr.invars) - len(sources))
        return compose(forward, backward, sources)

    @cached_property
    def _add_grads(self) -> core.ClosedJaxpr:
        """``(sums, gradients) -> sums``."""
        pairs = zip(self.part.weights, self.trained, strict=True)
        sums = [sum_spec(var.aval) for var, is_trained in pairs if is_trained]
        grads = self._cut.backward.out_avals[: self.num_grads]
        closed, _ = _jaxpr.trace(accumulate, sums, [*map(_jaxpr.spec, grads)])
        return closed

    @property
    def cotangents(self) -> list[Any]:
        """Specs of what a backward is given: cotangents, or what divides the loss."""
        divisors = self._divisors
        return specs(self.part.leaves) if divisors is None else list(divisors)

    @property
    def has_backward(self) -> bool:
        """Whether anything of the slice, or of one before it, is trained."""
        return any(self.arrives) or any(self.trained)

    @cached_property
    def stored(self) -> _residuals.Residuals:
        """The residuals of a micro-batch, and what is computed again."""
        part = self.part
        num_x = len(part.arrives) + len(part.inputs)
        sizes = len(part.weights), num_x, len(part.batch)
        cut = self._cut
        return _residuals.residuals(
            cut.reads, cut.residuals, sizes, _remat.name(self._mode)
        )
