"""Faults of one of several processes, and what the others must do and print."""

import re
import tempfile
from pathlib import Path
from typing import NamedTuple

from . import by_hand
from .program import STOPPED_EARLY

# Seconds in which all end after one has failed. A grace of 5, on a busy machine.
_SECONDS = 12.0
# Seconds that a process, which has to end by a timeout, may take longer.
_EXTRA_SECONDS = 10.0
_GONE = "is gone: it was killed, or its host or network failed"
_RAISED = "has failed: ZeroDivisionError: by a test"
_HANGS = r"(awaited nobody and )?sent nothing for [\d.]+ s: it.* (hangs|is slow)"
_OF_JAX = "the JAX distributed service detected fatal errors"
_LEFT = "came to its end after 6 calls of the pipelines"


class Row(NamedTuple):
    """A fault.

    Attributes:
      num_processes: the number of processes.
      failure: the failure, ``process:moment:act``: see `program.fail`.
      why: the end of the sentence about the failed process that all others print;
        empty if none of them fails.
      status: the status of the process that fails.
      timeout: the seconds for which one waits for another.
      seconds: the most seconds after the failure until the end of each other one; 0:
        as many as it needs.
    """

    num_processes: int
    failure: str
    why: str
    status: int
    timeout: float = 60.0
    seconds: float = _SECONDS


def _hang(num_processes: int, failure: str, timeout: float = 8.0) -> Row:
    return Row(
        num_processes,
        failure,
        _HANGS,
        status=-9,  # nothing else ends it
        timeout=timeout,
        seconds=timeout + _EXTRA_SECONDS,
    )


def _absent(num_processes: int, failure: str, why: str) -> Row:
    """A process that is killed before it has come: nobody can know that it lived."""
    return Row(num_processes, failure, why, status=-9, timeout=6.0, seconds=16.0)


ROWS = [
    _absent(3, "1:start:kill", r"of 3 did not join process 0 within 6 s"),
    _absent(3, "0:start:kill", r"at port \d+ of 127.0.0.1 within 6 s"),
    # Process 2 comes when process 0 is gone: that could still be about to start.
    _absent(3, "0:join:kill", rf"({_GONE}|at port \d+ of 127.0.0.1 within 6 s)"),
    Row(3, "1:join:kill", _GONE, status=-9),
    *(
        Row(num_processes, f"{process}:{moment}:kill", _GONE, status=-9)
        for num_processes, process, moment in (
            *((2, 1, moment) for moment in ("joined", "compile", "step", "save")),
            *((3, 2, moment) for moment in ("joined", "compile", "step", "save")),
            *((2, 1, "end"), (2, 1, "exit"), (8, 5, "step"), (8, 7, "joined")),
        )
    ),
    Row(2, "1:step:orphan", _GONE, status=-9),
    # Process 0 has JAX's store: without it JAX aborts, which may be before all else.
    *(
        Row(num_processes, f"0:{moment}:kill", f"({_GONE}|{_OF_JAX})", status=-9)
        for num_processes, moment in (
            *((3, moment) for moment in ("joined", "compile", "step", "save")),
            *((2, "end"), (2, "exit"), (8, "step")),
        )
    ),
    Row(2, "1:step:raise", _RAISED, status=1),
    Row(3, "0:step:raise", _RAISED, status=1),
    Row(2, "1:step:interrupt", "has failed: KeyboardInterrupt", status=1),
    Row(3, "1:step:sys.exit", r"came to its end by sys.exit\(3\) after", status=3),
    Row(3, "0:step:sys.exit", r"came to its end by sys.exit\(3\) after", status=3),
    Row(3, "2:step:os._exit", _GONE, status=4),
    Row(2, "0:step:leave", _LEFT.replace("6", "7"), status=70),
    Row(3, "1:step:leave", _LEFT.replace("6", "7"), status=70),
    Row(8, "3:step:leave", _LEFT.replace("6", "7"), status=70, seconds=20.0),
    _hang(2, "0:joined:hang"),
    _hang(3, "1:joined:hang"),
    _hang(2, "1:step:hang"),
    _hang(3, "0:step:hang"),
    _hang(3, "2:step:hang"),
    _hang(2, "1:end:hang"),
    _hang(8, "4:step:hang", timeout=20.0),
    Row(3, "1:step:pause", "", status=0, seconds=0.0),
    Row(3, "0:step:pause", "", status=0, seconds=0.0),
    Row(2, "0:step:term", "", status=STOPPED_EARLY, seconds=0.0),
    Row(3, "2:step:hangup", "", status=STOPPED_EARLY, seconds=0.0),
]


def find_breaches(row: Row) -> list[str]:
    """Runs the processes of a row; returns what is not as it must be, in sentences."""
    with tempfile.TemporaryDirectory() as folder:
        processes = by_hand.run(
            row.num_processes, Path(folder), row.failure, timeout=row.timeout
        )
    failing = int(row.failure.split(":")[0])
    breaches = []
    saved = set()
    for index, process in enumerate(processes):
        if process.is_late:
            breaches.append(f"process {index} did not end")
        if index == failing or not row.why:
            if process.status != row.status:
                breaches.append(
                    f"process {index} has status {process.status}, not {row.status}"
                )
            saved.add(tuple(re.findall(r"^saved \d+$", process.text, re.M)))
            continue
        if process.status == 0:
            breaches.append(f"process {index} has status 0")
        if row.seconds and process.seconds > row.seconds:
            breaches.append(f"process {index} took {process.seconds:.1f} s")
        # A process that has not come is not named by its end, nor by JAX.
        has_name = ":start:" not in row.failure and _OF_JAX not in row.why
        subject = f"process {failing} " if has_name else ""
        if not re.search(subject + row.why, process.text):
            breaches.append(f"process {index} does not print why: {process.text}")
    if len(saved) > 1:
        breaches.append(f"other steps are saved: {saved}")
    return breaches
