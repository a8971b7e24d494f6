"""Ctrl-C, or another signal, while a program overwrites what it was given."""

import signal
import threading
from typing import Any

# Those whose handlers often raise: Ctrl-C, what ends a job, a time limit, if there is.
# To ask for a handler takes some microseconds of each step, so these are all.
_NAMES = ("SIGINT", "SIGTERM", "SIGALRM")
_SIGNALS = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]


class Interrupts:
    """A scope in which signals wait, from `hold` on, until the end.

    Half of a state that is overwritten is of no use. Only the main thread is ever
    interrupted.
    """

    def __init__(self) -> None:
        self._waiting: list[int] = []
        self._before: dict[int, Any] = {}

    def hold(self) -> None:
        """From here on signals wait."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            if callable(handler := signal.getsignal(number)):
                self._before[number] = handler
                signal.signal(number, self._note)

    def _note(self, number: int, frame: Any) -> None:
        self._waiting.append(number)

    def __enter__(self) -> "Interrupts":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._end()
        except BaseException:  # another signal, whose handler is there again
            self._end()
            raise
        finally:
            self._deliver()

    def _deliver(self) -> None:
        """Calls the handlers of what came; each, even if one before it raises."""
        if self._waiting:
            number = self._waiting.pop(0)
            try:
                # The frame that it interrupted holds the batch.
                self._before[number](number, None)
            finally:
                self._deliver()

    def _end(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
