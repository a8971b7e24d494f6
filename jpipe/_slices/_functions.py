"""A slice as forwards and backwards, differentiated when first asked."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from .._functions import _remat, _split, _vjp
from .._jaxprs import _loops
from .._jaxprs._function import Function
from ._slice import Slice, specs


class StageFunctions:
    """A slice, and what differentiation makes of it.

    Args:
      part: the slice.
      mode: what is stored between forward and backward: see `_remat`.
      has_loss: whether it makes the loss, whose cotangent is one.
      trained: which of its weights have a gradient.
      arrives: which of what it reads of other stages has one.
    """

    def __init__(
        self,
        part: Slice,
        mode: Any,
        has_loss: bool,
        trained: Sequence[bool],
        arrives: Sequence[bool],
    ) -> None:
        self._mode, self._part = mode, part
        self.num_grads = sum(trained)
        fewest = _remat.keeps_fewest(mode)
        if fewest:
            part = replace(part, closed=_loops.keep_fewest(part.closed))
        self._cut = _vjp.cut(
            part.run,
            specs(part.weights),
            specs(part.arrives),
            specs(part.batch),
            _vjp.Differentiable(tuple(trained), tuple(arrives)),
            _remat.wrapper(mode),
            fewest,
            [] if has_loss else None,
        )

    @cached_property
    def forward(self) -> Function:
        """``(weights, arrives, batch) -> (leaves, beside, residuals)``."""
        return Function.of("forward", self._cut.forward)

    @cached_property
    def backward(self) -> Function:
        """``(weights, arrives, batch, residuals, cotangents) -> gradients``."""
        return Function.of("backward", self._cut.backward)

    @cached_property
    def _halves(self) -> _split.Halves:
        backward = self._cut.backward
        is_first = [i >= self.num_grads for i in range(len(backward.jaxpr.outvars))]
        fewest = _remat.halves_keep_fewest(self._mode)
        return _split.split(backward, len(self._part.weights), is_first, fewest)

    @cached_property
    def input_grad(self) -> Function:
        """The gradients of what arrives, and residuals for `weight_grad`."""
        return Function.of("input_grad", self._halves.first)

    @cached_property
    def weight_grad(self) -> Function:
        """The gradients of the weights."""
        return Function.of("weight_grad", self._halves.second)
