"""What every process of every side measures of itself, by the standard library alone.

A process prints one line of JSON, the last of its output; see `report`.
"""

import ctypes
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .workload import COMPARED, Case


def pin(cores: Sequence[int]) -> None:
    """Keeps this process on some cores, where the system can.

    It has to be called before a framework is used: threads inherit the cores, and pools
    of threads are as large as the number of cores that are seen.

    Args:
      cores: their numbers; none for no change.
    """
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


def separate_cores() -> list[int]:
    """Cores that this process may use, one hardware thread of each; none if unknown."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    first: dict[str, int] = {}
    for core in sorted(os.sched_getaffinity(0)):
        path = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        siblings = path.read_text().strip() if path.exists() else str(core)
        first.setdefault(siblings, core)
    return list(first.values())


def resident(field: str) -> int:
    """Bytes of this process in memory: ``"VmRSS"`` is now, ``"VmHWM"`` the most ever.

    Not `resource.getrusage`: its high-water mark starts at that of the process which
    started this one.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:  # not Linux
        return 0
    rows = dict(line.split(":", 1) for line in status.splitlines())
    return 1024 * int(rows[field].split()[0])


def forget_peak() -> None:
    """Lets the high-water mark begin anew, so that it is that of training.

    Loading weights and compiling need memory of their own, which malloc keeps: so that
    is given back first. Where the system cannot, the mark stays that of the whole life.
    """
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, AttributeError, TypeError):
        return  # not Linux, or not the C library of GNU


def measured(
    case: Case, step: Callable[[], float | None], parameters: int
) -> dict[str, Any]:
    """Takes the steps of a run.

    Args:
      case: the run.
      step: takes one training step, waits for all of it, and returns the loss if this
        process has it.
      parameters: how many numbers this process trains.

    Returns:
      The losses of the first steps; seconds of those that are timed; the processor
      time of all threads in those; the bytes resident between two steps, when what is
      not used is given back; the most while training, and ever.
    """
    losses = [step() for _ in range(COMPARED)]
    ever = resident("VmHWM")
    forget_peak()
    idle = resident("VmRSS")
    step()  # meets the page faults of the memory that was given back
    seconds, busy = [], time.process_time()
    for _ in range(case.steps):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return {
        "parameters": parameters,
        "losses": losses,
        "seconds": seconds,
        "busy_seconds": time.process_time() - busy,
        "idle_bytes": idle,
        "peak_bytes": resident("VmHWM"),
        "ever_bytes": max(ever, resident("VmHWM")),
    }


def report(result: dict[str, Any], **facts: Any) -> None:
    """Prints what this process found, as one line of JSON.

    Args:
      result: from `measured`.
      **facts: more, such as the memory that it had before.
    """
    print(json.dumps(result | facts), flush=True)


def arguments() -> tuple[Case, list[int], list[str]]:
    """Of a side's process: the case, its cores, and what its side adds."""
    case, cores, *rest = sys.argv[1:]
    return Case.read(case), json.loads(cores), rest
