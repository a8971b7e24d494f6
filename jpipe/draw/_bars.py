"""Columns of bars, each made of parts, with a name for each row."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from . import _palette as palette
from ._frame import LABEL
from ._legend import legend
from ._shapes import Picture, Rect, Shape, Text, centred, shortened, text_width

_TOP, _BAR, _PITCH = 46.0, 22.0, 30.0
_MARGIN, _BETWEEN = 14.0, 28.0
_BEFORE = 8.0  # between a name and its bars
# So much of the page the names take at most; longer ones are cut.
_NAMES = 0.45


class Part(NamedTuple):
    """A part of a bar; its colour, and what a mouse that rests on it shows."""

    size: float
    fill: str
    tooltip: str


class Bar(NamedTuple):
    """Parts one after the other, and what is written behind them."""

    parts: Sequence[Part]
    text: str


class Column(NamedTuple):
    """Bars below each other, on one scale.

    Attributes:
      head: above them.
      bars: from top to bottom.
      whole: of what bars are parts, the rest hatched; ``None``: of nothing.
    """

    head: str
    bars: Sequence[Bar]
    whole: float | None


def picture(
    title: str,
    names: Sequence[str],
    columns: Sequence[Column],
    colours: Mapping[str, str],
    width: float,
) -> Picture:
    """Lays columns of bars out on a page.

    Args:
      title: above all.
      names: of the rows.
      columns: from left to right.
      colours: by what they mean.
      width: of the page.
    """
    bottom = _TOP + len(names) * _PITCH
    longest = max(text_width(name, LABEL) for name in names)
    left = min(_MARGIN + longest + _BEFORE, _NAMES * width)
    entries, height = legend(colours, left, bottom, width)
    shown = shortened(title, 13.0 * 1.1, width - 2 * _MARGIN)  # bold is wider
    shapes: list[Shape] = [Text(_MARGIN, 18.0, shown, 13.0, palette.INK, bold=True)]
    for i, name in enumerate(names):
        text = shortened(name, LABEL, left - _BEFORE - _MARGIN)
        x, y = left - _BEFORE, _middle(i)
        shapes.append(Text(x, y, text, LABEL, palette.INK, "end"))
    after = [8 + max(text_width(bar.text, LABEL) for bar in x.bars) for x in columns]
    gaps = _BETWEEN * (len(columns) - 1)
    wide = (width - left - sum(after) - gaps - _MARGIN) / len(columns)
    for column, behind in zip(columns, after, strict=True):
        shapes += _column(column, left, wide)
        left += wide + behind + _BETWEEN
    return Picture(width, height + 8, (*shapes, *entries), title)


def _column(column: Column, left: float, wide: float) -> Iterator[Shape]:
    yield Text(left, _TOP - 10, column.head, LABEL - 1, palette.GREY)
    sizes = [sum(part.size for part in bar.parts) for bar in column.bars]
    scale = wide / (column.whole or max(sizes) or 1.0)
    for i, bar in enumerate(column.bars):
        top, x = _TOP + i * _PITCH, left
        if column.whole:
            yield Rect(left, top, wide, _BAR, palette.IDLE)
        for part in bar.parts:
            length = part.size * scale
            yield Rect(x, top, length, _BAR, part.fill, part.tooltip)
            x += length
        yield Text(left + wide + 8, _middle(i), bar.text, LABEL, palette.INK)


def _middle(row: int) -> float:
    """The baseline of the texts of a row."""
    return centred(_TOP + row * _PITCH + _BAR / 2, LABEL)
