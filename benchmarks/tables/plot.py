"""A result as a picture: the published figures, ours beside them."""

from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..experiment import Experiment
from ..published import Benchmark
from ..result import KINDS as KINDS_OF_CELLS
from ..result import Result
from .kinds import KINDS
from .view import View

_COLORS = {
    "torchgpipe": "#9aa5b1",
    "published": "#9aa5b1",
    "GPipe": "#cfd6dd",
    "": "#1f6feb",
    "1F1B ": "#1a7f5a",
    "default ": "#8250df",
}
_TITLES = {"": "jpipe", "1F1B ": "with 1F1B", "default ": "with defaults"}
# Cells that were not measured are hatched.
_HATCHES = {"measured": "", "compiled": "..", "predicted": "///"}


class Bars(NamedTuple):
    """Bars of one color: a height for each row, ``None`` where there is none."""

    title: str
    color: str
    hatch: str
    heights: list[float | None]
    spreads: list[float]


def plot(benchmark: Benchmark, result: Result, path: Path) -> None:
    """Writes the picture of a result to a file that ends in ``.png``.

    There is none of a result without a bar of ours, such as speed-ups without the row
    that they are of.
    """
    figure = drawn(benchmark, result)
    _, titles = figure.axes[0].get_legend_handles_labels()
    if any("jpipe" in title for title in titles):
        figure.savefig(path, dpi=120)
    else:
        path.unlink(missing_ok=True)


def drawn(benchmark: Benchmark, result: Result) -> Figure:
    """Bars for each experiment that has any."""
    kind = KINDS[benchmark.kind]
    view = View(benchmark, result)
    groups = [*_published_bars(view, view.rows), *_our_bars(view, view.rows)]
    groups = [group for group in groups if any(group.heights)]
    indices = [
        index
        for index in range(len(view.rows))
        if any(group.heights[index] for group in groups)
    ]
    # The legend beside the bars takes two inches and a half.
    size = max(5.0, 1.1 * len(indices) + 2) + 2.5, 3.6
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    width = 0.8 / max(len(groups), 1)
    for number, group in enumerate(groups):
        _draw(axes, group, indices, number * width, width)
    is_crowded = len(indices) > 6
    axes.set_xticks(
        [place + 0.4 - width / 2 for place in range(len(indices))],
        [view.rows[index].name for index in indices],
        rotation=30 if is_crowded else 0,
        ha="right" if is_crowded else "center",
    )
    axes.set_ylabel(kind.axis or kind.compared)
    if benchmark.kind == "largest":  # from millions of parameters to many billions
        axes.set_yscale("log")
    axes.set_title(f"{benchmark.name} (ours: {_how(result)})", fontsize=10)
    figure.legend(fontsize=8, frameon=False, loc="outside right upper")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _how(result: Result) -> str:
    how = " ".join(filter(None, (f"{result.scale} scale", result.variant)))
    if result.variant:  # stages may share what was there
        devices = {str(where["devices"]) for where in result.provenance.values()}
        how += f", on {' or '.join(sorted(devices))}"
    return how


def _published_bars(view: View, rows: list[Experiment]) -> list[Bars]:
    kind = view.benchmark.kind
    published = KINDS[kind].published
    no_spreads = [0.0] * len(rows)
    if kind != "speed":
        # Bytes of small models beside those of large ones would show nothing.
        if view.result.scale != "full" and kind != "timeline":
            return []
        heights = [published(view.benchmark, row) for row in rows]
        return [Bars("published", _COLORS["published"], "", heights, no_spreads)]
    heights = {
        "torchgpipe": [
            published(view.benchmark, row) if "samples/s" in row.published else None
            for row in rows
        ],
        "GPipe": [row.published.get("speed-up of GPipe") for row in rows],
    }
    return [
        Bars(title, _COLORS[title], "", own, no_spreads)
        for title, own in heights.items()
    ]


def _our_bars(view: View, rows: list[Experiment]) -> list[Bars]:
    kind = view.benchmark.kind
    groups = []
    for column, settings in KINDS[kind].ours.items():
        cells = [
            view.speed_up(row, column)
            if kind == "speed"
            else view.cells(row).get(column)
            for row in rows
        ]
        for filled in KINDS_OF_CELLS:
            own = [cell if cell and cell.kind == filled else None for cell in cells]
            groups.append(
                Bars(
                    title=f"{_TITLES[settings]}, {filled}",
                    color=_COLORS[settings],
                    hatch=_HATCHES[filled],
                    heights=[cell.value if cell else None for cell in own],
                    spreads=[(cell and cell.spread) or 0.0 for cell in own],
                )
            )
    return groups


def _draw(
    axes: Axes, group: Bars, indices: list[int], offset: float, width: float
) -> None:
    """Draws the bars of some rows beside each other.

    Args:
      axes: where.
      group: bars of one color.
      indices: of the rows that are shown.
      offset: of the first bar from the left.
      width: of a bar.
    """
    filled = [
        (place + offset, group.heights[index], group.spreads[index])
        for place, index in enumerate(indices)
        if group.heights[index]
    ]
    if not filled:
        return
    places, heights, spreads = zip(*filled, strict=True)
    axes.bar(
        places,
        heights,
        0.92 * width,
        label=group.title,
        color=group.color,
        hatch=group.hatch,
        edgecolor="white",
        linewidth=0,
    )
    has_spreads = any(spreads) and group.title.endswith("measured")
    if has_spreads:
        axes.errorbar(places, heights, spreads, fmt="none", ecolor="#444", capsize=3)
    for place, height in zip(places, heights, strict=True):
        axes.annotate(
            _text(height),
            # At the foot of a bar with a spread, out of the way of its line.
            (place, 0 if has_spreads else height),
            ha="center",
            va="bottom",
            fontsize=6,
            color="white" if has_spreads else "#444",
        )


def _text(height: float) -> str:
    for unit, size, least in ((" B", 1e9, 1e9), (" M", 1e6, 1e6), (" k", 1e3, 1e5)):
        if height >= least:
            return f"{height / size:.3g}{unit}"
    return f"{height:.2f}" if height < 10 else f"{height:.0f}"
