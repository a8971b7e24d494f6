"""Lines between the processes of a job: who has left, and who awaits whom.

Process 0 has a TCP connection, a *line*, to each other process, and passes on what
comes over it:

    1 ──┐
    2 ──┼── 0      "2 awaits 1"      "1 left after 6 calls"      "3 was killed"
    3 ──┘

The kernel closes the line of a process that is killed, and a host that is gone answers
no keepalive, so that a death is known at once, whatever the others wait for. A process
that is stopped sends no beats. One that hangs in its own code awaits nobody: of an
awaited process that awaits others, the *roots* of the wait are asked for:

    roots(p) = {p}                                     if p awaits nobody
               the roots of all q that p awaits        else
"""

import contextlib
import json
import os
import selectors
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ._last_call import LastCall

KILLED = "is gone: it was killed, or its host or network failed"
# Seconds without an answer, and between questions, and how many remain unanswered
# before a host counts as gone.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
_SECONDS_BETWEEN_BEATS = 2.0
_SEND_SECONDS = 1.0  # a process that is stopped reads nothing
_LONGEST_MESSAGE = 1 << 16  # bytes
_READ_BYTES = 1 << 14


class Fault(NamedTuple):
    """The reason why a job ends.

    Attributes:
      processes: the processes that are the root of it.
      why: the end of a sentence that begins with them.
    """

    processes: tuple[int, ...]
    why: str

    def __str__(self) -> str:
        return f"{list_processes(self.processes)} {self.why}"


class Departure(NamedTuple):
    """The end of a process.

    Attributes:
      runs: the number of shared programs that it had run.
      end: the end of a sentence that begins with it, such as ``"came to its end"``.
      fault: the fault for which it ended; ``None`` if its program came to its end.
    """

    runs: int
    end: str
    fault: Fault | None


class PeerError(RuntimeError):
    """An error of this process for which another one is the root.

    Attributes:
      fault: the reason, which the other processes print too.
    """

    def __init__(self, message: str, fault: Fault) -> None:
        super().__init__(message)
        self.fault = fault


class PeerTimeoutError(PeerError, TimeoutError):
    """Another process did not come in time."""


class Lines:
    """The lines of this process.

    Attributes:
      process: the number of this process.
      peers: the other processes.
      departures: process -> its departure, in the order in which they are known.
      gone: the processes whose lines have ended.
      changed: an event that is set when a process departs or is gone.
      last_call: the call of `jpipe.preempted` after which all stop.
    """

    def __init__(
        self, process: int, num_processes: int, sockets: Mapping[int, socket.socket]
    ) -> None:
        """Starts to read.

        Args:
          process: the number of this process.
          num_processes: the number of all.
          sockets: process -> the line to it: to all others in process 0, to process 0
            alone in others; empty where there is one process.
        """
        self.process = process
        self.peers = {*range(num_processes)} - {process}
        self.departures: dict[int, Departure] = {}
        self.gone: set[int] = set()
        self.changed = threading.Event()
        self.last_call = LastCall(process, lambda count: self._post({"stops": count}))
        self._sockets = dict(sockets)
        self._waits: dict[int, tuple[int, ...]] = {}  # process -> those that it awaits
        self._posted_wait: tuple[int, ...] = ()
        self._has_left = False
        self._last_beat = time.monotonic()
        # process -> the time when something came over its line
        self._last_heard = dict.fromkeys(sockets, self._last_beat)
        self._lock = threading.Lock()
        if not sockets:
            return
        for line in sockets.values():
            _configure(line)
        # Processes that are forked, such as workers that load data, would keep the
        # lines open.
        os.register_at_fork(after_in_child=self._close)
        threading.Thread(target=self._read, name="jpipe-lines", daemon=True).start()

    @property
    def is_first(self) -> bool:
        """True in process 0, which passes on."""
        return self.process == 0

    @property
    def is_first_silent(self) -> bool:
        """True if process 0, which passes on, has sent no sign of life for a while."""
        last_heard = self._last_heard.get(0)
        silence = 3 * _SECONDS_BETWEEN_BEATS
        return last_heard is not None and time.monotonic() - last_heard > silence

    @property
    def fault(self) -> Fault | None:
        """The first fault for which a process has departed."""
        departures = list(self.departures.values())
        return next((entry.fault for entry in departures if entry.fault), None)

    def leave(self, departure: Departure) -> None:
        """Tells all that this process runs nothing more; the first time counts."""
        with self._lock:
            if self._has_left:
                return
            self._has_left = True
        self._post(
            {"runs": departure.runs, "end": departure.end, "fault": departure.fault}
        )

    def post_wait(self, processes: Sequence[int]) -> None:
        """Tells all which processes this one awaits: some, if it has waited long."""
        if (awaited := tuple(processes)) != self._posted_wait:
            self._posted_wait = awaited
            self._post({"awaits": awaited})

    def beat(self, timeout: float) -> None:
        """Sends a sign of life, and departs those that have sent none for too long.

        Args:
          timeout: the seconds for which a process may send nothing.
        """
        now = time.monotonic()
        seconds = now - self._last_beat
        if seconds < min(_SECONDS_BETWEEN_BEATS, timeout / 4):
            return
        self._last_beat = now
        self._post({"beats": True})
        if seconds > timeout / 2:  # this process was stopped, and has not read since
            self._last_heard = dict.fromkeys(self._sockets, now)
        for process, last_heard in [*self._last_heard.items()]:
            if now - last_heard > timeout and process not in self.departures:
                why = f"sent nothing for {timeout:g} s: it, its host or network hangs"
                self._depart(process, why)

    def find_roots(self, processes: Iterable[int]) -> tuple[int, ...]:
        """The processes for which all of them wait that are awaited.

        Args:
          processes: the processes that this one awaits.

        Returns:
          The roots; all that wait for each other, if nobody else is awaited.
        """
        if self.is_first_silent:  # it passes on who awaits whom
            return (0,)
        reached: set[int] = set()
        pending = list(processes)
        while pending:
            process = pending.pop()
            if process not in reached and process != self.process:
                reached.add(process)
                pending += self._waits.get(process, ())
        roots = {process for process in reached if not self._waits.get(process)}
        return tuple(sorted(roots or reached))

    def _post(self, message: dict[str, Any]) -> None:
        message["process"] = self.process
        self._send(message, self._sockets)

    def _send(self, message: dict[str, Any], processes: Iterable[int]) -> None:
        """Sends a message; a line that takes none gets no other one."""
        line_of_text = json.dumps(message).encode() + b"\n"
        with self._lock:
            for process in list(processes):
                line = self._sockets.get(process)
                if line is None or process in self.gone:
                    continue
                try:
                    line.sendall(line_of_text)
                except OSError:  # its end is read
                    with contextlib.suppress(OSError):
                        line.shutdown(socket.SHUT_WR)

    def _read(self) -> None:
        """Reads all lines until they end."""
        with selectors.DefaultSelector() as selector:
            for process, line in self._sockets.items():
                selector.register(line, selectors.EVENT_READ, (process, bytearray()))
            while selector.get_map():
                for key, _ in selector.select():
                    process, received = key.data
                    if not self._read_line(process, key.fileobj, received):
                        selector.unregister(key.fileobj)
                        self._mark_gone(process)

    def _read_line(self, process: int, line: Any, received: bytearray) -> bool:
        """Reads what has come over a line.

        Args:
          process: the process at its other end.
          line: the socket.
          received: the bytes before, of a message that is not complete.

        Returns:
          False if the line has ended.
        """
        try:
            content = line.recv(_READ_BYTES)
        except OSError:
            return False
        received += content
        self._last_heard[process] = time.monotonic()
        while (end := received.find(b"\n")) >= 0:
            try:
                message = json.loads(received[:end])
            except ValueError:  # something else came over it
                return False
            del received[: end + 1]
            if self.is_first:
                message["process"] = process
            self._apply(message)
        return bool(content) and len(received) < _LONGEST_MESSAGE

    def _apply(self, message: dict[str, Any]) -> None:
        """Notes a message, which process 0 passes on."""
        process = message["process"]
        if "beats" in message:
            return
        if "awaits" in message:
            self._waits[process] = tuple(message["awaits"])
        elif "runs" in message:
            fault = message["fault"]
            if fault is not None:
                fault = Fault(tuple(fault[0]), fault[1])
            departure = Departure(message["runs"], message["end"], fault)
            self.departures.setdefault(process, departure)
        elif "stops" in message:
            self.last_call.note(process, message["stops"])
        elif "gone" in message:
            self.gone.add(process)
        if self.is_first:
            self._send(message, self.peers - {process})
        self.changed.set()

    def _depart(self, process: int, why: str) -> None:
        """Notes the end of a process that did not tell it."""
        fault = Fault((process,), why)
        left = {"runs": 0, "end": why, "fault": fault}
        self._apply({**left, "process": process})

    def _mark_gone(self, process: int) -> None:
        """Notes that a line has ended."""
        if process not in self.departures:
            self._depart(process, KILLED)
        self._apply({"gone": True, "process": process})

    def _close(self) -> None:
        for line in self._sockets.values():
            line.close()


def list_processes(processes: Sequence[int]) -> str:
    """``"process 1"`` or ``"processes 1, 2"``."""
    numbers = ", ".join(map(str, processes))
    return f"processes {numbers}" if len(processes) > 1 else f"process {numbers}"


def _configure(line: socket.socket) -> None:
    """Sets the options of a line."""
    line.settimeout(_SEND_SECONDS)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
