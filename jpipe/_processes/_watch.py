"""A watch over what this process awaits from others, which ends it if that never comes.

The arrays of a process that was killed, or stopped, never come, and JAX would wait for
them for ever or fail without a reason. One thread waits for all that is on its way, in
order. It sleeps until arrays come, since each look would interrupt the stages that
compute on the same core. Another one looks from time to time, and whenever a process
departs, whether this one waits for something that never comes:

    arrivals:  ... | waits for arrays of 1B2 | waits for 1B3 ................
    overseer:      .                         .         .         | late: why?

A job has lost a process for good when that has failed: then this one ends, whether it
waits for it or not.
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

from ._environment import FAILED
from ._group import Wait, group
from ._lines import KILLED, Fault

# Seconds between two looks of the overseer; what comes sooner is not late.
_SECONDS_BETWEEN_LOOKS = 1.0
# Seconds that the program has to end by itself before it is ended, and that process 0,
# without which JAX ends the others, gives them to end before.
_GRACE = 5.0
# Seconds in which the line of a process that was killed ends, after its arrays failed.
_SECONDS_TO_EXPLAIN = 2.0
# Looks for which JAX may wait at the end for a process that is gone.
_LAST_LOOKS = 3


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
    """Threads that wait for arrays, and end the process if it waits in vain.

    Attributes:
      add: ``(Awaited) -> None``, called when arrays are on their way.
    """

    def __init__(self) -> None:
        self._awaited: queue.SimpleQueue[Awaited | None] = queue.SimpleQueue()
        self.add = self._awaited.put
        # The crossing whose arrays failed, and the first line of the error.
        self._failure: tuple[Any, str] | None = None
        self._has_finished = False
        self._is_dismissed = False
        self._may_explain = threading.Lock()
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
        self._has_finished = True

    def dismiss(self) -> None:
        """Leaves the end of this process to the main thread."""
        self._is_dismissed = True

    def _await_arrivals(self) -> None:
        """Waits for all arrays in order, until one fails or the program ends."""
        while awaited := self._awaited.get():
            crossing = awaited.crossing
            source = crossing.source.process_index
            with group().waiting([source], crossing, run=awaited.run):
                error = _await(awaited.arrays)
            # The next wait may be long: these arrays shall not live until it ends.
            del awaited
            if error:
                self._failure = (crossing, error)
                group().lines.changed.set()
                return

    def _oversee(self) -> None:
        """Ends the process if it waits in vain, or another one has failed."""
        lines = group().lines
        num_last_looks = 0
        while True:
            lines.changed.wait(_SECONDS_BETWEEN_LOOKS)
            lines.changed.clear()
            lines.beat(group().timeout)
            if self._is_dismissed:
                continue
            if not self._has_finished:
                if end := self._find_fault():
                    self._end(*end)
            # All have come to their end, and JAX waits for one that was killed since.
            elif lines.gone and jax.distributed.is_initialized():
                num_last_looks += 1
                if num_last_looks > _LAST_LOOKS:
                    killed = Fault(tuple(sorted(lines.gone)), KILLED)
                    self._end(killed, "the end of JAX")

    def _find_fault(self) -> tuple[Fault, Any] | None:
        """The fault for which this process ends, and what it awaited, if it does."""
        lines = group().lines
        if lines.last_call.is_told:
            lines.last_call.tell()
        waits = sorted([*group().waits.values()], key=lambda wait: wait.begin)
        now = time.monotonic()
        late = [wait for wait in waits if now - wait.begin > _SECONDS_BETWEEN_LOOKS]
        lines.post_wait(late[0].processes if late else ())
        if self._failure is not None:
            crossing, error = self._failure
            return _find_root(crossing, error), crossing
        if lines.fault is not None:
            return lines.fault, None
        for wait in waits:
            if fault := group().find_early_end(wait) or _lateness(wait, now):
                return fault, wait.purpose
        return None

    def _end(self, fault: Fault, purpose: Any) -> None:
        """Ends the process, which may be waiting for ever.

        Args:
          fault: the reason.
          purpose: the text, or what gives it, of what was awaited, or ``None``.
        """
        lines = group().lines
        group().leave("has failed", fault)
        if any(wait.raises for wait in [*group().waits.values()]):
            time.sleep(_GRACE)
        if self._is_dismissed:
            return
        self.explain(fault, purpose)
        # What fails in another process fails here too, and has a traceback; without
        # process 0 JAX aborts this one.
        if (self._failure or lines.fault) and 0 not in lines.gone:
            time.sleep(_GRACE)
        if self._is_dismissed:
            return
        give_farewell(fault)
        os._exit(FAILED)

    def explain(self, fault: Fault, purpose: Any = None) -> None:
        """Prints why this process ends, unless it has been printed.

        Args:
          fault: the reason.
          purpose: the text, or what gives it, of what it awaited; default: that of
            its longest wait, or of the arrays that failed.
        """
        if purpose is None and self._failure is not None:
            purpose, _ = self._failure
        waits = sorted([*group().waits.values()], key=lambda wait: wait.begin)
        if purpose is None and waits:
            purpose = waits[0].purpose
        action = "ends" if purpose is None else f"awaited {purpose}"
        self.print_once(f"process {group().lines.process} {action}; {fault}")

    def print_once(self, text: str) -> None:
        """Prints why this process ends, unless it has been printed."""
        if self._may_explain.acquire(blocking=False):
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(f"\njpipe: {text}\n")  # after half of a traceback
                sys.stderr.flush()


def _find_root(crossing: Any, error: str) -> Fault:
    """The fault for which arrays failed: of their sender, if nobody knows better."""
    source = crossing.source.process_index
    return await_fault() or Fault((source,), f"has failed or was ended ({error})")


def await_fault() -> Fault | None:
    """The fault of another process for which arrays failed here, if there is one.

    The line of a process that was killed may end later than its arrays.
    """
    lines = group().lines
    until = time.monotonic() + _SECONDS_TO_EXPLAIN
    while lines.fault is None and time.monotonic() < until:
        time.sleep(_SECONDS_BETWEEN_LOOKS / 20)
    if lines.fault is None and lines.is_first_silent:
        return group().find_hang([0], group().timeout)
    return lines.fault


def give_farewell(fault: Fault) -> None:
    """Lets the other processes end before process 0, without which JAX ends them.

    Args:
      fault: the fault for which they end; its roots may hang.
    """
    lines = group().lines
    until = time.monotonic() + 2 * _GRACE
    ending = lines.peers - {*fault.processes}
    while lines.is_first and not ending <= lines.gone and time.monotonic() < until:
        time.sleep(_SECONDS_BETWEEN_LOOKS / 20)


def _await(arrays: Sequence[Any]) -> str:
    """Waits for arrays; returns why they do not come, or nothing if they came."""
    try:
        jax.block_until_ready(arrays)
    except RuntimeError as error:
        # Nobody awaits what the user has deleted.
        if not any(array.is_deleted() for array in arrays):
            return str(error).splitlines()[0]
    return ""


def _lateness(wait: Wait, now: float) -> Fault | None:
    """The fault for which a wait takes too long, if it does."""
    if wait.raises or now - wait.begin <= wait.limit:
        return None
    return group().find_hang(wait.processes, wait.limit)


@functools.cache
def watch() -> Watch:
    """The watch of this process."""
    return Watch()
