"""Ctrl-C while a program overwrites what it was given."""

import signal
import threading
from types import TracebackType
from typing import Any


class Interrupts:
    """A scope in which Ctrl-C waits, from `hold` on, until the end.

    Half of a state that is overwritten is of no use. Only the main thread is ever
    interrupted.

    Attributes:
      waiting: whether one came.
    """

    def __init__(self) -> None:
        self.waiting = False
        self._before: Any = None

    def hold(self) -> None:
        """From here on interrupts wait."""
        handler = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and callable(handler):
            self._before = handler
            signal.signal(signal.SIGINT, self._note)

    def _note(self, number: int, frame: Any) -> None:
        self.waiting = True

    def __enter__(self) -> "Interrupts":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            if self.waiting:
                self._before(signal.SIGINT, None)
