"""Seconds, bytes and tables for people."""

from collections.abc import Container, Sequence


def columns(rows: Sequence[Sequence[str]], left: Container[int]) -> str:
    """Rows with cells below each other; the columns at the left begin together."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def duration(seconds: float) -> str:
    """Seconds with three digits: ``1.5 ms``."""
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns" if seconds else "0 s"


def many(number: int, noun: str) -> str:
    """So many of something: ``1 rank``, ``2 micro-batches``."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{plural if number != 1 else ''}"


def share(fraction: float) -> str:
    """A part of a whole: ``12.5 %``."""
    return f"{fraction:.1%}".replace("%", " %")


def size(num_bytes: int) -> str:
    """Bytes in powers of 1024: ``1.5 MiB``."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
