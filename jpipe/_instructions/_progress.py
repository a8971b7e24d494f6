"""A line on a terminal that shows how far a long task has come."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import TypeVar

_T = TypeVar("_T")
# After so many seconds a terminal shows how far a task has come.
_LONG = 3.0
# When the task began of which the one at hand is a part.
_began: ContextVar[float | None] = ContextVar("began", default=None)


class Progress:
    """A line on a terminal that shows how far a task has come, if it takes long.

    Of a task within another one the time is that of the outer one.

    Args:
      what: is counted, such as "programs compiled".
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._shown = False

    def __enter__(self) -> "Progress":
        outer = _began.get()
        self._is_outer = outer is None
        self._start = time.monotonic() if outer is None else outer
        _began.set(self._start)
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_outer:
            _began.set(None)
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def show(self, done: int, total: int) -> None:
        """Shows how many are done."""
        seconds = time.monotonic() - self._start
        if seconds > _LONG and sys.stderr.isatty():
            self._shown = True
            sys.stderr.write(
                f"\rjpipe: {done} of {total} {self._what} in {seconds:.0f} s"
            )
            sys.stderr.flush()


def counted(what: str, items: Sequence[_T]) -> Iterator[_T]:
    """The items, one after the other, and on a terminal how many are done."""
    with Progress(what) as progress:
        for done, item in enumerate(items):
            progress.show(done, len(items))
            yield item
