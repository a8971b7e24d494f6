"""Rows of two bars, of time and of bytes, each made of parts."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from . import _palette as palette
from ._frame import LABEL
from ._legend import legend
from ._shapes import Picture, Rect, Shape, Text, centred, shortened, text_width

_TOP, _BAR, _PITCH = 46.0, 22.0, 30.0
_MARGIN, _LEFT, _BETWEEN = 14.0, 280.0, 28.0
_NAME = _LEFT - 8 - _MARGIN  # so wide is one beside the bars


class Part(NamedTuple):
    """A part of a bar; its colour, and what a mouse that rests on it shows."""

    size: float
    fill: str
    tooltip: str


class Bar(NamedTuple):
    """Parts one after the other, and what is written behind them."""

    parts: tuple[Part, ...]
    text: str

    @property
    def size(self) -> float:
        """Of all parts."""
        return sum(part.size for part in self.parts)


class Row(NamedTuple):
    """A bar of time and one of bytes, and what is written before them."""

    name: str
    bars: tuple[Bar, Bar]


class Bars(NamedTuple):
    """Rows below each other, on one scale of seconds and one of bytes.

    Attributes:
      title: above all.
      heads: above the bars of time, and above those of bytes.
      rows: from top to bottom.
      legend: the colours, by what they mean.
      wholes: the seconds and the bytes of which bars are parts, the rest hatched;
        ``None`` if of nothing.
    """

    title: str
    heads: tuple[str, str]
    rows: tuple[Row, ...]
    legend: Mapping[str, str]
    wholes: tuple[float | None, float | None] = (None, None)


def picture(bars: Bars, width: float) -> Picture:
    """Lays bars out on a page of that width."""
    bottom = _TOP + len(bars.rows) * _PITCH
    entries, height = legend(bars.legend, _LEFT, bottom, width)
    return Picture(width, height + 8, (*_shapes(bars, width), *entries), bars.title)


def _shapes(bars: Bars, width: float) -> Iterator[Shape]:
    title = shortened(bars.title, 13.0 * 1.1, width - 2 * _MARGIN)  # bold is wider
    yield Text(_MARGIN, 18.0, title, 13.0, palette.INK, bold=True)
    for i, row in enumerate(bars.rows):
        name = shortened(row.name, LABEL, _NAME)
        yield Text(_LEFT - 8, _middle(i), name, LABEL, palette.INK, "end")
    columns = list(zip(*(row.bars for row in bars.rows), strict=True))
    after = [8 + max(text_width(x.text, LABEL) for x in column) for column in columns]
    wide = (width - _LEFT - sum(after) - _BETWEEN - _MARGIN) / 2
    lefts = _LEFT, _LEFT + wide + after[0] + _BETWEEN
    each = zip(bars.heads, bars.wholes, columns, lefts, strict=True)
    for head, whole, column, left in each:
        yield Text(left, _TOP - 10, head, LABEL - 1, palette.GREY)
        most = whole or max(bar.size for bar in column) or 1.0
        for i, bar in enumerate(column):
            top, x = _TOP + i * _PITCH, left
            if whole:
                yield Rect(left, top, wide, _BAR, palette.IDLE)
            for part in bar.parts:
                length = wide * part.size / most
                yield Rect(x, top, length, _BAR, part.fill, part.tooltip)
                x += length
            yield Text(left + wide + 8, _middle(i), bar.text, LABEL, palette.INK)


def _middle(row: int) -> float:
    """The baseline of the texts of a row."""
    return centred(_TOP + row * _PITCH + _BAR / 2, LABEL)
