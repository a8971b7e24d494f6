"""jpipe in two processes: one process of them, with one stage on one core.

The processes meet at a file, in which the first one writes the address of JAX's
coordinator, and talk by JAX's transfers through sockets.
"""

import os
import socket
import time
from pathlib import Path

import jax

import jpipe

from . import ours
from .measure import Training
from .workload import Case

PROCESSES = 2
TIMEOUT = 120.0  # seconds for which one process waits for the other
_SECONDS_TO_LOOK = 0.01


def warm_up(case: Case, number: str, meeting_place: str) -> None:
    """Joins the other process, and starts the runtime and the compiler.

    Args:
      case: the run.
      number: of this process.
      meeting_place: a file.
    """
    address = _address(int(number), Path(meeting_place))
    jax.config.update("jax_num_cpu_devices", 1)
    jpipe.distributed(address, PROCESSES, int(number), timeout=TIMEOUT)
    ours.compile_one_number()


def pipeline(case: Case, number: str, _: str) -> Training:
    """The stage of this process.

    A step ends when this process has its new weights and the loss, which the last one
    computes. The first process has the last backward, so its step ends last.
    """
    return ours.pipeline(case)


def _address(number: int, path: Path) -> str:
    """The address of the coordinator, which the first process writes into a file."""
    if number == 0:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        draft = path.with_suffix(".draft")
        draft.write_text(address)
        os.replace(draft, path)  # so that nobody reads half of it
        return address
    until = time.monotonic() + TIMEOUT
    while not path.exists():
        if time.monotonic() > until:
            raise TimeoutError(f"the first process wrote no address into {path}")
        time.sleep(_SECONDS_TO_LOOK)
    return path.read_text()
