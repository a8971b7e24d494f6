"""The processes of a job, and how they compare what they are about to run.

They exchange messages through the key-value store of `jax.distributed`; what programs
compute passes from process to process by `_transport`. Every wait has an end: at once
if a process has failed or left, as `_lines` tells, and else after a timeout. Its error
names the root: the process that is gone, or that awaits nobody.
"""

import functools
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax

from .. import _compat
from .._messages import raise_all
from ._digest import array_digest
from ._environment import TIMEOUT, TRANSPORT, check_transport, parse_seconds
from ._lines import (
    Departure,
    Fault,
    Lines,
    PeerError,
    PeerTimeoutError,
    list_processes,
)

_DEFAULT_TIMEOUT = 600.0
RUNS = "calls of the pipelines so far"
_LONGEST_WAIT = 1.0  # Ctrl-C does not end a longer one
_POLL_SECONDS = 0.005


class Wait(NamedTuple):
    """A wait of this process for others.

    Attributes:
      processes: the processes that it awaits.
      purpose: the text, or what gives it, that ends ``"process 0 awaited ..."``.
      begin: the time when it began, in seconds of `time.monotonic`.
      limit: the seconds that it may take.
      run: the number of the run of shared programs that it is a part of; 0: of none.
      raises: True if its thread raises by itself where it waits in vain.
    """

    processes: tuple[int, ...]
    purpose: Any
    begin: float
    limit: float
    run: int
    raises: bool


@dataclass
class Group:
    """The processes of a job.

    Attributes:
      timeout: the seconds for which one process waits for another.
      transport: the name of what moves arrays between them: see `_transport`.
      runs: the number of shared programs that this process has run, as the others have.
      lines: the lines between them.
      waits: thread -> its wait for other processes, until that ends.
    """

    timeout: float
    transport: str
    runs: int = 0
    lines: Lines = field(default_factory=lambda: Lines(0, 1, {}))
    waits: dict[int, Wait] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def process_index(self) -> int:
        """The number of this process."""
        return _compat.process_index_and_count()[0]

    @property
    def num_processes(self) -> int:
        """The number of processes."""
        return _compat.process_index_and_count()[1]

    def next_number(self) -> int:
        """A number for what all processes do next: the same in each of them."""
        return next(self._numbers)

    def publish(self, key: str, message: str) -> None:
        """Stores a message, once for each key."""
        # Process 0 has the store: if it hangs, this does not return.
        with self.waiting([0], "its store of messages"):
            _compat.coordination_client().key_value_set(f"jpipe/{key}", message)

    def remove(self, key: str) -> None:
        """Removes a message."""
        _compat.coordination_client().key_value_delete(f"jpipe/{key}")

    def receive(
        self, keys: Mapping[int, str], purpose: str, limit: float = 0.0
    ) -> list[str]:
        """Waits for a message of each of some processes.

        Args:
          keys: process -> key of its message.
          purpose: the name of what they are for, in the error.
          limit: the seconds that they may take; 0: the timeout.

        Returns:
          The messages, in the order of the keys.

        Raises:
          PeerError: at once if a process has failed, or one of them has left.
          PeerTimeoutError: with the processes that are late.
        """
        if limit == 0.0:
            limit = self.timeout
        until = time.monotonic() + limit
        messages: list[str] = []
        late: list[int] = []
        for process, key in keys.items():
            with self.waiting([process], purpose, raises=True):
                message = self._wait(process, key, until=until, purpose=purpose)
            if message is None:
                late.append(process)
            else:
                messages.append(message)
        if late:
            raise self._late_error(late, purpose, limit)
        return messages

    def _wait(
        self, process: int, key: str, *, until: float, purpose: str
    ) -> str | None:
        """Waits for a message.

        Args:
          process: the process that sends it.
          key: its key.
          until: the time until which it may come, of `time.monotonic`.
          purpose: the name of what it is for.

        Returns:
          The message; ``None`` if it does not come in time.

        Raises:
          PeerError: if a process has failed, or this one has left without it.
        """
        while True:
            # Whatever a process sends is in the store before it leaves.
            departure = self.lines.departures.get(process)
            seconds = min(max(until - time.monotonic(), 0.001), _LONGEST_WAIT)
            try:
                return _compat.coordination_client().blocking_key_value_get(
                    f"jpipe/{key}", int(1000 * seconds) + 1
                )
            except jax.errors.JaxRuntimeError as error:
                if self.lines.fault is None and "DEADLINE_EXCEEDED" not in str(error):
                    raise
            fault = self.lines.fault
            if fault is None and departure is not None:
                fault = _early_end(process, departure)
            if fault is not None:
                raise PeerError(
                    f"process {self.process_index} awaited process {process} for "
                    f"{purpose}; {fault}",
                    fault,
                )
            if time.monotonic() >= until:
                return None

    @contextmanager
    def waiting(
        self,
        processes: Sequence[int],
        purpose: Any,
        *,
        limit: float = 0.0,
        run: int = 0,
        raises: bool = False,
    ) -> Iterator[None]:
        """The scope in which this thread waits for others: see `Wait`."""
        thread = threading.get_ident()
        self.waits[thread] = Wait(
            tuple(processes),
            purpose,
            begin=time.monotonic(),
            limit=limit or self.timeout,
            run=run,
            raises=raises,
        )
        try:
            yield
        finally:
            del self.waits[thread]

    def find_hang(self, processes: Sequence[int], seconds: float) -> Fault:
        """The fault of those for which some processes wait, after so many seconds."""
        roots = self.lines.find_roots(processes)
        return Fault(
            roots,
            f"awaited nobody and sent nothing for {seconds:g} s: it hangs, or is slow; "
            f"where that is no fault, type jpipe.distributed(timeout=...)",
        )

    def find_early_end(self, wait: Wait) -> Fault | None:
        """The fault of a process that has left before a run; ``None`` if none has."""
        for process in wait.processes:
            departure = self.lines.departures.get(process)
            if departure is not None and wait.run > departure.runs:
                return _early_end(process, departure, f", and this is {wait.run}")
        return None

    def post(self, key: str, facts: Mapping[str, Any]) -> None:
        """Publishes facts of this process, and the number of programs it has run."""
        message = json.dumps({RUNS: str(self.runs), **facts})
        self.publish(f"{key}/{self.process_index}", message)

    def collect(self, key: str, purpose: str, limit: float = 0.0) -> list[Any]:
        """Waits for the facts that each process posts: see `receive`."""
        keys = {process: f"{key}/{process}" for process in range(self.num_processes)}
        return [*map(json.loads, self.receive(keys, purpose, limit))]

    def gather(
        self, facts: Mapping[str, Any], purpose: str, limit: float = 0.0
    ) -> list[Any]:
        """Exchanges facts; all processes call this: see `receive`."""
        key = f"{purpose}/{self.next_number()}"
        self.post(key, facts)
        return self.collect(key, purpose, limit)

    def agree(self, facts: Mapping[str, str], purpose: str) -> None:
        """Checks that all processes have the same facts.

        Args:
          facts: name -> text that must be the same in all.
          purpose: the name of what they are about to do.

        Raises:
          ValueError: with each fact that differs, and between whom.
          TimeoutError: with the processes that are late.
        """
        raise_differences(find_differences(self.gather(facts, purpose)), purpose)

    def leave(self, end: str, fault: Fault | None = None) -> None:
        """Tells all that this process runs nothing more: see `_lines.Departure`."""
        self.lines.leave(Departure(self.runs, end, fault))

    def wait_until(self, find_late: Callable[[], list[int]], purpose: str) -> None:
        """Waits until no process is late.

        Args:
          find_late: the processes that are awaited still.
          purpose: the name of what they are awaited for.

        Raises:
          PeerError: if a process has failed.
          PeerTimeoutError: with the processes that are late.
        """
        until = time.monotonic() + self.timeout
        with self.waiting(find_late(), purpose, raises=True):
            while (late := find_late()) or self.lines.fault:
                if fault := self.lines.fault:
                    raise PeerError(
                        f"process {self.process_index} awaited {purpose}; {fault}",
                        fault,
                    )
                if time.monotonic() >= until:
                    raise self._late_error(late, purpose, self.timeout)
                time.sleep(_POLL_SECONDS)

    def _late_error(
        self, late: Sequence[int], purpose: str, seconds: float
    ) -> PeerTimeoutError:
        """The error for processes that did not come in so many seconds."""
        fault = self.find_hang(late, seconds)
        return PeerTimeoutError(
            f"{list_processes(late)} of {self.num_processes} did not come to "
            f"{purpose} within {seconds:g} s; process {self.process_index} waited; "
            f"{fault}. All run the same calls of the pipeline in the same order, or "
            f"one has failed",
            fault,
        )

    def wait_for_end(self) -> None:
        """Waits until all have left, and checks that they ran as many programs.

        Raises:
          PeerError: if a process has failed.
          PeerTimeoutError: with the processes that are late.
          ValueError: with how many each ran, if that differs.
        """
        departures = self.lines.departures
        peers = sorted(self.lines.peers)
        self.wait_until(
            lambda: [process for process in peers if process not in departures],
            "the end of the program",
        )
        runs = {process: departures[process].runs for process in peers}
        runs[self.process_index] = self.runs
        facts = [{RUNS: str(runs[process])} for process in sorted(runs)]
        if differences := find_differences(facts):
            raise ValueError(
                f"what came after the first of these calls was wrong: {differences[0]}"
            )


def _early_end(process: int, departure: Departure, end: str = "") -> Fault:
    """The fault of a process that came to its end and is awaited still."""
    return Fault(
        (process,),
        f"{departure.end} after {departure.runs} calls of the pipelines{end}",
    )


def raise_differences(
    differences: Sequence[str], purpose: str, *, consequence: str = "nothing was sent"
) -> None:
    """Raises if there are differences, in all processes, which know the same ones.

    Args:
      differences: a sentence for each.
      purpose: the name of what differs.
      consequence: the end of the sentence that begins with the purpose.

    Raises:
      ValueError: with all of them.
    """
    raise_all(
        f"the processes do not run the same program: {purpose} differs, and "
        f"{consequence}",
        differences,
    )


def find_differences(facts_by_process: Sequence[Mapping[str, str]]) -> list[str]:
    """A sentence for each fact that is not the same in all processes."""
    differences = []
    for name in dict.fromkeys(name for facts in facts_by_process for name in facts):
        processes: dict[str, list[int]] = {}  # value -> the processes that have it
        for process, facts in enumerate(facts_by_process):
            processes.setdefault(facts.get(name, "nothing"), []).append(process)
        if len(processes) > 1:
            values = (
                f"{list_processes(who)}: {value}" for value, who in processes.items()
            )
            differences.append(f"{name}: {'; '.join(values)}")
    return differences


@functools.cache
def group() -> Group:
    """The processes of this job."""
    return Group(
        parse_seconds(TIMEOUT, os.environ.get(TIMEOUT, _DEFAULT_TIMEOUT)),
        check_transport(TRANSPORT, os.environ.get(TRANSPORT, "")),
    )


def agree_on_keys(keys: Any) -> None:
    """Checks that all processes have the same keys: each makes its own layers.

    Args:
      keys: a pytree of keys.
    """
    digests = map(array_digest, jax.tree.leaves(keys))
    group().agree({"key": " ".join(digests)}, "init")
