"""The start of a job: its processes come to the first one, before JAX starts.

JAX waits for all processes in one call, which ends in an abort that names nobody. So
they meet before, at the port that JAX uses afterwards:

    process 0: listens ─── takes 1 ─── takes 2 ─── tells all ─── closes the port ─── JAX
    process 1: tries ... is taken ................ is told ......................... JAX

A process that ends in the meantime closes its connection, which is the line of
`_lines.Lines` later, and all others end with its number.
"""

import contextlib
import errno
import ipaddress
import json
import selectors
import socket
import time
from collections.abc import Iterator
from typing import Any

from ._environment import PROCESS, PROCESSES
from ._lines import KILLED, Fault, list_processes

_SECONDS_BETWEEN_TRIES = 0.2
_TRY_SECONDS = 5.0
_FAREWELL_SECONDS = 5.0
_LONGEST_GREETING = 4096  # bytes
Sockets = dict[int, socket.socket]


class _RefusalError(Exception):
    """The reason why a job does not start, which all processes raise."""


def split_address(address: str) -> tuple[str, int] | None:
    """Host and port; ``None`` if the port is no number, which JAX refuses."""
    host, _, port = address.rpartition(":")
    return (host.strip("[]"), int(port)) if port.isdecimal() else None


def is_loopback(host: str) -> bool:
    """True if a host is reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen(host: str, port: int) -> socket.socket:
    """Listens at a port.

    Args:
      host: the address of this host to listen at; empty or ``"::"``: at all, as JAX
        does.
      port: the port; 0: one that is free.

    Raises:
      RuntimeError: if another program listens there, or the address is of no use.
    """
    try:
        if host in ("", "::", "0.0.0.0"):
            if socket.has_dualstack_ipv6():
                return socket.create_server(
                    ("", port), family=socket.AF_INET6, dualstack_ipv6=True
                )
            return socket.create_server(("", port))
        family, *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            raise RuntimeError(
                f"port {port} is in use on this host, by another job or by a run that "
                f"has not ended; give coordinator_address= another port, the same in "
                f"all processes"
            ) from None
        raise RuntimeError(
            f"process 0 cannot listen at port {port} of {host or 'this host'} "
            f"({error}); give coordinator_address= an address of this host and a port "
            f"that is free"
        ) from None


def receive_all(
    listener: socket.socket, num_processes: int, *, timeout: float
) -> Sockets:
    """Waits in process 0 until all others have come.

    Args:
      listener: the socket at which they come; it is closed.
      num_processes: the number of all processes.
      timeout: the seconds that they may take.

    Returns:
      Process -> the connection to it.

    Raises:
      RuntimeError: if a process ends, or its numbers do not fit.
      TimeoutError: with the processes that did not come.
    """
    arrivals = _Arrivals(num_processes)
    until = time.monotonic() + timeout
    refusal = ""
    with listener, selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while arrivals.missing:
            seconds = until - time.monotonic()
            if seconds <= 0:
                break
            for key, _ in selector.select(seconds):
                line: Any = key.fileobj
                if line is listener:
                    line, _ = listener.accept()
                    line.settimeout(_TRY_SECONDS)
                    selector.register(line, selectors.EVENT_READ, bytearray())
                    continue
                try:
                    is_open = arrivals.read(line, key.data)
                except _RefusalError as error:
                    refusal = refusal or str(error)
                    # Those that are on their way are told too.
                    until = min(until, time.monotonic() + _FAREWELL_SECONDS)
                    is_open = False
                if refusal:
                    arrivals.tell({"refused": refusal})
                if not is_open:
                    selector.unregister(line)
                    line.close()
    if refusal:
        raise RuntimeError(f"the processes cannot start: {refusal}")
    if arrivals.missing:
        late = (
            f"{list_processes(sorted(arrivals.missing))} of {num_processes} did not "
            f"join process 0 within {timeout:g} s: start all of them, with a "
            f"coordinator_address= that they reach"
        )
        arrivals.tell({"refused": late})
        raise TimeoutError(late)
    arrivals.tell({"starts": True})
    return arrivals.sockets


class _Arrivals:
    """The processes that have come to process 0.

    Attributes:
      sockets: process -> the connection to it.
      missing: the processes that have not come.
    """

    def __init__(self, num_processes: int) -> None:
        self.sockets: Sockets = {}
        self.missing = {*range(1, num_processes)}
        self._num_processes = num_processes

    def tell(self, message: dict[str, Any]) -> None:
        """Sends a message to all that have come."""
        for line in self.sockets.values():
            _tell(line, message)

    def read(self, line: socket.socket, received: bytearray) -> bool:
        """Reads what a process says, as far as it is there.

        Args:
          line: the connection.
          received: the bytes that have come before, to which others are added.

        Returns:
          False if it is no process of a job.

        Raises:
          _RefusalError: if it has ended, or its numbers do not fit.
        """
        content = b""
        with contextlib.suppress(OSError):
            content = line.recv(_LONGEST_GREETING)
        received += content
        for process, other in self.sockets.items():
            if other is line:  # it says nothing before all have come
                del self.sockets[process]
                raise _RefusalError(f"{Fault((process,), KILLED)}")
        if content and not received.endswith(b"\n"):
            return len(received) < _LONGEST_GREETING
        try:
            greeting = json.loads(received)
            process = int(greeting["process"])
            count = int(greeting["num_processes"])
        except (KeyError, TypeError, ValueError):
            return False

        reason = ""
        if count != self._num_processes or not 0 < process < count:
            reason = (
                f"process {process} says that there are {count} processes, and "
                f"process 0 that there are {self._num_processes}: set {PROCESSES} "
                f"alike, and {PROCESS} from 0 to {self._num_processes - 1}"
            )
        elif process in self.sockets:
            reason = (
                f"two processes say that they are process {process}: give each "
                f"another {PROCESS}"
            )
        if reason:
            _tell(line, {"refused": reason})
            raise _RefusalError(reason)
        self.missing.discard(process)
        self.sockets[process] = line
        _tell(line, {"taken": True})
        return True


def join_first(
    address: tuple[str, int], *, process: int, num_processes: int, timeout: float
) -> socket.socket:
    """Comes to process 0, and waits until all others have come.

    Args:
      address: host and port of process 0.
      process: the number of this process.
      num_processes: the number of all.
      timeout: the seconds that it may take.

    Returns:
      The connection to process 0.

    Raises:
      RuntimeError: if another process has ended, or the numbers do not fit.
      TimeoutError: if process 0 was not reached, or another one did not come.
    """
    until = time.monotonic() + timeout
    greeting = {"process": process, "num_processes": num_processes}
    reason = "nobody listened there"
    while (seconds := until - time.monotonic()) > 0:
        line = None
        try:
            line = socket.create_connection(address, min(seconds, _TRY_SECONDS))
            _tell(line, greeting)
            replies = _replies(line)
            reply = next(replies)
        except (OSError, ValueError, StopIteration) as error:
            # Another program may listen there, such as a run that is about to end.
            reason = str(error) or "no process of a job that starts answered there"
            if line is not None:
                line.close()
            time.sleep(_SECONDS_BETWEEN_TRIES)
            continue
        if "taken" in reply:
            # Process 0 knows first who is late.
            line.settimeout(max(until - time.monotonic(), 0) + _TRY_SECONDS)
            reply = next(replies, {})
        if "starts" in reply:
            return line
        line.close()
        refusal = reply.get("refused", f"{Fault((0,), KILLED)}")
        raise RuntimeError(f"the processes cannot start: {refusal}")
    host, port = address
    raise TimeoutError(
        f"process {process} did not reach process 0 at port {port} of {host} within "
        f"{timeout:g} s ({reason}): start it, with a coordinator_address= that all "
        f"reach"
    )


def _replies(line: socket.socket) -> Iterator[dict[str, Any]]:
    """The messages that come over a connection, until it ends or is silent too long."""
    received = bytearray()
    while len(received) < _LONGEST_GREETING:
        end = received.find(b"\n")
        if end >= 0:
            message = json.loads(received[:end])
            del received[: end + 1]
            yield message
            continue
        try:
            # One byte: what follows the last message belongs to the line.
            content = line.recv(1)
        except OSError:
            return
        if not content:
            return
        received += content


def _tell(line: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        line.sendall(json.dumps(message).encode() + b"\n")
