"""Arguments of commands: how they are written, and what to type in place of others."""

import argparse
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .. import schedules
from ..schedules._catalogue import key_of

_BYTES = {
    **{"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12},
    **{"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40},
}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9}
# Fewer bytes or operations, of a device, without a unit: it was forgotten.
_FEW = 1e6


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


def size(text: str) -> int:
    """Bytes with a unit, such as 16GiB; a plain number where there are millions."""
    value = round(_quantity(text, _BYTES, _FEW, "bytes, such as 16GiB"))
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: needs at least one byte")
    return value


def rate(text: str) -> float:
    """Bytes per second, likewise."""
    value = _quantity(
        text.removesuffix("/s"), _BYTES, _FEW, "bytes per second, such as 50GB"
    )
    return _above_zero(text, value)


def speed(text: str) -> float:
    """Floating-point operations per second."""
    says = "operations per second, such as 1e14"
    return _above_zero(text, _quantity(text, {}, _FEW, says))


def duration(text: str) -> float:
    """Seconds, from a number with a unit, such as 5us."""
    return _quantity(text, _SECONDS, math.inf, "a time, such as 5us")


def _quantity(text: str, units: Mapping[str, float], least: float, says: str) -> float:
    """A number with a unit; without one if it is 0 or at least as large as that."""
    match = re.fullmatch(r"(\d+\.?\d*(?:[eE][+-]?\d+)?)\s*([^\W\d]*)", text.strip())
    if not match or (match[2] and match[2] not in units):
        known = f"; units: {', '.join(dict.fromkeys(units))}" if units else ""
        raise argparse.ArgumentTypeError(f"{text!r}: write {says}{known}")
    value = float(match[1])
    if not match[2] and 0 < value < least:
        which = "which unit?" if units else "so few?"
        raise argparse.ArgumentTypeError(f"{text!r}: {which} write {says}")
    value *= units[match[2]] if match[2] else 1
    if value == math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: too large; write {says}")
    return value


def _above_zero(text: str, value: float) -> float:
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r}: needs more than 0")
    return value


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


def schedule_key(text: str) -> str:
    """The name by which the catalogue has a schedule."""
    key = key_of(schedule_name(text))
    assert key is not None
    return key


def several(read: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """How several of what ``read`` reads are read, with commas between them."""
    return lambda text: tuple(read(part.strip()) for part in text.split(","))


def known() -> str:
    """The names of the catalogue."""
    return ", ".join(schedules.BY_NAME)
