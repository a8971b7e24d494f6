"""A picture as PNG or PDF, through matplotlib."""

import os
from collections.abc import Sequence
from typing import Any

from . import _palette as palette
from ._layout import picture
from ._shapes import Path, Picture, Rect

_PIXELS_PER_INCH = 100
_POINT = 72 / _PIXELS_PER_INCH  # of a pixel
_ALIGN = {"start": "left", "middle": "center", "end": "right"}


def png(
    timelines: Any,
    path: str | os.PathLike[str],
    *,
    titles: Sequence[str] | None = None,
    width: float | None = None,
) -> None:
    """Draws timelines into a PNG or PDF file: the picture of `svg`.

    Args:
      timelines: one or several, or schedules, with the default costs; or a plan of
        `jpipe.plan`, drawn as bars of time and memory above its timeline; or a profile,
        drawn as bars.
      path: of the file to write; its ending decides which kind, such as ``.png``.
      titles: one for each; default: their names.
      width: in pixels; default: as for `svg`. A PNG has twice as many dots.

    Raises:
      ImportError: without matplotlib; the message names what to type.
      ValueError: if there is no timeline, another number of titles, or an ending that
        matplotlib does not know.
    """
    drawn = picture(timelines, titles, width)
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "PNG and PDF are drawn by matplotlib, which is not installed: "
            "pip install 'jpipe[plot]', or write SVG, which needs nothing"
        ) from error
    # What is set for other figures, such as a font without these letters, stays out.
    default: Any = matplotlib.rcParamsDefault
    with matplotlib.rc_context(default | {"hatch.linewidth": 1.0}):
        # Without pyplot: no window, no figure that somebody would have to close.
        size = drawn.width / _PIXELS_PER_INCH, drawn.height / _PIXELS_PER_INCH
        figure = Figure(figsize=size, facecolor="white")
        _draw(drawn, figure.add_axes((0, 0, 1, 1)))
        figure.savefig(path, dpi=2 * _PIXELS_PER_INCH)


def _draw(drawn: Picture, axes: Any) -> None:
    axes.set(xlim=(0, drawn.width), ylim=(drawn.height, 0))
    axes.set_axis_off()
    for order, shape in enumerate(drawn.shapes):
        if isinstance(shape, Rect):
            axes.add_patch(_rectangle(shape, order))
        elif isinstance(shape, Path):
            x, y = zip(*shape.points, strict=True)
            width = shape.width * _POINT
            axes.fill(x, y, color=shape.fill, linewidth=0, zorder=order)
            axes.plot(x, y, color=shape.stroke, linewidth=width, zorder=order)
        else:
            axes.text(
                *shape[:3],
                fontsize=shape.size * _POINT,
                color=shape.fill,
                ha=_ALIGN[shape.anchor],
                va="baseline",
                weight="bold" if shape.bold else "normal",
                zorder=order,
                parse_math=False,
            )


def _rectangle(shape: Rect, order: int) -> Any:
    from matplotlib.patches import Rectangle

    edge = "white" if shape.edge else "none"
    style: dict[str, Any] = {"facecolor": shape.fill, "edgecolor": edge}
    if shape.fill == palette.IDLE:
        style = {"fill": False, "hatch": "//////", "edgecolor": palette.HATCH}
    line = shape.edge * _POINT
    where, width, height = shape[:2], shape.width, shape.height
    return Rectangle(where, width, height, linewidth=line, zorder=order, **style)
