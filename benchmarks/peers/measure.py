"""What every process of every side measures of itself, by the standard library alone.

A process prints one line of JSON, the last of its output.
"""

import ctypes
import gc
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .workload import COMPARED, Case


class Training(NamedTuple):
    """What a side trains.

    Attributes:
      parameters: how many numbers this process trains.
      step: takes one training step, waits for all of it, and returns the loss if this
        process has it.
      finish: called at the end; gives what else the side has found.
    """

    parameters: int
    step: Callable[[], float | None]
    finish: Callable[[], dict[str, Any]] = dict


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


def measured(case: Case, training: Training) -> dict[str, Any]:
    """Takes the steps of a run.

    Returns:
      The losses of the first steps; seconds of those that are timed; the processor
      time of all threads in those; the bytes resident between two steps, when what is
      not used is given back; the most while training, and ever.
    """
    step = training.step
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
        "parameters": training.parameters,
        "losses": losses,
        "seconds": seconds,
        "busy_seconds": time.process_time() - busy,
        "idle_bytes": idle,
        "peak_bytes": resident("VmHWM"),
        "ever_bytes": max(ever, resident("VmHWM")),
    }


def main() -> None:
    """Runs one process of one side: its module, the case, its cores, and what it adds.

    A module has ``warm_up(case, *extra)``, which starts its framework, and
    ``baseline(case)`` or ``pipeline(case, *extra)``, which give a `Training`.
    """
    name, text, cores, *extra = sys.argv[1:]
    side = importlib.import_module(f"{__package__}.{name}")
    case = Case.read(text)
    pin(json.loads(cores))
    side.warm_up(case, *extra)
    start = resident("VmRSS")
    build = side.baseline if case.schedule == "baseline" else side.pipeline
    training: Training = build(case, *extra)
    result = measured(case, training)
    result |= {"start_bytes": start} | training.finish()
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
