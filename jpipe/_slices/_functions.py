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
                [] if has_loss else None,
            )

        super().__init__(cut, mode, len(part.weights), sum(trained))
