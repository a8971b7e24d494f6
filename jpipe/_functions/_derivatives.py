"""What differentiation makes of a stage: traced when first asked, not yet compiled."""

from collections.abc import Callable
from functools import cached_property

from .._jaxprs._function import Function
from . import _remat, _split, _vjp


class Programs:
    """A function of weights, x and extra as forwards and backwards.

    Args:
      cut: gives its `_vjp.Cut`, when first asked.
      mode: what is stored between the two.
      num_weights: how many weights it reads.
      num_grads: how many of them are differentiated.
    """

    def __init__(
        self,
        cut: Callable[[], _vjp.Cut],
        mode: _remat.Mode,
        num_weights: int,
        num_grads: int,
    ) -> None:
        self._differentiated, self._mode = cut, mode
        self._num_weights, self.num_grads = num_weights, num_grads

    @cached_property
    def _cut(self) -> _vjp.Cut:
        return self._differentiated()

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
        return _split.split(backward, self._num_weights, is_first, fewest)

    @cached_property
    def input_grad(self) -> Function:
        """``(weights, x, extra, residuals, cotangents) -> (x_grads, residuals)``."""
        return Function.of("input_grad", self._halves.first)

    @cached_property
    def weight_grad(self) -> Function:
        """``(*what input_grad reads, *residuals of it) -> weight_grads``."""
        return Function.of("weight_grad", self._halves.second)
