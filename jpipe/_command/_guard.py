"""The end of all processes of a launch, and of all that they have started.

Each of them has the name of the launch in its environment, and so has whatever it
starts, in its session or out of it: Linux shows the environment that a process began
with. Run as a program, with the name as its argument, this is the guard of a launch: it
sleeps until its standard input ends, as when the launch is killed, and ends them.
"""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

LAUNCH = "JPIPE_LAUNCH"  # the variable with the name of the launch
_POLL_SECONDS = 0.01
_MOST_SECONDS = 30.0  # a process that waits for a disk which is gone does not end


def find_processes(launch: str) -> list[int]:
    """The processes on this machine that a launch has started, or they have."""
    entry = f"{LAUNCH}={launch}".encode()
    processes = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to somebody else
            if entry in path.read_bytes().split(b"\0"):
                processes.append(int(path.parent.name))
    return processes


def end_processes(launch: str) -> None:
    """Kills the processes of a launch until there are none: they may start others."""
    until = time.monotonic() + _MOST_SECONDS
    while (processes := find_processes(launch)) and time.monotonic() < until:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    end_processes(sys.argv[1])
