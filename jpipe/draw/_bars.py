"""Rows of two bars, of time and of bytes, each made of parts."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ..schedules._units import size
from . import _palette as palette
from ._frame import LABEL
from ._shapes import Path, Picture, Rect, Shape, Text, centred, shortened, text_width

_TOP, _BAR, _PITCH, _LEGEND = 46.0, 22.0, 30.0, 26.0
_MARGIN, _LEFT, _BETWEEN = 14.0, 280.0, 28.0
_NAME = _LEFT - 8 - _MARGIN  # so wide is one beside the bars
_LIMIT = "#cc0000"
_FAR = 8  # times what is needed most


class Part(NamedTuple):
    """A part of a bar; its colour, and what a mouse that rests on it shows."""

    size: float
    fill: str
    tooltip: str


class Row(NamedTuple):
    """What is written before, between and behind the two bars, and their parts."""

    name: str
    times: tuple[Part, ...]
    time: str
    sizes: tuple[Part, ...]
    size: str


class Bars(NamedTuple):
    """Rows below each other, on one scale of seconds and one of bytes.

    Attributes:
      title: above all.
      heads: above the bars of time, and above those of bytes.
      rows: from top to bottom.
      legend: the colours, by what they mean.
      seconds: of which the bars of time are parts, the rest hatched; ``None`` if of
        nothing.
      limit: bytes at which a line is drawn; ``None`` for no line.
    """

    title: str
    heads: tuple[str, str]
    rows: tuple[Row, ...]
    legend: Mapping[str, str]
    seconds: float | None = None
    limit: int | None = None


class _Side(NamedTuple):
    """One of the two columns of bars: from where to where, and what its end is."""

    left: float
    right: float
    most: float

    def x(self, value: float) -> float:
        return self.left + (self.right - self.left) * value / (self.most or 1.0)


def picture(bars: Bars, width: float) -> Picture:
    """Lays bars out on a page of that width."""
    height = _TOP + len(bars.rows) * _PITCH + _LEGEND
    return Picture(width, height, tuple(_shapes(bars, width)), bars.title)


def _shapes(bars: Bars, width: float) -> Iterator[Shape]:
    after = [
        8 + max(text_width(text, LABEL) for text in column)
        for column in zip(*((row.time, row.size) for row in bars.rows), strict=True)
    ]
    part = (width - _LEFT - sum(after) - _BETWEEN - _MARGIN) / 2
    longest = max(sum(p.size for p in row.times) for row in bars.rows)
    largest = max(sum(p.size for p in row.sizes) for row in bars.rows)
    time = _Side(_LEFT, _LEFT + part, bars.seconds or longest)
    left = time.right + after[0] + _BETWEEN
    # Under a line that is far away nobody would see the bars.
    far = bars.limit is not None and bars.limit > _FAR * largest
    room = _Side(left, left + part, max(largest, 0 if far else bars.limit or 0))
    bottom = _TOP + len(bars.rows) * _PITCH
    title = shortened(bars.title, 13.0 * 1.1, width - 2 * _MARGIN)  # bold is wider
    yield Text(_MARGIN, 18.0, title, 13.0, palette.INK, bold=True)
    for head, side in zip(bars.heads, (time, room), strict=True):
        yield Text(side.left, _TOP - 10, head, LABEL - 1, palette.GREY)
    if bars.limit is not None:
        x, text = room.right, f"limit {size(bars.limit)}"
        if not far:
            x = room.x(bars.limit)
            yield Path(((x, _TOP - 6), (x, bottom)), stroke=_LIMIT, width=1.5)
        yield Text(x, _TOP - 10, text, LABEL - 1, _LIMIT, "middle")
    for i, row in enumerate(bars.rows):
        yield from _row(row, time, room, _TOP + i * _PITCH, bars.seconds is not None)
    yield from _legend(bars.legend, bottom)


def _row(
    row: Row, time: _Side, room: _Side, y: float, of_a_whole: bool
) -> Iterator[Shape]:
    middle = centred(y + _BAR / 2, LABEL)
    name = shortened(row.name, LABEL, _NAME)
    yield Text(_LEFT - 8, middle, name, LABEL, palette.INK, "end")
    if of_a_whole:
        whole = time.right - time.left
        yield Rect(time.left, y, whole, _BAR, palette.HATCH, hatched=True)
    for side, parts, text in ((time, row.times, row.time), (room, row.sizes, row.size)):
        now = 0.0
        for part in parts:
            left, right = side.x(now), side.x(now + part.size)
            yield Rect(left, y, right - left, _BAR, part.fill, part.tooltip)
            now += part.size
        behind = side.right if side is room or of_a_whole else side.x(now)
        if text:
            yield Text(behind + 8, middle, text, LABEL, palette.INK)


def _legend(legend: Mapping[str, str], y: float) -> Iterator[Shape]:
    x = _LEFT
    for text, fill in legend.items():
        yield Rect(x, y + 3, 14.0, 10.0, fill)
        yield Text(x + 19, y + 12, text, LABEL, palette.INK)
        x += 19 + text_width(text, LABEL) + 14
