"""What this process awaits from others, watched: nothing is awaited for ever.

What comes from another process that was killed, or stopped, never comes, and JAX would
wait for it without an end or fail without saying for what. A thread waits for all that
is on its way, in order; another looks how long that takes.
"""

import _thread
import contextlib
import functools
import os
import queue
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from ._group import group

# So long something is awaited, in seconds, before it is asked whether who sends it
# has left.
_SOON = 1.0
# So long the program has to end by itself before it is ended.
_GRACE = 5.0
_LOOKS = 0.2
_STATUS = 70


@dataclass
class Awaited:
    """Arrays on their way.

    Attributes:
      arrays: they.
      label: what makes them.
      source: a device of the process that sends them.
      target: a device of this one.
      run: the number of the run that they belong to.
    """

    arrays: Sequence[Any]
    label: str
    source: Any
    target: Any
    run: int

    def __str__(self) -> str:
        return (
            f"process {self.target.process_index} awaited {self.label} for "
            f"{self.target}, which process {self.source.process_index} sends from "
            f"{self.source}"
        )


class Watch:
    """Waits for what is on its way, and ends the process if it does not come."""

    def __init__(self) -> None:
        self._awaited: queue.SimpleQueue[Awaited | None] = queue.SimpleQueue()
        self._now: Awaited | None = None
        self._since = 0.0
        self.said = threading.Event()
        self._saying = threading.Lock()
        self.add = self._awaited.put
        self._waiting, looking = (
            threading.Thread(target=work, name="jpipe-watch", daemon=True)
            for work in (self._wait, self._look)
        )
        self._waiting.start()
        looking.start()

    def finish(self) -> None:
        """Waits until nothing is on its way, for a program that ends.

        Python ends a daemon thread where it comes back from C++, before 3.14, which
        aborts the process: https://github.com/python/cpython/issues/87135
        """
        self._awaited.put(None)
        self._waiting.join()

    def _wait(self) -> None:
        while awaited := self._awaited.get():
            self._since, self._now = time.monotonic(), awaited
            try:
                jax.block_until_ready(awaited.arrays)
            except RuntimeError as error:
                # What the user has deleted is awaited by nobody.
                if not any(array.is_deleted() for array in awaited.arrays):
                    says = str(error).splitlines()[0]
                    why = f"it has failed or was ended ({says})"
                    self._end(f"{awaited}; {_has_left(awaited) or why}")
            self._now = awaited = None  # and with it the arrays

    def _look(self) -> None:
        while True:
            time.sleep(_LOOKS)
            awaited, limit = self._now, group().timeout
            took = time.monotonic() - self._since
            if awaited is None or took < _SOON:
                continue
            if why := _has_left(awaited):
                self._end(f"{awaited}; {why}")
            if took > limit and awaited is self._now:
                self._end(
                    f"{awaited}: nothing came for {limit:g} s; where that is no fault, "
                    f"type jpipe.distributed(timeout=...)"
                )
            time.sleep(_SOON)

    def _end(self, why: str) -> None:
        """Says why, and ends the process, which may be waiting for ever.

        Unless it is not to end so: then its program is interrupted.
        """
        with self._saying, contextlib.suppress(OSError, ValueError):
            if self.said.is_set():
                return
            self.said.set()
            sys.stderr.write(f"\njpipe: {why}\n")  # a traceback may be half told
            sys.stderr.flush()
        if not group().hard_exit:
            _thread.interrupt_main()
            return
        time.sleep(_GRACE)
        os._exit(_STATUS)


def _has_left(awaited: Awaited) -> str:
    """Why something will not come, as who sends it has said."""
    said = group().left(awaited.source.process_index)
    if said is None:
        return ""
    if said["why"]:
        return f"it has failed: {said['why']}"
    if awaited.run > said["runs"]:
        return (
            f"it came to its end after {said['runs']} calls of the pipelines, and this "
            f"is number {awaited.run}"
        )
    return ""


@functools.cache
def watch() -> Watch:
    """That of this process."""
    return Watch()


def finish() -> None:
    """Waits until nothing is on its way to this process."""
    if watch.cache_info().currsize:  # no thread can be started at the end
        watch().finish()
