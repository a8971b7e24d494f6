"""Formats seconds, bytes, counts, types and tables for people."""

from collections.abc import Container, Sequence
from typing import Any


def format_table(rows: Sequence[Sequence[str]], left: Container[int]) -> str:
    """Formats rows as a table with aligned columns.

    A column whose cells are all empty below its head, in the first row, is left out.

    Args:
      rows: cells; the first row is the head.
      left: indices of the columns that are aligned to the left.
    """
    columns = []
    for index, cells in enumerate(zip(*rows, strict=True)):
        width = max(map(len, cells))
        if not any(cells[1:]) and len(rows) > 1:
            continue
        if index in left:
            columns.append([cell.ljust(width) for cell in cells])
        else:
            columns.append([cell.rjust(width) for cell in cells])
    return "\n".join("  ".join(row).rstrip() for row in zip(*columns, strict=True))


def format_seconds(seconds: float) -> str:
    """Formats seconds with three digits: ``1.5 ms``."""
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns" if seconds else "0 s"


def format_count(number: int, noun: str) -> str:
    """Formats a count with its noun: ``1 rank``, ``2 micro-batches``."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{plural if number != 1 else ''}"


def format_percent(fraction: float) -> str:
    """Formats a fraction: ``12.5 %``."""
    return f"{fraction:.1%}".replace("%", " %")


def format_bytes(num_bytes: int) -> str:
    """Formats bytes in powers of 1024: ``1.5 MiB``."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def format_type(value: Any) -> str:
    """Formats the type of a value with its article: ``an int``, ``a tuple``."""
    name = type(value).__name__
    # "ndarray" is read by its letters.
    has_vowel = name.lower().startswith((*"aeiou", "ndarray"))
    return f"an {name}" if has_vowel else f"a {name}"
