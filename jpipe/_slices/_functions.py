"""A slice as forwards and backwards, differentiated when first asked."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .._functions import _remat, _vjp
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
        fewest = _remat.keeps_fewest(mode)

        def cut() -> _vjp.Cut:
            own = _loops.keep_fewest(part.closed) if fewest else part.closed
            return _vjp.cut(
                replace(part, closed=own).run,
                specs(part.weights),
                specs(part.arrives),
                specs(part.batch),
                _vjp.Differentiable(tuple(trained), tuple(arrives)),
                _remat.wrapper(mode),
                fewest,
                divisors,
            )

        super().__init__(cut, mode, len(part.weights), sum(trained))
