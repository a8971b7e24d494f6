"""The command ``launch``: starts a program as several processes on this machine.

    start all ──▶ one fails ──▶ the others end ──▶ start all again, if restarts are left
        │
        └──▶ SIGTERM, SIGHUP, Ctrl-C: passed on ──▶ they save and end

Nothing outlives the command, nor what its processes have started: the end of an attempt
kills what is left, and a guard does so where the command itself is killed.
"""

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from .._processes._environment import (
    COORDINATOR,
    FAILED,
    LOCAL_PROCESSES,
    PROCESS,
    PROCESSES,
    RESTART_COUNT,
    TIMEOUT,
)
from . import _guard
from ._parsers import parse_count, parse_duration, parse_number

# The seconds in which processes may end by themselves, after one has failed.
_GRACE_SECONDS = 10.0
# The same after a signal, in which they may save.
_STOP_SECONDS = 30.0
_POLL_SECONDS = 0.05
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def add_launch(commands: Any) -> None:
    """Adds the command ``launch``."""
    parser = commands.add_parser(
        "launch",
        help="start several processes of a program, which calls jpipe.distributed()",
        description="Starts a program several times on this machine. In each of them "
        "jpipe.distributed() makes it one of several processes. What they print begins "
        "with their number. When one fails, all are ended, and started again if "
        "--max-restarts says so. SIGTERM is passed on.",
    )
    parser.add_argument("--processes", type=parse_count, required=True, metavar="N")
    parser.add_argument(
        "--timeout",
        type=parse_duration,
        metavar="TIME",
        help="how long one process waits for another, such as 60s",
    )
    parser.add_argument(
        "--max-restarts",
        type=parse_number,
        default=0,
        metavar="N",
        help="how often all are started again after one has failed; default: 0",
    )
    parser.add_argument(
        "--grace",
        type=parse_duration,
        default=_STOP_SECONDS,
        metavar="TIME",
        help="how long they may take to save and end after SIGTERM, SIGHUP or Ctrl-C; "
        "default: 30s",
    )
    parser.add_argument(
        "-m", dest="is_module", action="store_true", help="it is a module, by its name"
    )
    parser.add_argument("script", help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    script = [arguments.script]
    if arguments.is_module:
        script = ["-m", *script]
    command = [sys.executable, *script, *arguments.arguments]
    return launch(
        command,
        arguments.processes,
        timeout=arguments.timeout,
        max_restarts=arguments.max_restarts,
        grace=arguments.grace,
    )


def launch(
    command: Sequence[str],
    num_processes: int,
    *,
    timeout: float | None = None,
    max_restarts: int = 0,
    grace: float = _STOP_SECONDS,
) -> int:
    """Runs a command as several processes; none outlives it.

    Args:
      command: the command line of each process.
      num_processes: the number of processes.
      timeout: the seconds for which a process waits for another.
      max_restarts: the number of times that all are started again after a failure.
      grace: the seconds that they may take to end after a signal.

    Returns:
      0; or the exit status of the first process that failed, as shells count: 128 plus
      the signal that ended it.
    """
    name = uuid.uuid4().hex
    environment = {
        **os.environ,
        PROCESSES: str(num_processes),
        LOCAL_PROCESSES: str(num_processes),
        _guard.LAUNCH: name,
        # Lines are shown, and kept, as they are printed.
        "PYTHONUNBUFFERED": "1",
    }
    if timeout is not None:
        environment[TIMEOUT] = str(timeout)

    with _guarded(name), _caught_signals() as signals:
        status = 0
        for restart_count in range(max_restarts + 1):
            attempt = {
                COORDINATOR: f"127.0.0.1:{_find_free_port()}",
                RESTART_COUNT: str(restart_count),
            }
            processes = list[subprocess.Popen[str]]()
            try:
                _start(command, {**environment, **attempt}, processes)
                status = _wait(processes, signals, grace)
            finally:
                _end(processes, name)
            if status == 0 or signals:
                break
            if restart_count < max_restarts:
                _say(f"starts all again, {restart_count + 1} of {max_restarts} times")
        return status


@contextlib.contextmanager
def _guarded(name: str) -> Iterator[None]:
    """The scope at whose end, however it comes, the processes of a launch are ended."""
    if sys.platform != "linux":
        yield
        return
    guard = subprocess.Popen(
        [sys.executable, "-I", str(Path(_guard.__file__)), name],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # what ends this session does not end it
    )
    try:
        yield
    finally:
        assert guard.stdin is not None
        guard.stdin.close()
        guard.wait()


@contextlib.contextmanager
def _caught_signals() -> Iterator[list[int]]:
    """The scope in which signals that stop a launch are noted, not obeyed.

    A signal that is ignored, as by ``nohup``, stays ignored.
    """
    signals = list[int]()
    handlers = {number: signal.getsignal(number) for number in _STOPS}
    caught = [number for number in _STOPS if handlers[number] != signal.SIG_IGN]
    for number in caught:
        signal.signal(number, lambda number, _: signals.append(number))
    try:
        yield signals
    finally:
        for number in caught:
            signal.signal(number, handlers[number])


def _start(
    command: Sequence[str],
    environment: dict[str, str],
    processes: list[subprocess.Popen[str]],
) -> None:
    """Starts the processes of one attempt.

    Args:
      command: the command line of each.
      environment: the environment of all but for the number of the process.
      processes: where to add them, one by one.

    Raises:
      SystemExit: if the machine takes no more.
    """
    num_processes = int(environment[PROCESSES])
    for index in range(num_processes):
        try:
            process = subprocess.Popen(
                command,
                env={**environment, PROCESS: str(index)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            sys.exit(
                f"python -m jpipe launch: process {index} of {num_processes} "
                f"cannot be started ({error.strerror}); type fewer --processes"
            )
        processes.append(process)
        for source, target in (
            (process.stdout, sys.stdout),
            (process.stderr, sys.stderr),
        ):
            threading.Thread(
                target=_copy_lines,
                args=(index, source, target),
                name=f"output of {process.pid}",
                daemon=True,
            ).start()


def _find_free_port() -> int:
    """A port of this machine that is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait(
    processes: Sequence[subprocess.Popen[str]], signals: list[int], grace: float
) -> int:
    """Waits until all have ended, or their time is over.

    Their time begins to end with the first one that fails, or with a signal, which is
    passed on: Ctrl-C as it is, others as SIGTERM. A second one ends it.

    Args:
      processes: the processes.
      signals: the signals that have come; some may follow.
      grace: the seconds that they have after a signal.

    Returns:
      0; or the status of the first process that failed, as shells count. A process that
      ended for a fault of another one is not the first.
    """
    # process -> its status, in the order in which they end
    failures: dict[int, int] = {}
    running = dict(enumerate(processes))
    num_passed_on = 0
    until = float("inf")
    while running and time.monotonic() < until:
        for index, process in [*running.items()]:
            status = process.poll()
            if status is None:
                continue
            del running[index]
            if status != 0:
                failures[index] = status
                if len(failures) == 1 and not signals:
                    until = time.monotonic() + _GRACE_SECONDS
        if len(signals) > num_passed_on:
            is_first = num_passed_on == 0
            until = time.monotonic() + grace if is_first else 0.0
            num_passed_on = len(signals)
            is_interrupt = signals[0] == signal.SIGINT
            for process in running.values():
                process.send_signal(signal.SIGINT if is_interrupt else signal.SIGTERM)
        time.sleep(_POLL_SECONDS)

    if signals and (running or signals[0] == signal.SIGINT):  # too late, or Ctrl-C
        return 128 + signals[0]
    if not failures:
        return 0
    roots = [index for index in failures if failures[index] != FAILED] or [*failures]
    index = roots[0]
    status = failures[index]
    if not signals:
        _say(f"process {index} {_status_text(status)}")
    return status if status >= 0 else 128 - status


def _status_text(status: int) -> str:
    """The end of a sentence about a process that failed."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"python -m jpipe launch: {text}\n")
        sys.stderr.flush()


def _end(processes: Sequence[subprocess.Popen[str]], name: str) -> None:
    """Kills what is left of an attempt, and prints the last lines."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    _guard.end_processes(name)
    names = {f"output of {process.pid}" for process in processes}
    for thread in threading.enumerate():
        if thread.name in names:
            thread.join(_GRACE_SECONDS)


def _copy_lines(index: int, source: IO[str], target: IO[str]) -> None:
    """Copies the output of a process line by line, with its index in front."""
    with source:
        for line in source:
            # The pipe is drained even if our own output is closed: else the process
            # would wait.
            with contextlib.suppress(OSError, ValueError):
                # One call, since other threads write to the same file.
                target.write(f"[{index}] {line.rstrip()}\n")
                target.flush()
