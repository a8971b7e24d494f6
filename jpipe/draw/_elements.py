"""The shapes of a picture: rectangles, paths and texts, in pixels from the top left."""

from typing import NamedTuple

# The width of a letter, as a fraction of the font size, in the widest of the usual
# fonts (DejaVu Sans, Verdana): a text that fits by this measure fits in any of them.
_LETTER = 0.65
# The width of bold letters, as a multiple of that of others.
BOLD = 1.1
# How far the baseline of digits and capitals is below their middle, likewise.
_BASELINE = 0.36


class Rect(NamedTuple):
    """A filled rectangle; a mouse that rests on it shows ``tooltip``."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    tooltip: str = ""
    edge: float = 0.0  # the width of a white outline


class Path(NamedTuple):
    """A line through points, or the area that it surrounds."""

    points: tuple[tuple[float, float], ...]
    fill: str = "none"
    stroke: str = "none"
    width: float = 1.0


class Text(NamedTuple):
    """A line of text; ``y`` is that of its baseline."""

    x: float
    y: float
    text: str
    size: float
    fill: str
    anchor: str = "start"  # or "middle", "end"
    bold: bool = False


Shape = Rect | Path | Text


class Picture(NamedTuple):
    """Shapes from back to front, on a white page."""

    width: float
    height: float
    shapes: tuple[Shape, ...]
    description: str


def measure_text(text: str, size: float) -> float:
    """The width of a text, at most, in pixels."""
    return _LETTER * size * len(text)


def shorten(text: str, size: float, width: float) -> str:
    """The text, or as much of it as fits, with an ellipsis."""
    # A width that was computed from this text may be less by a rounding error.
    num_fitting = int(width / measure_text("0", size) + 1e-6)
    if len(text) <= num_fitting:
        return text
    return text[: num_fitting - 1].rstrip() + "\N{HORIZONTAL ELLIPSIS}"


def center_baseline(y: float, size: float) -> float:
    """The baseline of a text whose digits and capitals are centered on ``y``."""
    return y + _BASELINE * size
