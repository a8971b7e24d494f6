"""The variables by which `python -m jpipe launch` tells processes who they are."""

import os

COORDINATOR = "JPIPE_COORDINATOR"
PROCESSES = "JPIPE_PROCESSES"
PROCESS = "JPIPE_PROCESS"
LOCAL_PROCESSES = "JPIPE_LOCAL_PROCESSES"  # those that share the cores of this host
TIMEOUT = "JPIPE_TIMEOUT"
TRANSPORT = "JPIPE_TRANSPORT"


def whole(name: str) -> int:
    """The whole number that a variable must say.

    Raises:
      ValueError: if it does not.
    """
    text = os.environ.get(name)
    if text is None or not text.strip().isdecimal():
        says = "is not set" if text is None else f"is {text!r}"
        raise ValueError(
            f"{name} {says}, and {COORDINATOR} is {os.environ.get(COORDINATOR)!r}: set "
            f"{COORDINATOR}=host:port, {PROCESSES}, how many there are, and {PROCESS}, "
            f"which of them this is, from 0 on"
        )
    return int(text)


def seconds(default: float) -> float:
    """For how long a process waits for another one.

    Raises:
      ValueError: if the variable that says so does not say seconds.
    """
    text = os.environ.get(TIMEOUT)
    try:
        found = default if text is None else float(text)
    except ValueError:
        found = 0.0
    if not found > 0:
        raise ValueError(f"{TIMEOUT}={text!r}: needs seconds, more than 0")
    return found
