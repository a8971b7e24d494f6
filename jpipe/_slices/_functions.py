"""A slice as forwards and backwards, differentiated when first asked."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from .._functions import _kept, _remat, _vjp
from .._functions._derivatives import Programs
from .._jaxprs import _loops
from ._slice import Slice, specs


class StageFunctions(Programs):
    """A slice, and what differentiation makes of it.

    Args:
      part: the slice.
      mode: what is stored between forward and backward: see `_remat`.
      divisors: where it makes the loss, specs of what that is divided by, if it is;
        else ``None``.
      trained: which of its weights have a gradient.
      arrives: which of what it reads of other stages has one.
    """

    def __init__(
        self,
        part: Slice,
        mode: Any,
        divisors: Sequence[Any] | None,
        trained: Sequence[bool],
        arrives: Sequence[bool],
    ) -> None:
        fewest, self.part = _remat.keeps_fewest(mode), part
        self.trained, self.arrives, self._divisors = trained, arrives, divisors

        of_inputs = [False] * len(part.inputs)

        def cut() -> _vjp.Cut:
            own = _loops.keep_fewest(part.closed) if fewest else part.closed
            return _vjp.cut(
                replace(part, closed=own).run,
                specs(part.weights),
                specs([*part.arrives, *part.inputs]),
                specs(part.batch),
                _vjp.Differentiable(tuple(trained), (*arrives, *of_inputs)),
                _remat.wrapper(mode),
                fewest,
                divisors,
            )

        super().__init__(cut, mode, len(part.weights), sum(trained))

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
    def kept(self) -> _kept.Kept:
        """What is kept of a micro-batch, and what is computed again."""
        part = self.part
        num_x = len(part.arrives) + len(part.inputs)
        sizes = len(part.weights), num_x, len(part.batch)
        cut = self._cut
        return _kept.kept(cut.reads, cut.residuals, sizes, _remat.name(self._mode))
