"""The forward and the backwards of a stage in a remat mode, built when needed."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jax.extend import core

from .._jaxprs import _inlining, _jaxpr, _loops
from .._jaxprs._computation import (
    Argument,
    ArgumentOrResult,
    Computation,
    Result,
    compose,
)
from .._jaxprs._jaxpr import specs
from .._partition._remat_mode import RematMode, Stored
from .._trace._accumulation import accumulate, sum_spec
from ..schedules._action import BACKWARD, INPUT, WEIGHT
from . import _residuals, _split_backward, _vjp
from ._stage_slice import StageSlice

_BACKWARDS = {BACKWARD: "backward", INPUT: "input_grad", WEIGHT: "weight_grad"}


@dataclass(frozen=True, eq=False)
class Accumulation:
    """The addition of terms, the loss and new state, to their sums, behind a forward.

    Attributes:
      closed: ``(sums, terms, ...) -> sums``.
      args: one per input of ``closed``: the argument or the result of the forward
        that it is; ``None`` for an input that comes from elsewhere.
    """

    closed: core.ClosedJaxpr
    args: Sequence[ArgumentOrResult | None]


@dataclass(frozen=True, eq=False)
class StageFunctions:
    """The forward of a stage and its derivatives, in one remat mode.

        forward:      inputs                              -> outputs, residuals
        backward:     inputs, residuals, cotangents       -> weight and input grads
        input_grad:   inputs, residuals, cotangents       -> input grads, I residuals
        weight_grad:  the same, and I residuals           -> weight grads

    *I residuals* are those of the first half of the backward, which the second reads.

    Attributes:
      slice: the slice of the stage, on micro-batches of one size.
      mode: the remat mode: what is stored between forward and backward.
      is_loss: True if its output is the loss: see `_vjp.split_vjp`.
      divisors: specs of the sum of loss weights that divides the loss, if any does.
    """

    slice: StageSlice
    mode: RematMode
    is_loss: bool = False
    divisors: Sequence[Any] = ()
    # the accumulation of a forward, the op of a backward, or both -> what these run
    _actions: dict[Any, Computation] = field(default_factory=dict, init=False)

    @cached_property
    def _is_weight(self) -> list[bool]:
        weights = {*self.slice.weight_vars}
        return [var in weights for var in self.slice.closed.jaxpr.invars]

    @cached_property
    def _vjp_parts(self) -> _vjp.ForwardBackward:
        closed = self.slice.closed
        if self.mode.stores is Stored.FEWEST_BYTES:
            closed = _loops.keep_fewest(closed)
        run = _jaxpr.as_traced(closed)
        num_outputs = len(self.slice.differentiated_outputs)

        def function(differentiated: Any, fixed: Any) -> tuple[list[Any], list[Any]]:
            results = run(*differentiated, *fixed)
            return results[:num_outputs], results[num_outputs:]

        invars = self.slice.closed.jaxpr.invars
        side_inputs = {*self.slice.side_inputs}
        num_with_grad = self.slice.num_trained + self.slice.num_input_grads
        return _vjp.split_vjp(
            function,
            specs(invars[:num_with_grad]),
            specs(invars[num_with_grad:]),
            is_weight=self._is_weight,
            is_stored=[var in side_inputs for var in invars],
            mode=self.mode,
            is_loss=self.is_loss,
            divisors=self.divisors,
        )

    @cached_property
    def forward(self) -> Computation:
        """``inputs -> (outputs, residuals)``."""
        return Computation.from_jaxpr("forward", self._vjp_parts.forward)

    @cached_property
    def _halves(self) -> _split_backward.BackwardHalves:
        backward = self._vjp_parts.backward
        num_other_inputs = len(backward.jaxpr.invars) - len(self._is_weight)
        num_grads = len(backward.jaxpr.outvars)
        return _split_backward.split_backward(
            backward,
            is_weight=[*self._is_weight, *[False] * num_other_inputs],
            is_first=[i >= self.slice.num_trained for i in range(num_grads)],
            mode=self.mode.between_halves,
        )

    @property
    def num_residuals(self) -> int:
        """The number of residuals of its forward."""
        return len(self._vjp_parts.residual_vars)

    # ----------------------------------- the computations of actions, which add to sums

    def forward_adding(self, accumulation: Accumulation | None) -> Computation:
        """A forward, and the addition of its terms to their sums, if there are any.

        ``(inputs, *other inputs of the addition) -> (outputs, residuals, sums)``
        """
        if accumulation is None:
            return self.forward
        if accumulation not in self._actions:
            closed = self._forward_adding_jaxpr(accumulation)
            self._actions[accumulation] = Computation.from_jaxpr(
                "forward_add_results", closed
            )
        return self._actions[accumulation]

    def backward_adding(self, op: str) -> Computation:
        """A backward, or a half of one, that adds weight gradients to their sums.

        B: ``(inputs, residuals, cotangents, sums) -> (input_grads, sums)``
        I: ``(inputs, residuals, cotangents) -> (input_grads, I residuals)``
        W: ``(inputs, residuals, cotangents, I residuals, sums) -> sums``
        """
        if op not in self._actions:
            closed = self._backward_adding_jaxpr(op)
            self._actions[op] = Computation.from_jaxpr(self._backward_name(op), closed)
        return self._actions[op]

    def forward_backward(
        self, op: str, accumulation: Accumulation | None
    ) -> Computation:
        """A forward, and the backward, or its first half, right after it.

        ``(inputs, *other inputs of the addition, cotangents, sums) ->
        (*results of forward_adding, *results of backward_adding)``
        """
        key = op, accumulation
        if key not in self._actions:
            closed = self._forward_backward_jaxpr(op, accumulation)
            forward = "forward_add_results" if accumulation else "forward"
            name = f"{forward}_{self._backward_name(op)}"
            self._actions[key] = Computation.from_jaxpr(name, closed)
        return self._actions[key]

    def _backward_name(self, op: str) -> str:
        name = _BACKWARDS[op]
        return f"{name}_add_grads" if self._has_weight_grads(op) else name

    def _has_weight_grads(self, op: str) -> bool:
        """True if a backward, or a half of it, returns gradients of weights."""
        return op != INPUT and self.slice.num_trained > 0

    def _forward_adding_jaxpr(
        self, accumulation: Accumulation | None
    ) -> core.ClosedJaxpr:
        forward = self._vjp_parts.forward
        if accumulation is None:
            return forward
        return compose(forward, accumulation.closed, accumulation.args)

    def _backward_adding_jaxpr(self, op: str) -> core.ClosedJaxpr:
        if op == INPUT:
            return self._halves.first
        backward = self._vjp_parts.backward if op == BACKWARD else self._halves.second
        if not self._has_weight_grads(op):
            return backward
        grads: list[ArgumentOrResult] = [
            Result(i) for i in range(self.slice.num_trained)
        ]
        composed = compose(
            backward, self._add_grads, [*[None] * self.slice.num_trained, *grads]
        )
        # The gradients themselves are no results, only their sums.
        outvars = composed.jaxpr.outvars[self.slice.num_trained :]
        return core.ClosedJaxpr(
            composed.jaxpr.replace(outvars=outvars), composed.consts
        )

    def _forward_backward_jaxpr(
        self, op: str, accumulation: Accumulation | None
    ) -> core.ClosedJaxpr:
        forward = self._forward_adding_jaxpr(accumulation)
        backward = self._backward_adding_jaxpr(op)
        num_args = len(self.slice.closed.jaxpr.invars)
        num_outputs = len(self.slice.closed.jaxpr.outvars)

        # The backward reads inputs and residuals of the forward, then what is its own.
        args: list[ArgumentOrResult | None] = [Argument(i) for i in range(num_args)]
        args += [Result(num_outputs + i) for i in range(self.num_residuals)]
        args += [None] * (len(backward.jaxpr.invars) - len(args))
        return compose(forward, backward, args)

    @cached_property
    def _add_grads(self) -> core.ClosedJaxpr:
        """``(sums, gradients) -> sums``."""
        sums = [
            sum_spec(var.aval)
            for var in self.slice.weight_vars[: self.slice.num_trained]
        ]
        grads = self._vjp_parts.backward.out_avals[: self.slice.num_trained]
        closed, _ = _inlining.trace(accumulate, sums, [*map(_jaxpr.spec, grads)])
        return closed

    @property
    def cotangents(self) -> list[Any]:
        """Specs of the last inputs of a backward: cotangents, or the loss divisor."""
        if self.is_loss:
            return list(self.divisors)
        return specs(self.slice.differentiated_outputs)

    @cached_property
    def residuals(self) -> _residuals.Residuals:
        """The memory and the recomputation of a micro-batch."""
        # input of the stage -> the same input of the traced forward
        traced_input = dict(
            zip(
                self.slice.closed.jaxpr.invars,
                self._vjp_parts.pullback_leaves.jaxpr.invars,
                strict=True,
            )
        )
        return _residuals.measure_residuals(
            self._vjp_parts.pullback_leaves,
            self._vjp_parts.residual_vars,
            activations=[
                traced_input[var]
                for var in [*self.slice.input_activations, *self.slice.model_inputs]
            ],
            side_inputs=[traced_input[var] for var in self.slice.side_inputs],
            mode=self.mode,
        )
