"""Parses the arguments of commands; errors tell what to type."""

import argparse
import math
import os
import re
from pathlib import Path

from .. import schedules
from ..schedules._catalogue import find_catalogue_key

# Unit -> its seconds.
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9}


class CommandError(ValueError):
    """Well-formed arguments that do not fit; shown without traceback."""


def parse_count(text: str) -> int:
    """Parses a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r}: write a whole number of at least 1, such as 4"
        )
    return int(text)


def parse_number(text: str) -> int:
    """Parses a whole number of at least 0."""
    return 0 if text == "0" else parse_count(text)


def parse_duration(text: str) -> float:
    """Parses a number with a unit of time, such as 5us; returns seconds.

    0 needs no unit.
    """
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


def parse_schedule_name(text: str) -> str:
    """Returns the text if it names a schedule of the catalogue."""
    if find_catalogue_key(text) is None:
        names = ", ".join(schedules.BY_NAME)
        raise argparse.ArgumentTypeError(
            f"unknown schedule {text!r}: choose from {names}"
        )
    return text


def parse_output_path(text: str) -> Path:
    """Returns the path of a file, checked to be writable before any work is done."""
    path = Path(text)
    existing = path if path.exists() else path.parent
    if path.is_dir() or not os.access(existing, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written")
    return path
