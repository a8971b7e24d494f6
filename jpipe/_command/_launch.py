"""The command ``launch``: starts a program as several processes on this machine.

None of them outlives the command: when one fails, the others are ended; and when the
command itself is killed, Linux ends them.
"""

import argparse
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import IO, Any

from .._processes._environment import (
    COORDINATOR,
    LOCAL_PROCESSES,
    PROCESS,
    PROCESSES,
    TIMEOUT,
)
from ._parsers import parse_count, parse_duration

# The seconds in which processes may end by themselves, after one has failed or Ctrl-C
# was pressed.
_GRACE_SECONDS = 10.0
_POLL_SECONDS = 0.05
# The option of Linux for the signal that a process gets when its parent ends.
_PR_SET_PDEATHSIG = 1


def add_launch(commands: Any) -> None:
    """Adds the command ``launch``."""
    parser = commands.add_parser(
        "launch",
        help="start several processes of a program, which calls jpipe.distributed()",
        description="Starts a program several times on this machine. In each of them "
        "jpipe.distributed() makes it one of several processes. What they print begins "
        "with their number. When one fails, all are ended.",
    )
    parser.add_argument("--processes", type=parse_count, required=True, metavar="N")
    parser.add_argument(
        "--timeout",
        type=parse_duration,
        metavar="TIME",
        help="how long one process waits for another, such as 60s",
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
    return launch(command, arguments.processes, arguments.timeout)


def launch(
    command: Sequence[str], num_processes: int, timeout: float | None = None
) -> int:
    """Runs a command as several processes; none outlives it.

    Args:
      command: the command line of each process.
      num_processes: the number of processes.
      timeout: the seconds for which a process waits for another.

    Returns:
      0; or the exit status of the first process that failed.
    """
    environment = {
        **os.environ,
        COORDINATOR: f"127.0.0.1:{_find_free_port()}",
        PROCESSES: str(num_processes),
        LOCAL_PROCESSES: str(num_processes),
        # Lines are shown, and kept, as they are printed.
        "PYTHONUNBUFFERED": "1",
    }
    if timeout is not None:
        environment[TIMEOUT] = str(timeout)

    processes: list[subprocess.Popen[str]] = []
    printers: list[threading.Thread] = []
    previous_handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for index in range(num_processes):
            try:
                process = subprocess.Popen(
                    command,
                    env={**environment, PROCESS: str(index)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    errors="replace",
                    preexec_fn=_end_with_parent,
                    start_new_session=True,
                )
            except OSError as error:
                sys.exit(
                    f"python -m jpipe launch: process {index} of {num_processes} "
                    f"cannot be started ({error.strerror}); type fewer --processes"
                )
            processes.append(process)
        # Threads start after the last process: a `preexec_fn` may deadlock if other
        # threads run in the parent.
        for index, process in enumerate(processes):
            for source, target in (
                (process.stdout, sys.stdout),
                (process.stderr, sys.stderr),
            ):
                printer = threading.Thread(
                    target=_copy_lines, args=(index, source, target), daemon=True
                )
                printer.start()
                printers.append(printer)
        return _wait_for_failure(processes)
    except KeyboardInterrupt:
        for process in processes:
            process.send_signal(signal.SIGINT)
        _wait_for_end(processes)
        return 128 + signal.SIGINT
    finally:
        for process in processes:
            _kill(process)
        for printer in printers:
            printer.join(_GRACE_SECONDS)
        signal.signal(signal.SIGTERM, previous_handler)


def _find_free_port() -> int:
    """A port of this machine that is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_for_failure(processes: Sequence[subprocess.Popen[str]]) -> int:
    """Waits until all have ended, or one has failed and the others had their time.

    Returns:
      0; or the exit status of the first process that failed, as shells count: 128 plus
      the signal that ended it.
    """
    statuses = [process.poll() for process in processes]
    while None in statuses:
        if any(statuses):
            _wait_for_end(processes)
            break
        time.sleep(_POLL_SECONDS)
        statuses = [process.poll() for process in processes]
    status = next(filter(None, statuses), 0)
    return status if status >= 0 else 128 - status


def _wait_for_end(processes: Sequence[subprocess.Popen[str]]) -> None:
    """Waits until all have ended, or the grace period is over."""
    until = time.monotonic() + _GRACE_SECONDS
    while any(process.poll() is None for process in processes):
        if time.monotonic() >= until:
            break
        time.sleep(_POLL_SECONDS)


def _kill(process: subprocess.Popen[str]) -> None:
    """Kills a process, and those that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


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


def _end_with_parent() -> None:
    """Makes Linux kill this process when its parent ends, however that ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
