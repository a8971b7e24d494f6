"""A slice as forwards and backwards, differentiated when first needed."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from .._functions import _remat, _split, _vjp
from .._jaxprs import _loops
from .._jaxprs._function import Function
from .._jaxprs._jaxpr import specs
from . import _residuals
from ._slice import Slice


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
