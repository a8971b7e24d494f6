"""What a picture is made of: rectangles, paths and texts, in pixels from the top."""

from typing import NamedTuple

# In parts of the font size, for the widest of the usual fonts (DejaVu Sans, Verdana):
# what fits by this measure fits in any of them.
_NARROW, _DIGIT, _NORMAL, _UPPER, _WIDE = 0.42, 0.64, 0.65, 0.78, 1.0


class Rect(NamedTuple):
    """A filled or hatched rectangle; a mouse that rests on it shows ``tooltip``."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    tooltip: str = ""
    hatched: bool = False
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


def lowered(shape: Shape, by: float) -> Shape:
    """The same further down."""
    if isinstance(shape, Path):
        return shape._replace(points=tuple((x, y + by) for x, y in shape.points))
    return shape._replace(y=shape.y + by)


def text_width(text: str, size: float) -> float:
    """How wide a text is at most, in pixels."""

    def em(letter: str) -> float:
        if letter in "mwMW%@":
            return _WIDE
        if letter.isdigit():
            return _DIGIT
        if letter.isupper():
            return _UPPER
        return _NARROW if letter in "fijlrt .,:;|!'()[]-" else _NORMAL

    return size * sum(map(em, text))


def shortened(text: str, size: float, width: float) -> str:
    """The text, or as much of it as fits with an ellipsis after it."""
    if text_width(text, size) <= width:
        return text
    while text and text_width(text + "\N{HORIZONTAL ELLIPSIS}", size) > width:
        text = text[:-1]
    return text.rstrip() + "\N{HORIZONTAL ELLIPSIS}"


def centred(y: float, size: float) -> float:
    """The baseline of a text whose digits and capitals are centred on ``y``."""
    return y + 0.36 * size
