"""One program as several processes on this machine: started, labelled, ended."""

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
from ._arguments import duration, positive_int

# When one has failed, or Ctrl-C was pressed, the others have so many seconds to end by
# themselves.
_GRACE = 10.0
_LOOKS = 0.05
# Linux: what a process is sent when the one that started it is gone.
_ON_DEATH_OF_PARENT = 1


def add_launch(commands: Any) -> None:
    """Adds the command ``launch``."""
    parser = commands.add_parser(
        "launch",
        help="start several processes of a program, which calls jpipe.distributed()",
        description="Starts a program several times on this machine. In each of them "
        "jpipe.distributed() makes it one of several processes. What they print begins "
        "with their number. When one fails, all are ended.",
    )
    parser.add_argument("--processes", type=positive_int, required=True, metavar="N")
    parser.add_argument(
        "--timeout",
        type=duration,
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
      command: what each of them is.
      num_processes: how many.
      timeout: for how many seconds one waits for another.

    Returns:
      0; or the exit status of the first that failed.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {COORDINATOR: f"127.0.0.1:{port}", PROCESSES: str(num_processes)}
    shared |= {LOCAL_PROCESSES: str(num_processes)}
    shared |= {"PYTHONUNBUFFERED": "1"}  # lines are shown, and kept, as they come
    if timeout is not None:
        shared[TIMEOUT] = str(timeout)
    running: list[subprocess.Popen[str]] = []
    printers: list[threading.Thread] = []
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for number in range(num_processes):
            process = subprocess.Popen(
                command,
                env={**os.environ, **shared, PROCESS: str(number)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                preexec_fn=_end_with_parent,
                start_new_session=True,
            )
            running.append(process)
        # Only now: a function that runs in a new process may wait for ever where other
        # threads run in this one.
        for number, process in enumerate(running):
            outputs = (process.stdout, sys.stdout), (process.stderr, sys.stderr)
            for each in outputs:
                args = (number, *each)
                printers.append(threading.Thread(target=_print, args=args, daemon=True))
                printers[-1].start()
        return _first_failure(running)
    except KeyboardInterrupt:
        for process in running:
            process.send_signal(signal.SIGINT)
        _wait(running)
        return 128 + signal.SIGINT
    finally:
        for process in running:
            _kill(process)
        for thread in printers:
            thread.join(_GRACE)
        signal.signal(signal.SIGTERM, before)


def _first_failure(running: Sequence[subprocess.Popen[str]]) -> int:
    """Waits until all have ended, or one has failed and the others had their time."""
    while None in (ended := [process.poll() for process in running]):
        if any(ended):
            _wait(running)
            break
        time.sleep(_LOOKS)
    failed = next(filter(None, ended), 0)
    return failed if failed >= 0 else 128 - failed


def _wait(running: Sequence[subprocess.Popen[str]]) -> None:
    """Until all have ended, or their time is over."""
    until = time.monotonic() + _GRACE
    while time.monotonic() < until and any(p.poll() is None for p in running):
        time.sleep(_LOOKS)


def _kill(process: subprocess.Popen[str]) -> None:
    """Ends a process, and those that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _print(number: int, source: IO[str], target: IO[str]) -> None:
    """Prints what a process prints, line by line, with its number."""
    for line in source:
        # Who is not read any more, or stops reading, would keep the process waiting.
        with contextlib.suppress(OSError, ValueError):
            # In one piece: other threads print beside this one.
            target.write(f"[{number}] {line.rstrip()}\n")
            target.flush()


def _end_with_parent() -> None:
    """Has Linux end this process when its parent ends, however that ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_ON_DEATH_OF_PARENT, signal.SIGKILL)
