"""Arguments of commands: how they are written, and what to type in place of others."""

import argparse
import math
import os
import re
from pathlib import Path

from .. import schedules
from ..schedules._catalogue import key_of

_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9}


class CommandError(ValueError):
    """Arguments that are well formed and still do not fit: shown without traceback."""


def positive_int(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r}: write a whole number of at least 1, such as 4"
        )
    return int(text)


def duration(text: str) -> float:
    """Seconds, from a number with a unit, such as 5us; 0 needs no unit."""
    match = re.fullmatch(r"(\d+\.?\d*(?:[eE][+-]?\d+)?)\s*([^\W\d]*)", text.strip())
    if match is not None:
        number, unit = match.groups()
        if not unit and float(number) == 0:
            return 0.0
        seconds = float(number) * _SECONDS.get(unit, math.inf)
        if math.isfinite(seconds):
            return seconds
    raise argparse.ArgumentTypeError(
        f"{text!r}: write a time, such as 5us; units: {', '.join(_SECONDS)}"
    )


def schedule_name(text: str) -> str:
    """The name of a schedule of the catalogue."""
    if key_of(text) is None:
        names = ", ".join(schedules.BY_NAME)
        raise argparse.ArgumentTypeError(
            f"unknown schedule {text!r}: choose from {names}"
        )
    return text


def output_path(text: str) -> Path:
    """A file that can be written, which is checked before the command works for it."""
    path = Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written")
    return path
