"""Writes a picture as SVG, by hand: no dependency."""

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import groupby
from typing import Any

from . import _palette as palette
from ._elements import Path, Rect, Shape, Text
from ._layout import lay_out

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

    The picture has a row for each rank, with a box for each action and, below, the
    memory that the rank holds. Several timelines are drawn one below the other on one
    axis, each from its own first start, such as the prediction above the measurement. A
    mouse that rests on a box shows the action and its times.

    Args:
      timelines: one or several timelines, or schedules, with the default costs; or a
        plan of `jpipe.plan`, drawn as bars of time and memory above its timeline.
      titles: a title for each timeline; default: their names.
      width: the width in pixels; default: what the actions need for their numbers, at
        most 2000. If boxes are too narrow, numbers are left out.

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
    picture = lay_out(timelines, titles, width)
    head = _HEAD.format(
        width=_format_number(picture.width),
        height=_format_number(picture.height),
        description=escape(picture.description),
        hatch=palette.HATCH,
    )
    return "\n".join([head, *_write_groups(picture.shapes), "</svg>\n"])


def _write_groups(shapes: Iterable[Shape]) -> Iterator[str]:
    """Yields the lines of all shapes.

    Neighbours of one style share their attributes, which saves half of the bytes.
    """
    for style, group in groupby(shapes, _format_style):
        yield f"<g {style}>"
        yield from map(_format_element, group)
        yield "</g>"


def _format_style(shape: Shape) -> str:
    """The attributes that neighbours may share."""
    if isinstance(shape, Rect):
        outline = f' stroke="#fff" stroke-width="{_format_number(shape.edge)}"'
        return f'fill="{shape.fill}"' + (outline if shape.edge else "")
    if isinstance(shape, Path):
        width = f' stroke-width="{_format_number(shape.width)}"'
        return f'fill="{shape.fill}" stroke="{shape.stroke}"' + width
    weight = ' font-weight="bold"' if shape.bold else ""
    return (
        f'fill="{shape.fill}" font-size="{_format_number(shape.size)}" '
        f'text-anchor="{shape.anchor}"{weight}'
    )


def _format_element(shape: Shape) -> str:
    """The element of a shape, without its style."""
    if isinstance(shape, Path):
        points = [f"{_format_number(x)},{_format_number(y)}" for x, y in shape.points]
        return f'<polyline points="{" ".join(points)}"/>'
    x = _format_number(shape.x)
    y = _format_number(shape.y)
    if isinstance(shape, Text):
        return f'<text x="{x}" y="{y}">{escape(shape.text, quote=False)}</text>'
    width = _format_number(shape.width)
    height = _format_number(shape.height)
    rect = f'<rect x="{x}" y="{y}" width="{width}" height="{height}"'
    tooltip = escape(shape.tooltip, quote=False)
    return f"{rect}><title>{tooltip}</title></rect>" if tooltip else f"{rect}/>"


def _format_number(value: float) -> str:
    """Formats pixels to a hundredth, which is more than anyone sees."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
