"""A legend: what the colours of a picture mean."""

from collections.abc import Mapping

from . import _palette as palette
from ._frame import LABEL
from ._shapes import Rect, Shape, Text, text_width

_SWATCH, _LINE = 16.0, 18.0


def legend(
    entries: Mapping[str, str], left: float, top: float, right: float
) -> tuple[list[Shape], float]:
    """The entries, from left to right in as many lines as they need.

    Args:
      entries: the colour of each text; empty of one without.
      left: where lines begin.
      top: where the first one is.
      right: where lines end at most.

    Returns:
      The shapes, and where the last line ends.
    """
    shapes: list[Shape] = []
    x, y = left, top
    for text, fill in entries.items():
        swatch = _SWATCH + 6 if fill else 0.0
        width = swatch + text_width(text, LABEL)
        if x > left and x + width > right:
            x, y = left, y + _LINE
        if fill:
            shapes.append(Rect(x, y + 3, _SWATCH, 10.0, fill))
        shapes.append(Text(x + swatch, y + 12, text, LABEL, palette.INK))
        x += width + 12
    return shapes, y + _LINE
