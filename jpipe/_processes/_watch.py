"""A watch over the arrays that this process awaits from others.

The arrays of a process that was killed, or stopped, never come, and JAX would wait for
them for ever or fail without a reason. A thread waits for all that is on its way, in
order, and for no longer than the timeout.
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

from .. import _compat
from ._group import RUNS, group

FAILED = 70  # the exit status of a process that found a fault of another
# Seconds between two looks whether arrays are there, and whether their sender has left.
_SECONDS_TO_ARRIVE = 0.01
_SECONDS_TO_LEAVE = 1.0
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


class Watch:
    """A thread that waits for arrays, and ends the process if they do not come.

    Attributes:
      add: ``(Awaited) -> None``, called when arrays are on their way.
    """

    def __init__(self) -> None:
        self._awaited: queue.SimpleQueue[Awaited | None] = queue.SimpleQueue()
        self.add = self._awaited.put
        self._thread = threading.Thread(
            target=self._work, name="jpipe-watch", daemon=True
        )
        self._thread.start()

    def finish(self) -> None:
        """Waits until nothing is on its way, for a program that ends.

        Python ends a daemon thread where it comes back from C++, before 3.14, which
        aborts the process: https://github.com/python/cpython/issues/87135
        """
        self._awaited.put(None)
        self._thread.join()

    def _work(self) -> None:
        while awaited := self._awaited.get():
            if why := _wait(awaited):
                _end(f"{awaited.crossing}{why}")
                return
            del awaited  # and with it the arrays


def _end(why: str) -> None:
    """Prints why, and ends the process, which may be waiting for ever."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"\njpipe: {why}\n")  # after the half of a traceback
        sys.stderr.flush()
    time.sleep(_GRACE)
    os._exit(FAILED)


def _wait(awaited: Awaited) -> str:
    """Waits for arrays; returns why they do not come, or nothing if they came."""
    begin = time.monotonic()
    next_look = begin + _SECONDS_TO_LEAVE
    limit = group().timeout
    try:
        while not all(map(_compat.is_ready, awaited.arrays)):
            time.sleep(_SECONDS_TO_ARRIVE)
            now = time.monotonic()
            if now < next_look:
                continue
            if why := _departure(awaited):
                return f"; {why}"
            if now - begin > limit:
                return (
                    f": nothing came for {limit:g} s; where that is no fault, type "
                    f"jpipe.distributed(timeout=...)"
                )
            next_look = now + _SECONDS_TO_LEAVE
        jax.block_until_ready(awaited.arrays)
    except RuntimeError as error:
        # Nobody awaits what the user has deleted.
        if not any(array.is_deleted() for array in awaited.arrays):
            failed = f"it has failed or was ended ({str(error).splitlines()[0]})"
            return f"; {_departure(awaited) or failed}"
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
