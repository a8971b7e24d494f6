"""A stage: a slice of the jaxpr, its forward and backwards, made when first needed."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jax.extend import core

from .._jaxprs import _jaxpr, _loops
from .._jaxprs._computation import (
    ArgumentSource,
    Computation,
    ResultSource,
    Source,
    compose,
)
from .._jaxprs._jaxpr import specs
from .._partition import _remat
from .._trace._accumulation import accumulate, sum_spec
from ..schedules._action import BACKWARD, INPUT, WEIGHT
from . import _residuals, _split_backward, _vjp

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


@dataclass(frozen=True, eq=False)
class Stage:
    """One stage on micro-batches of one size, and what differentiation makes of it.

    Its inputs, in order: weights and activations that have a gradient, weights and
    activations that have none, then what a micro-batch brings.

        forward:      inputs                              -> outputs, aux, residuals
        backward:     inputs, residuals, cotangents       -> weight and input grads
        input_grad:   inputs, residuals, cotangents       -> input grads, more
        weight_grad:  inputs, residuals, cotangents, more -> weight grads

    Attributes:
      weights: what it reads that is the same for all micro-batches: parameters, and
        what follows from them once in a step. Those with a gradient come first.
      num_trained: how many these are.
      arrives: what it reads that other stages make, those with a gradient first.
      num_differentiated: how many these are.
      inputs: what it reads of the input of the model.
      batch: what it reads of what else a micro-batch is given.
      leaves: what it makes that has a cotangent: what others read, or the loss; without
        a loss the results.
      aux: what else it makes that is read, without cotangents.
      closed: its jaxpr: ``inputs -> (*leaves, *aux)``.
      mode: what is stored between forward and backward: see `_remat`.
      divisors: where it makes the loss, specs of what that is divided by, if it is;
        else ``None``.
    """

    weights: list[core.Var]
    num_trained: int
    arrives: list[core.Var]
    num_differentiated: int
    inputs: list[core.Var]
    batch: list[core.Var]
    leaves: list[core.Var]
    aux: list[core.Var]
    closed: core.ClosedJaxpr
    mode: Any = "none"
    divisors: Sequence[Any] | None = None
    # what is run: an operation, the sums of a forward, or both -> its function
    _actions: dict[Any, Computation] = field(default_factory=dict, init=False)

    @property
    def given(self) -> list[core.Var]:
        """What it reads of what a micro-batch is given."""
        return [*self.inputs, *self.batch]

    @property
    def has_backward(self) -> bool:
        """Whether anything of the stage, or of one before it, is trained."""
        return self.num_trained + self.num_differentiated > 0

    @cached_property
    def _is_weight(self) -> list[bool]:
        weights = {*self.weights}
        return [var in weights for var in self.closed.jaxpr.invars]

    @cached_property
    def _cut(self) -> _vjp.ForwardBackward:
        fewest = _remat.keeps_fewest(self.mode)
        closed = _loops.keep_fewest(self.closed) if fewest else self.closed
        run, num_outputs = _jaxpr.as_traced(closed), len(self.leaves)

        def function(differentiated: Any, fixed: Any) -> tuple[list[Any], list[Any]]:
            results = run(*differentiated, *fixed)
            return results[:num_outputs], results[num_outputs:]

        invars, batch = self.closed.jaxpr.invars, {*self.batch}
        count = self.num_trained + self.num_differentiated
        return _vjp.cut_vjp(
            function,
            specs(invars[:count]),
            specs(invars[count:]),
            is_weight=self._is_weight,
            is_at_hand=[var in batch for var in invars],
            remat=_remat.make_wrapper(self.mode),
            fewest=fewest,
            divisors=self.divisors,
        )

    @cached_property
    def forward(self) -> Computation:
        """``inputs -> (outputs, aux, residuals)``."""
        return Computation.of("forward", self._cut.forward)

    @cached_property
    def backward(self) -> Computation:
        """``(inputs, residuals, cotangents) -> (weight_grads, input_grads)``.

        Of a loss with its divisors in place of cotangents: see `_vjp.cut_vjp`.
        """
        return Computation.of("backward", self._cut.backward)

    @cached_property
    def _halves(self) -> _split_backward.BackwardHalves:
        backward = self._cut.backward
        num_others = len(backward.jaxpr.invars) - len(self._is_weight)
        num_results = len(backward.jaxpr.outvars)
        return _split_backward.split_backward(
            backward,
            is_weight=[*self._is_weight, *[False] * num_others],
            is_first=[i >= self.num_trained for i in range(num_results)],
            fewest=_remat.halves_keep_fewest(self.mode),
        )

    @cached_property
    def input_grad(self) -> Computation:
        """``(inputs, residuals, cotangents) -> (input_grads, residuals)``."""
        return Computation.of("input_grad", self._halves.first)

    @cached_property
    def weight_grad(self) -> Computation:
        """``(*what input_grad reads, *residuals of it) -> weight_grads``."""
        return Computation.of("weight_grad", self._halves.second)

    @property
    def num_residuals(self) -> int:
        """The number of residuals of its forward."""
        return len(self._cut.residuals)

    # ---------------------------------------- what an action runs: one jaxpr, with sums

    def forward_adding(self, results: ResultSums | None) -> Computation:
        """A forward that adds its results to sums, if there are.

        ``(inputs, *other operands of the sums) -> (outputs, aux, residuals,
        sums)``
        """
        if results is None:
            return self.forward
        if results not in self._actions:
            closed = self._forward_adding(results)
            self._actions[results] = Computation.of("forward_add_results", closed)
        return self._actions[results]

    def backward_adding(self, op: str) -> Computation:
        """A backward, or a half of one, that adds weight gradients to their sums.

        B: ``(inputs, residuals, cotangents, sums) -> (input_grads, sums)``
        I: ``(inputs, residuals, cotangents) -> (input_grads, residuals of I)``
        W: ``(*what I reads, *residuals of I, sums) -> sums``
        """
        if op not in self._actions:
            closed = self._backward_adding(op)
            self._actions[op] = Computation.of(self._backward_name(op), closed)
        return self._actions[op]

    def forward_backward(self, op: str, results: ResultSums | None) -> Computation:
        """A forward, and the backward, or its first half, right after it.

        ``(inputs, *operands of the sums of results, cotangents, sums) ->
        (*results of forward_adding, *results of backward_adding)``
        """
        if (op, results) not in self._actions:
            closed = self._forward_backward(op, results)
            forward = "forward_add_results" if results else "forward"
            name = f"{forward}_{self._backward_name(op)}"
            self._actions[op, results] = Computation.of(name, closed)
        return self._actions[op, results]

    def _backward_name(self, op: str) -> str:
        name = _BACKWARDS[op]
        return f"{name}_add_grads" if self._adds(op) else name

    def _adds(self, op: str) -> bool:
        """Whether a backward makes gradients of weights."""
        return op != INPUT and self.num_trained > 0

    def _forward_adding(self, results: ResultSums | None) -> core.ClosedJaxpr:
        forward = self._cut.forward
        return compose(forward, results.add, results.sources) if results else forward

    def _backward_adding(self, op: str) -> core.ClosedJaxpr:
        if op == INPUT:
            return self._halves.first
        closed = self._cut.backward if op == BACKWARD else self._halves.second
        if not self._adds(op):
            return closed
        grads: list[Source] = [ResultSource(i) for i in range(self.num_trained)]
        added = compose(closed, self._add_grads, [*[None] * self.num_trained, *grads])
        outvars = added.jaxpr.outvars[self.num_trained :]
        return core.ClosedJaxpr(added.jaxpr.replace(outvars=outvars), added.consts)

    def _forward_backward(
        self, op: str, results: ResultSums | None
    ) -> core.ClosedJaxpr:
        forward, backward = self._forward_adding(results), self._backward_adding(op)
        num_args = len(self.closed.jaxpr.invars)
        num_outputs = len(self.closed.jaxpr.outvars)
        sources: list[Source | None] = [ArgumentSource(i) for i in range(num_args)]
        sources += [ResultSource(num_outputs + i) for i in range(self.num_residuals)]
        sources += [None] * (len(backward.jaxpr.invars) - len(sources))
        return compose(forward, backward, sources)

    @cached_property
    def _add_grads(self) -> core.ClosedJaxpr:
        """``(sums, gradients) -> sums``."""
        sums = [sum_spec(var.aval) for var in self.weights[: self.num_trained]]
        grads = self._cut.backward.out_avals[: self.num_trained]
        closed, _ = _jaxpr.trace(accumulate, sums, [*map(_jaxpr.spec, grads)])
        return closed

    @property
    def cotangents(self) -> list[Any]:
        """Specs of what a backward is given: cotangents, or what divides the loss."""
        return specs(self.leaves) if self.divisors is None else list(self.divisors)

    @cached_property
    def stored(self) -> _residuals.Residuals:
        """The residuals of a micro-batch, and what is computed again."""
        # The variables of the forward at the same positions.
        invars = self._cut.reads.jaxpr.invars
        inner = dict(zip(self.closed.jaxpr.invars, invars, strict=True))
        return _residuals.residuals(
            self._cut.reads,
            self._cut.residuals,
            x=[inner[var] for var in [*self.arrives, *self.inputs]],
            batch=[inner[var] for var in self.batch],
            mode=_remat.mode_name(self.mode),
        )
