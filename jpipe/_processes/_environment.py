"""The environment variables of a process: its number, timeout and transport.

`python -m jpipe launch` sets these variables.
"""

import os
from typing import Any

COORDINATOR = "JPIPE_COORDINATOR"
PROCESSES = "JPIPE_PROCESSES"
PROCESS = "JPIPE_PROCESS"
LOCAL_PROCESSES = "JPIPE_LOCAL_PROCESSES"  # those that share the cores of this host
RESTART_COUNT = "JPIPE_RESTART_COUNT"  # how often all were started again
TIMEOUT = "JPIPE_TIMEOUT"
TRANSPORT = "JPIPE_TRANSPORT"
TRANSFER = "transfer"
DEVICE_PUT = "device_put"
FAILED = 70  # the exit status of a process that found a fault of another
TRANSPORTS = (TRANSFER, DEVICE_PUT)


def read_job() -> tuple[str, int, int] | tuple[None, None, None]:
    """The address of the first process, how many there are, and the number of this one.

    Raises:
      ValueError: if only some of the variables are set, or not to whole numbers.
    """
    address = os.environ.get(COORDINATOR)
    if address is None:
        return None, None, None
    processes = os.environ.get(PROCESSES)
    process = os.environ.get(PROCESS)
    try:
        return address, int(str(processes)), int(str(process))
    except ValueError:
        raise ValueError(
            f"{COORDINATOR} is {address!r}, {PROCESSES} is {processes!r}, and "
            f"{PROCESS} is {process!r}: set {COORDINATOR}=host:port, {PROCESSES}, "
            f"how many there are, and {PROCESS}, which of them this is, from 0 on"
        ) from None


def parse_seconds(name: str, value: Any) -> float:
    """The seconds in an argument or a variable; `name` is its name.

    Raises:
      ValueError: if they are not a number above 0.
    """
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = 0.0
    if not seconds > 0:
        raise ValueError(f"{name}={value!r}: needs seconds, more than 0")
    return seconds


def check_transport(name: str, value: str) -> str:
    """Returns the transport in an argument or a variable; empty for the default.

    Raises:
      ValueError: if there is no such transport.
    """
    if value and value not in TRANSPORTS:
        listed = ", ".join(map(repr, TRANSPORTS))
        raise ValueError(f"{name}={value!r}: choose from {listed}")
    return value
