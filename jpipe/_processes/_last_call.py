"""The call after which all processes stop, once one of them is told to.

Each process asks after each step whether it shall stop. When one is told to, by a
signal at any time, each counts the calls that it has answered with no, and answers
none before it knows the counts of all. Their answers are no until call N, and then yes:

    N = max over processes of their counts + 1

A process in a step counts by the thread that reads its line, so that nobody waits for a
step of another one. While nobody is told to stop, nothing is sent.
"""

import threading
from collections.abc import Callable


class LastCall:
    """The calls of this process, and the counts of all.

    Attributes:
      is_told: True once this process was told to stop; a signal handler sets it, which
        may take no lock.
      counts: process -> the calls that it had answered when it knew of the stop.
    """

    def __init__(self, process: int, post: Callable[[int], None]) -> None:
        """A process that nobody has told to stop.

        Args:
          process: the number of this process.
          post: ``(count) -> None`` tells all others the count of this process.
        """
        self.is_told = False
        self.counts: dict[int, int] = {}
        self._process = process
        self._post = post
        self._num_calls = 0
        self._lock = threading.Lock()

    def note(self, process: int, count: int) -> None:
        """Notes the count of another process, and tells all that of this one."""
        self.counts[process] = count
        self.tell()

    def tell(self) -> None:
        """Tells all the count of this process; the first time counts."""
        with self._lock:
            if self._process not in self.counts:
                self.counts[self._process] = self._num_calls
                self._post(self._num_calls)

    def count(self) -> bool:
        """Counts a call; returns True if a process was told to stop."""
        with self._lock:
            is_stopping = self.is_told or bool(self.counts)
            if not is_stopping:
                self._num_calls += 1
        if is_stopping:
            self.tell()  # of the calls before
            self._num_calls += 1
        return is_stopping

    @property
    def is_reached(self) -> bool:
        """True in the last call, and after it, once the counts of all are known."""
        return self._num_calls > max(self.counts.values())
