"""A picture as SVG, written by hand: no dependency."""

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import groupby
from typing import Any

from . import _palette as palette
from ._layout import picture
from ._shapes import Path, Rect, Shape, Text

_HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" \
viewBox="0 0 {width} {height}" role="img" aria-label="{description}" \
font-family="Helvetica, Arial, sans-serif">
<defs><pattern id="jpipe-idle" width="5" height="5" patternUnits="userSpaceOnUse" \
patternTransform="rotate(45)"><path d="M0 0V5" stroke="{hatch}" stroke-width="1.6"/>\
</pattern></defs>
<rect width="{width}" height="{height}" fill="#fff"/>"""


def svg(
    timelines: Any,
    *,
    titles: Sequence[str] | None = None,
    width: float | None = None,
) -> str:
    """Draws timelines as SVG.

    A row for each rank, a box for each action, and below it the memory that the rank
    holds. Several timelines stand one below the other on one axis, each from its own
    first start, so that what was predicted can stand above what was measured. A mouse
    that rests on a box shows the action and its times.

    Args:
      timelines: one or several, or schedules, with the default costs; or a plan of
        `jpipe.plan`, drawn as bars of time and memory above its timeline.
      titles: one for each; default: their names.
      width: in pixels; default: what the actions need for their numbers, at most
        2000. Where boxes are too narrow, numbers are left out.

    Returns:
      The text of an SVG file.

    Raises:
      ValueError: if there is no timeline, or another number of titles.

    Example:
      >>> from jpipe import schedules
      >>> text = svg(schedules.one_f_one_b(4, 8).simulate())
      >>> text.count("<title>1F")
      8
    """
    drawn = picture(timelines, titles, width)
    head = _HEAD.format(
        width=_number(drawn.width),
        height=_number(drawn.height),
        description=escape(drawn.description),
        hatch=palette.HATCH,
    )
    return "\n".join([head, *_groups(drawn.shapes), "</svg>\n"])


def _groups(shapes: Iterable[Shape]) -> Iterator[str]:
    """Neighbours that look the same share their attributes: half of the bytes."""
    for style, group in groupby(shapes, _style):
        yield f"<g {style}>"
        yield from map(_element, group)
        yield "</g>"


def _style(shape: Shape) -> str:
    if isinstance(shape, Rect):
        outline = f' stroke="#fff" stroke-width="{_number(shape.edge)}"'
        return f'fill="{shape.fill}"' + (outline if shape.edge else "")
    if isinstance(shape, Path):
        width = f' stroke-width="{_number(shape.width)}"'
        return f'fill="{shape.fill}" stroke="{shape.stroke}"' + width
    weight = ' font-weight="bold"' if shape.bold else ""
    return (
        f'fill="{shape.fill}" font-size="{_number(shape.size)}" '
        f'text-anchor="{shape.anchor}"{weight}'
    )


def _element(shape: Shape) -> str:
    if isinstance(shape, Text):
        x, y = map(_number, (shape.x, shape.y))
        return f'<text x="{x}" y="{y}">{escape(shape.text, quote=False)}</text>'
    if isinstance(shape, Path):
        points = " ".join(f"{_number(x)},{_number(y)}" for x, y in shape.points)
        return f'<polyline points="{points}"/>'
    x, y, width, height = map(_number, shape[:4])
    box = f'<rect x="{x}" y="{y}" width="{width}" height="{height}"'
    tooltip = escape(shape.tooltip, quote=False)
    return f"{box}><title>{tooltip}</title></rect>" if tooltip else f"{box}/>"


def _number(value: float) -> str:
    """A hundredth of a pixel is more than anyone sees."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
