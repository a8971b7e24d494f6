"""Lays out a legend: the meaning of the colours of a picture."""

from collections.abc import Mapping

from . import _palette as palette
from ._elements import Rect, Shape, Text, measure_text
from ._frame import LABEL

_SWATCH_WIDTH = 16.0
_SWATCH_HEIGHT = 10.0
_LINE = 18.0


def lay_out_legend(
    colours: Mapping[str, str], *, left: float, top: float, right: float
) -> tuple[list[Shape], float]:
    """Lays out entries from left to right, in as many lines as they need.

    Args:
      colours: text -> its colour; empty for a text without a swatch.
      left: the x at which lines begin.
      top: the y of the first line.
      right: the x by which lines end.

    Returns:
      The shapes, and the y at which the last line ends.
    """
    shapes: list[Shape] = []
    x = left
    y = top
    for text, fill in colours.items():
        swatch = _SWATCH_WIDTH + 6 if fill else 0.0
        width = swatch + measure_text(text, LABEL)
        if x > left and x + width > right:
            x = left
            y += _LINE
        if fill:
            shapes.append(Rect(x, y + 3, _SWATCH_WIDTH, _SWATCH_HEIGHT, fill=fill))
        shapes.append(Text(x + swatch, y + 12, text, size=LABEL, fill=palette.INK))
        x += width + 12
    return shapes, y + _LINE
