"""A picture as PNG or PDF, through matplotlib."""

import os
from collections.abc import Sequence
from pathlib import Path as FilePath
from typing import Any

from ._layout import picture
from ._shapes import Path, Picture, Rect, Text

_SUFFIXES = (".png", ".pdf")
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
      timelines: one or several, or schedules, with the default costs; or a plan: from
        `jpipe.plan`, drawn as bars of time and memory above its timeline, or from
        `jpipe.replicate`, as its timeline; or a profile, drawn as bars.
      path: of the file to write; its ending, ``.png`` or ``.pdf``, decides which.
      titles: one for each; default: their names.
      width: in pixels; default: as for `svg`. A PNG has twice as many dots.

    Raises:
      ImportError: without matplotlib; the message names what to type.
      ValueError: if there is no timeline, another number of titles, or an ending that
        is neither.
    """
    suffix = FilePath(path).suffix.lower()
    if suffix not in _SUFFIXES:
        raise ValueError(f"{os.fspath(path)}: the name must end in .png or .pdf")
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
        figure.savefig(path, format=suffix[1:], dpi=2 * _PIXELS_PER_INCH)


def _draw(drawn: Picture, axes: Any) -> None:
    axes.set(xlim=(0, drawn.width), ylim=(drawn.height, 0))
    axes.set_axis_off()
    for order, shape in enumerate(drawn.shapes):
        if isinstance(shape, Rect):
            axes.add_patch(_rectangle(shape, order))
        elif isinstance(shape, Path):
            _draw_path(axes, shape, order)
        else:
            _write(axes, shape, order)


def _rectangle(shape: Rect, order: int) -> Any:
    from matplotlib.patches import Rectangle

    edge = "white" if shape.edge else "none"
    style: dict[str, Any] = {"facecolor": shape.fill, "edgecolor": edge}
    if shape.hatched:
        style = {"fill": False, "hatch": "//////", "edgecolor": shape.fill}
    line = shape.edge * _POINT
    where, width, height = (shape.x, shape.y), shape.width, shape.height
    return Rectangle(where, width, height, linewidth=line, zorder=order, **style)


def _draw_path(axes: Any, shape: Path, order: int) -> None:
    x, y = zip(*shape.points, strict=True)
    if shape.fill != "none":
        axes.fill(x, y, color=shape.fill, linewidth=0, zorder=order)
    if shape.stroke != "none":
        width = shape.width * _POINT
        axes.plot(x, y, color=shape.stroke, linewidth=width, zorder=order)


def _write(axes: Any, shape: Text, order: int) -> None:
    axes.text(
        shape.x,
        shape.y,
        shape.text,
        fontsize=shape.size * _POINT,
        color=shape.fill,
        ha=_ALIGN[shape.anchor],
        va="baseline",
        weight="bold" if shape.bold else "normal",
        zorder=order,
        parse_math=False,
    )
