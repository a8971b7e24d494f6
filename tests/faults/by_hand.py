"""Programs as several processes that nobody watches: started by hand, as on hosts."""

import os
import re
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("program.py")
# Longer than any of them takes: what hangs is killed then.
SECONDS = 150.0


@dataclass
class Process:
    """A process that has ended.

    Attributes:
      status: its exit status; minus the signal that ended it.
      seconds: the time from the failure of another process until its end.
      text: all that it printed.
      is_late: True if it had to be killed.
    """

    status: int
    seconds: float
    text: str
    is_late: bool


@dataclass
class _Running:
    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    end: float = 0.0


def environment() -> dict[str, str]:
    """The environment of a test: compiled quickly, and not cached."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith("JAX_COMP")}
    return variables | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "PYTHONPATH": str(ROOT)}


def run(
    num_processes: int, folder: Path, failure: str, *, timeout: float = 60.0
) -> list[Process]:
    """Runs `program` as several processes, and notes when and how each ends.

    Args:
      num_processes: the number of processes.
      folder: the folder of their results.
      failure: the failure of one of them.
      timeout: the seconds for which one waits for another.

    Returns:
      The processes, in order.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    running = list[_Running]()
    readers = list[threading.Thread]()
    for index in range(num_processes):
        variables = {
            "JPIPE_COORDINATOR": address,
            "JPIPE_PROCESSES": str(num_processes),
            "JPIPE_LOCAL_PROCESSES": str(num_processes),
            "JPIPE_PROCESS": str(index),
            "JPIPE_TIMEOUT": str(timeout),
            "PYTHONUNBUFFERED": "1",
        }
        job = _Running(
            subprocess.Popen(
                [sys.executable, str(PROGRAM), str(folder), failure],
                env=environment() | variables,
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        running.append(job)
        readers.append(threading.Thread(target=_read, args=[job], daemon=True))
        readers[-1].start()

    failing = running[int(failure.split(":")[0])]
    hangs = failure.endswith(":hang")
    waited = [job for job in running if not (hangs and job is failing)]
    is_late = _wait(waited)
    for job in running:
        if job.process.poll() is None:
            job.process.kill()
            job.process.wait()
    for reader in readers:
        reader.join(10)
    texts = ["\n".join(job.lines) for job in running]
    begin = re.search(r"fails at ([\d.]+)", "\n".join(texts))
    assert begin, texts
    return [
        Process(
            job.process.returncode, job.end - float(begin[1]), text, is_late=is_late
        )
        for job, text in zip(running, texts, strict=True)
    ]


def _wait(running: list[_Running]) -> bool:
    """Waits until all have ended; returns True if they have not in time."""
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        for job in running:
            if job.process.poll() is not None and job.end == 0.0:
                job.end = time.time()
        if all(job.end for job in running):
            return False
        time.sleep(0.02)
    return True


def _read(job: _Running) -> None:
    assert job.process.stdout is not None
    with job.process.stdout:
        for line in job.process.stdout:
            job.lines.append(line.rstrip())
