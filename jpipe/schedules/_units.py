"""Seconds, bytes and tables for people."""

from collections.abc import Container, Sequence


def columns(rows: Sequence[Sequence[str]], left: Container[int]) -> str:
    """Rows with cells below each other; the columns at the left begin together.

    A column of which there is nothing but its head, in the first row, is left out.
    """
    columns = []
    for i, cells in enumerate(zip(*rows, strict=True)):
        width = max(map(len, cells))
        if any(cells[1:]) or len(rows) == 1:
            columns.append(
                [x.ljust(width) if i in left else x.rjust(width) for x in cells]
            )
    return "\n".join("  ".join(row).rstrip() for row in zip(*columns, strict=True))


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
