"""Lays out columns of bars, each made of parts, with a name for each row."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from . import _palette as palette
from ._elements import (
    BOLD,
    Picture,
    Rect,
    Shape,
    Text,
    center_baseline,
    measure_text,
    shorten,
)
from ._frame import LABEL
from ._legend import lay_out_legend

_TITLE = 13.0
_TOP = 46.0
_BAR_HEIGHT = 22.0
_ROW_HEIGHT = 30.0
_MARGIN = 14.0
_COLUMN_SPACE = 28.0
# Between a name and its bars, and between bars and their text.
_TEXT_SPACE = 8.0
# The most that names take of the width; longer ones are shortened.
_MAX_NAMES = 0.45


class Part(NamedTuple):
    """A part of a bar; a mouse that rests on it shows ``tooltip``."""

    size: float
    fill: str
    tooltip: str


class Bar(NamedTuple):
    """Parts one after the other, and a text at the right."""

    parts: Sequence[Part]
    text: str


class Column(NamedTuple):
    """Bars below each other, on one scale.

    Attributes:
      head: the text above them.
      bars: the bars from top to bottom.
      whole: the size of a full bar, of which what is missing is hatched; ``None``: the
        largest bar is full.
    """

    head: str
    bars: Sequence[Bar]
    whole: float | None


def lay_out_bars(
    title: str,
    *,
    names: Sequence[str],
    columns: Sequence[Column],
    colours: Mapping[str, str],
    width: float,
) -> Picture:
    """Lays out columns of bars on a page.

    Args:
      title: the text above all.
      names: the name of each row.
      columns: the columns from left to right.
      colours: meaning -> colour, for the legend.
      width: the width of the page.
    """
    longest = max(measure_text(name, LABEL) for name in names)
    left = min(_MARGIN + longest + _TEXT_SPACE, _MAX_NAMES * width)

    shown = shorten(title, _TITLE * BOLD, width - 2 * _MARGIN)
    shapes: list[Shape] = [
        Text(_MARGIN, 18.0, shown, size=_TITLE, fill=palette.INK, bold=True)
    ]
    for row, name in enumerate(names):
        text = Text(
            left - _TEXT_SPACE,
            _row_baseline(row),
            shorten(name, LABEL, left - _TEXT_SPACE - _MARGIN),
            size=LABEL,
            fill=palette.INK,
            anchor="end",
        )
        shapes.append(text)

    # The texts at the right of each column, then the bars in what is left.
    text_widths = [
        _TEXT_SPACE + max(measure_text(bar.text, LABEL) for bar in column.bars)
        for column in columns
    ]
    spaces = _COLUMN_SPACE * (len(columns) - 1)
    bar_width = (width - left - sum(text_widths) - spaces - _MARGIN) / len(columns)
    x = left
    for column, text_width in zip(columns, text_widths, strict=True):
        shapes += _lay_out_column(column, x, bar_width)
        x += bar_width + text_width + _COLUMN_SPACE

    bottom = _TOP + len(names) * _ROW_HEIGHT
    entries, height = lay_out_legend(colours, left=left, top=bottom, right=width)
    return Picture(width, height + 8, (*shapes, *entries), description=title)


def _lay_out_column(column: Column, left: float, width: float) -> Iterator[Shape]:
    """Yields the shapes of a column whose full bars have this width."""
    yield Text(left, _TOP - 10, column.head, size=LABEL - 1, fill=palette.GREY)
    sizes = [sum(part.size for part in bar.parts) for bar in column.bars]
    scale = width / (column.whole or max(sizes) or 1.0)
    for row, bar in enumerate(column.bars):
        top = _TOP + row * _ROW_HEIGHT
        if column.whole:
            yield Rect(left, top, width, _BAR_HEIGHT, fill=palette.IDLE)
        x = left
        for part in bar.parts:
            length = part.size * scale
            yield Rect(
                x, top, length, _BAR_HEIGHT, fill=part.fill, tooltip=part.tooltip
            )
            x += length
        yield Text(
            left + width + _TEXT_SPACE,
            _row_baseline(row),
            bar.text,
            size=LABEL,
            fill=palette.INK,
        )


def _row_baseline(row: int) -> float:
    """The baseline of the texts of a row."""
    return center_baseline(_TOP + row * _ROW_HEIGHT + _BAR_HEIGHT / 2, LABEL)
