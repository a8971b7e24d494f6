"""Arguments of commands: how they are written, and what to type in place of others."""

import argparse
import math
from pathlib import Path

from .. import schedules


def time(text: str, says: str) -> float:
    """A time in whatever unit; else an error that says what to type."""
    try:
        time = float(text)
    except ValueError:
        time = math.nan
    if not 0 <= time < math.inf:
        raise ValueError(says)
    return time


def count(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r}: write a whole number of at least 1, such as 4"
        )
    return int(text)


def picture_path(text: str) -> Path:
    """Where to draw with matplotlib."""
    if Path(text).suffix.lower() not in (".png", ".pdf"):
        raise argparse.ArgumentTypeError(f"{text!r}: must end in .png or .pdf")
    return Path(text)


def schedule_name(text: str) -> str:
    """The name of a schedule of the catalogue."""
    try:
        schedules.named(text)
    except ValueError:
        says = f"unknown schedule {text!r}: choose {known()}"
        raise argparse.ArgumentTypeError(says) from None
    return text


def known() -> str:
    """The names of the catalogue."""
    return ", ".join(schedules.BY_NAME)
