"""What a function runs, found by all that this depends on."""

from collections.abc import Callable
from typing import Any

from .._run import _signature
from ._built import Built, Divided

PyTree = Any
# So many kinds of arguments are remembered, of each function.
_MOST = 64


class Programs:
    """The programs of ``(params, *args)``: those of a kind of arguments are made once.

    Args:
      make: makes what is new.
    """

    def __init__(self, make: Callable[..., Divided]) -> None:
        self._make, self._known = make, dict[Any, Divided]()
        # The last one that was called.
        self.last: Divided | None = None

    def __call__(self, params: PyTree, *args: PyTree) -> Built:
        """What runs for such arguments."""
        key = _signature.settings(), _signature.of(params, args)
        if key not in self._known:
            self._known[key] = self._make(params, *args)
            if len(self._known) > _MOST:
                del self._known[next(iter(self._known))]
        self.last = self._known[key]
        assert self.last.built
        return self.last.built

    def clear(self) -> None:
        """Forgets them."""
        self._known.clear()
