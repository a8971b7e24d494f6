"""A watch over the arrays that this process awaits from others.

The arrays of a process that was killed, or stopped, never come, and JAX would wait for
them for ever or fail without a reason. One thread waits for all that is on its way, in
order. It sleeps until arrays come, since each look would interrupt the stages that
compute on the same core. Another one looks from time to time whether it waits for too
long:

    arrivals:  ... | waits for arrays of 1B2 | waits for 1B3 ................
    overseer:      .                         .         .         | late: why?
"""

import contextlib
import functools
import os
import queue
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from ._group import RUNS, group

FAILED = 70  # the exit status of a process that found a fault of another
# Seconds between two looks of the overseer; arrays that come sooner are not late.
_SECONDS_BETWEEN_LOOKS = 1.0
# Seconds that the program has to end by itself before it is ended.
_GRACE = 5.0


class Awaited(NamedTuple):
    """Arrays on their way.

    Attributes:
      arrays: the arrays.
      crossing: the `Crossing` by which they come.
      run: the number of their run.
    """

    arrays: Sequence[Any]
    crossing: Any
    run: int


class _Wait(NamedTuple):
    """A wait that has not ended.

    Attributes:
      awaited: the arrays that are awaited.
      begin: the time when it began, in seconds of `time.monotonic`.
    """

    awaited: Awaited
    begin: float


class Watch:
    """Threads that wait for arrays, and end the process if they do not come.

    Attributes:
      add: ``(Awaited) -> None``, called when arrays are on their way.
    """

    def __init__(self) -> None:
        self._awaited: queue.SimpleQueue[Awaited | None] = queue.SimpleQueue()
        self.add = self._awaited.put
        self._wait: _Wait | None = None
        self._fault = ""
        self._has_finished = threading.Event()
        self._arrivals = threading.Thread(
            target=self._await_arrivals, name="jpipe-arrivals", daemon=True
        )
        self._overseer = threading.Thread(
            target=self._oversee, name="jpipe-overseer", daemon=True
        )
        self._arrivals.start()
        self._overseer.start()

    def finish(self) -> None:
        """Waits until nothing is on its way, for a program that ends.

        Python ends a daemon thread where it comes back from C++, before 3.14, which
        aborts the process: https://github.com/python/cpython/issues/87135
        """
        self._awaited.put(None)
        self._arrivals.join()
        self._overseer.join()

    def _await_arrivals(self) -> None:
        """Waits for all arrays in order, until one fails or the program ends."""
        while awaited := self._awaited.get():
            self._wait = _Wait(awaited, time.monotonic())
            self._fault = _await(awaited)
            # The next wait may be long: these arrays shall not live until it ends.
            self._wait = None
            del awaited
            if self._fault:
                break
        self._has_finished.set()

    def _oversee(self) -> None:
        """Ends the process if arrays are late, or failed."""
        while not self._has_finished.wait(_SECONDS_BETWEEN_LOOKS):
            wait = self._wait
            if wait and (fault := _lateness(wait)):
                _end(fault)
                return
            del wait  # so that its arrays do not live until the next look
        if self._fault:
            _end(self._fault)


def _end(why: str) -> None:
    """Prints why, and ends the process, which may be waiting for ever."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"\njpipe: {why}\n")  # after the half of a traceback
        sys.stderr.flush()
    time.sleep(_GRACE)
    os._exit(FAILED)


def _await(awaited: Awaited) -> str:
    """Waits for arrays; returns why they do not come, or nothing if they came."""
    try:
        jax.block_until_ready(awaited.arrays)
    except RuntimeError as error:
        # Nobody awaits what the user has deleted.
        if not any(array.is_deleted() for array in awaited.arrays):
            failed = f"it has failed or was ended ({str(error).splitlines()[0]})"
            return f"{awaited.crossing}; {_departure(awaited) or failed}"
    return ""


def _lateness(wait: _Wait) -> str:
    """The reason why arrays are late; nothing if they may still come."""
    seconds = time.monotonic() - wait.begin
    if seconds < _SECONDS_BETWEEN_LOOKS:
        return ""
    if why := _departure(wait.awaited):
        return f"{wait.awaited.crossing}; {why}"
    limit = group().timeout
    if seconds > limit:
        return (
            f"{wait.awaited.crossing}: nothing came for {limit:g} s; where that is no "
            f"fault, type jpipe.distributed(timeout=...)"
        )
    return ""


def _departure(awaited: Awaited) -> str:
    """The reason why arrays will not come, if their sender has left; else nothing."""
    left = group().departure(awaited.crossing.source.process_index)
    if left is None:
        return ""
    if left["why"]:
        return f"it has failed: {left['why']}"
    if awaited.run > int(left[RUNS]):
        return (
            f"it came to its end after {left[RUNS]} calls of the pipelines, and this "
            f"is number {awaited.run}"
        )
    return ""


@functools.cache
def watch() -> Watch:
    """The watch of this process."""
    return Watch()
