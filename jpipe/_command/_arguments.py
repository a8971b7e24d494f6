"""Arguments of commands: how they are written, and what to type in place of others."""

import argparse
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from .. import schedules
from ..schedules._catalogue import key_of

_BYTES = {
    **{"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12},
    **{"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40},
}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9}


def count(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r}: write a whole number of at least 1, such as 4"
        )
    return int(text)


def size(text: str) -> int:
    """Bytes, or bytes per second, with a unit, such as 16GiB."""
    return round(_quantity(text.removesuffix("/s"), _BYTES, "bytes, such as 16GiB"))


def duration(text: str) -> float:
    """Seconds, from a number with a unit, such as 5us."""
    return _quantity(text, _SECONDS, "a time, such as 5us")


def _quantity(text: str, units: Mapping[str, float], expected: str) -> float:
    """A number with a unit; 0 needs none."""
    match = re.fullmatch(r"(\d+\.?\d*(?:[eE][+-]?\d+)?)\s*([^\W\d]*)", text.strip())
    value = float(match[1]) * units.get(match[2], math.inf) if match else math.inf
    if match and not match[2] and not float(match[1]):
        return 0.0
    if not math.isfinite(value):
        known = ", ".join(units)
        raise argparse.ArgumentTypeError(f"{text!r}: write {expected}; units: {known}")
    return value


def schedule_name(text: str) -> str:
    """The name of a schedule of the catalogue."""
    if key_of(text) is None:
        names = ", ".join(schedules.BY_NAME)
        message = f"unknown schedule {text!r}: choose from {names}"
        raise argparse.ArgumentTypeError(message)
    return text


def several(read: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """How several of what ``read`` reads are read, with commas between them."""
    return lambda text: tuple(read(part.strip()) for part in text.split(","))
