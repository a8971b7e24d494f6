"""What a process takes from its environment: its number, timeout and transport.

`python -m jpipe launch` sets these variables.
"""

import os
from typing import Any

COORDINATOR = "JPIPE_COORDINATOR"
PROCESSES = "JPIPE_PROCESSES"
PROCESS = "JPIPE_PROCESS"
LOCAL_PROCESSES = "JPIPE_LOCAL_PROCESSES"  # those that share the cores of this host
TIMEOUT = "JPIPE_TIMEOUT"
TRANSPORT = "JPIPE_TRANSPORT"
TRANSFER, DEVICE_PUT = TRANSPORTS = "transfer", "device_put"


def own_job() -> tuple[str, int, int] | tuple[None, None, None]:
    """The address of the first process, how many there are, and the number of this one.

    Raises:
      ValueError: if only some of the variables are set, or not to whole numbers.
    """
    address, *numbers = map(os.environ.get, (COORDINATOR, PROCESSES, PROCESS))
    if address is None:
        return None, None, None
    try:
        processes, process = (int(str(number)) for number in numbers)
    except ValueError:
        raise ValueError(
            f"{COORDINATOR} is {address!r}, {PROCESSES} is {numbers[0]!r}, and "
            f"{PROCESS} is {numbers[1]!r}: set {COORDINATOR}=host:port, {PROCESSES}, "
            f"how many there are, and {PROCESS}, which of them this is, from 0 on"
        ) from None
    return address, processes, process


def seconds(name: str, given: Any) -> float:
    """The seconds in an argument or a variable, by its name.

    Raises:
      ValueError: if they are not a number above 0.
    """
    try:
        found = float(given)
    except (TypeError, ValueError):
        found = 0.0
    if not found > 0:
        raise ValueError(f"{name}={given!r}: needs seconds, more than 0")
    return found


def known_transport(name: str, given: str) -> str:
    """The transport in an argument or a variable, by its name; empty for the default.

    Raises:
      ValueError: if there is no such transport.
    """
    if given and given not in TRANSPORTS:
        listed = ", ".join(map(repr, TRANSPORTS))
        raise ValueError(f"{name}={given!r}: choose from {listed}")
    return given
