"""Ctrl-C, or another signal, while a program overwrites its arguments."""

import signal
import threading
from typing import Any

# Signals whose handlers often raise: Ctrl-C, the end of a job, a time limit. To look up
# a handler takes some microseconds of each step, so there are no more.
_NAMES = ("SIGINT", "SIGTERM", "SIGALRM")
_SIGNALS = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]


class Interrupts:
    """A scope in which signals wait, from `hold` on, until the end.

    Half of a state that is overwritten is of no use. Only the main thread is ever
    interrupted.
    """

    def __init__(self) -> None:
        self._waiting: list[int] = []
        # signal -> its handler before `hold`
        self._handlers: dict[int, Any] = {}

    def hold(self) -> None:
        """Lets signals wait from here on."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            if callable(handler := signal.getsignal(number)):
                self._handlers[number] = handler
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
        """Calls the handlers of all signals that wait, even if one of them raises."""
        if self._waiting:
            number = self._waiting.pop(0)
            try:
                # Without the interrupted frame, which holds the batch.
                self._handlers[number](number, None)
            finally:
                self._deliver()

    def _end(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
