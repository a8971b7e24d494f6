"""A line on a terminal that shows how far a long task has come."""

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import TypeVar

_T = TypeVar("_T")
# A task that takes more seconds than this shows how far it has come.
_LONG = 3.0
# The time that has passed is shown anew every so many seconds, so that nobody takes the
# task for one that hangs.
_TICK = 1.0


class _Line:
    """The line of a task and of all tasks within it; nothing where stderr is a file.

    Attributes:
      text: the line without the time.
    """

    def __init__(self) -> None:
        self.text = ""
        self._start = time.monotonic()
        self._is_shown = False
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._is_terminal = _is_terminal()
        if self._is_terminal:
            threading.Thread(target=self._repaint, daemon=True).start()

    def show(self, text: str) -> None:
        """Shows a text."""
        self.text = text
        self._paint()

    def end(self) -> None:
        """Clears the line."""
        with self._lock:
            self._ended.set()
            if self._is_shown:
                sys.stderr.write("\r\x1b[K")
                sys.stderr.flush()

    def _repaint(self) -> None:
        """Shows the time that passes, until the task has ended."""
        pause = _LONG
        while not self._ended.wait(pause):
            self._paint()
            pause = _TICK

    def _paint(self) -> None:
        with self._lock:
            seconds = time.monotonic() - self._start
            if not self._is_terminal or self._ended.is_set() or seconds < _LONG:
                return
            line = f"jpipe: {self.text} in {seconds:.0f} s" if self.text else ""
            sys.stderr.write(f"\r\x1b[K{line}")
            sys.stderr.flush()
            self._is_shown = True


# The line of the outermost task that is running.
_line: ContextVar[_Line | None] = ContextVar("line", default=None)


class Progress:
    """A line on a terminal that shows how far a task has come, if it takes long.

    A task within another one shows the time of the outer one.

    Args:
      unit: the things that are counted, such as "programs compiled".
    """

    def __init__(self, unit: str) -> None:
        self._unit = unit

    def __enter__(self) -> "Progress":
        outer = _line.get()
        self._is_outer = outer is None
        self._line = outer or _Line()
        self._text_before = self._line.text
        _line.set(self._line)
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_outer:
            _line.set(None)
            self._line.end()
        else:
            self._line.show(self._text_before)

    def show(self, done: int, total: int) -> None:
        """Shows how many are done."""
        self._line.show(f"{done} of {total} {self._unit}")


def count_items(unit: str, items: Sequence[_T]) -> Iterator[_T]:
    """Yields the items; a terminal shows how many are done."""
    with Progress(unit) as progress:
        for done, item in enumerate(items):
            progress.show(done, len(items))
            yield item


def _is_terminal() -> bool:
    """True if a person sees what is written to stderr."""
    stream = sys.stderr
    if stream is None or getattr(stream, "closed", False):  # without a console
        return False
    return stream.isatty()
