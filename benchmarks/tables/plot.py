"""A result as a picture: the published figures, ours beside them."""

from collections.abc import Callable
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..published import Benchmark
from ..result import Cell, Result
from .report import published_speed_up, rows_shown, speed_up

_COLORS = {
    "published": "#9aa5b1",
    "GPipe": "#cfd6dd",
    "ours": "#1f6feb",
    "1f1b": "#1a7f5a",
}
# Cells that were not measured are hatched.
_HATCHES = {"measured": "", "compiled": "..", "predicted": "///"}
Bars = dict[str, tuple[str, str, list[float | None]]]
Maker = Callable[[Benchmark, Result, list[str]], tuple[str, Bars]]


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
    """Bars for each experiment that has any.

    Args:
      benchmark: the published table.
      result: our cells.

    Returns:
      The picture.
    """
    names = [row.name for row in rows_shown(benchmark, result)]
    label, bars = _BARS[benchmark.kind](benchmark, result, names)
    bars = {title: bar for title, bar in bars.items() if any(bar[2])}
    keep = [i for i in range(len(names)) if any(bar[2][i] for bar in bars.values())]
    # The legend beside the bars takes two inches and a half.
    size = max(5.0, 1.1 * len(keep) + 2) + 2.5, 3.6
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    width = 0.8 / max(len(bars), 1)
    for n, (title, (color, hatch, values)) in enumerate(bars.items()):
        _draw(axes, [values[i] for i in keep], n, width, title, color, hatch)
    if benchmark.kind == "accuracy":
        _draw_spreads(axes, [result.rows.get(names[i], {}).get("error") for i in keep])
    axes.set_xticks(
        [i + 0.4 - width / 2 for i in range(len(keep))],
        [names[i] for i in keep],
        rotation=30 if len(keep) > 6 else 0,
        ha="right" if len(keep) > 6 else "center",
    )
    axes.set_ylabel(label)
    if benchmark.kind == "largest":  # from millions of parameters to many billions
        axes.set_yscale("log")
    how = " ".join(filter(None, (f"{result.scale} scale", result.variant)))
    if result.variant:  # stages may share what was there
        devices = {str(where["devices"]) for where in result.provenance.values()}
        how += f", on {' or '.join(sorted(devices))}"
    axes.set_title(f"{benchmark.name} (ours: {how})", fontsize=10)
    figure.legend(fontsize=8, frameon=False, loc="outside right upper")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _draw(
    axes: Axes,
    values: list[float | None],
    n: int,
    width: float,
    title: str,
    color: str,
    hatch: str,
) -> None:
    places = [i + n * width for i, value in enumerate(values) if value]
    heights = [value for value in values if value]
    axes.bar(
        places,
        heights,
        0.92 * width,
        label=title,
        color=color,
        hatch=hatch,
        edgecolor="white",
        linewidth=0,
    )
    for place, height in zip(places, heights, strict=True):
        axes.annotate(
            _text(height),
            (place, height),
            ha="center",
            va="bottom",
            fontsize=6,
            color="#444",
        )


def _text(height: float) -> str:
    for unit, size, least in ((" B", 1e9, 1e9), (" M", 1e6, 1e6), (" k", 1e3, 1e5)):
        if height >= least:
            return f"{height / size:.3g}{unit}"
    return f"{height:.2f}" if height < 10 else f"{height:.0f}"


def _draw_spreads(axes: Axes, cells: list[Cell | None]) -> None:
    """Standard deviations over seeds, on the last bars that were drawn."""
    for text in axes.texts:  # at the foot of its bar, out of the way of the lines
        text.set(y=0, color="white")
    bars = axes.containers[-1] if axes.containers else []
    found = [cell for cell in cells if cell]
    places = [bar.get_x() + bar.get_width() / 2 for bar in bars]
    if len(places) == len(found):
        axes.errorbar(
            places,
            [cell.value for cell in found],
            [cell.spread or 0.0 for cell in found],
            fmt="none",
            ecolor="#444",
            capsize=3,
        )


def _speed_bars(
    benchmark: Benchmark, result: Result, names: list[str]
) -> tuple[str, Bars]:
    rows = [benchmark.row(name) for name in names]

    def ours(column: str) -> list[float | None]:
        cells = [speed_up(benchmark, result, row, column) for row in rows]
        return [cell and cell.value for cell in cells]

    torchgpipe = any("samples/s" in row.published for row in rows)
    bars: Bars = {}
    if torchgpipe:
        values = [published_speed_up(benchmark, row) for row in rows]
        bars["torchgpipe"] = (_COLORS["published"], "", values)
    bars["GPipe"] = (
        _COLORS["GPipe"],
        "",
        [row.published.get("speed-up of GPipe") for row in rows],
    )
    bars["jpipe, measured"] = (_COLORS["ours"], "", ours("samples/s"))
    hatch = _HATCHES["predicted"]
    bars["jpipe, predicted"] = (_COLORS["ours"], hatch, ours("predicted samples/s"))
    bars["with 1F1B, predicted"] = (_COLORS["1f1b"], hatch, ours("1f1b samples/s"))
    return "speed-up", bars


def _cells(result: Result, names: list[str], column: str) -> list[Cell | None]:
    return [result.rows.get(name, {}).get(column) for name in names]


def _bars_of(published: str, ours: dict[str, str], label: str) -> Maker:
    """Bars of one published figure and the columns of ours that stand beside it."""

    def make(
        benchmark: Benchmark, result: Result, names: list[str]
    ) -> tuple[str, Bars]:
        by_name = {row.name: row for row in benchmark.rows}
        figures = [
            by_name[name].published.get(published) if name in by_name else None
            for name in names
        ]
        bars: Bars = {}
        # Bytes of small models beside those of large ones would show nothing.
        if result.scale == "full" or label.startswith("utilization"):
            bars["published"] = (_COLORS["published"], "", figures)
        for title, column in ours.items():
            cells = _cells(result, names, column)
            kinds = {cell.kind for cell in cells if cell}
            color = _COLORS["1f1b" if "1F1B" in title else "ours"]
            for kind in sorted(kinds):
                values = [c.value if c and c.kind == kind else None for c in cells]
                bars[f"{title}, {kind}"] = (color, _HATCHES[kind], values)
        return label, bars

    return make


def _memory_bars(
    benchmark: Benchmark, result: Result, names: list[str]
) -> tuple[str, Bars]:
    activations = any("activations, GiB" in row.published for row in benchmark.rows)
    what = "activations" if activations else "memory"
    ours = {"jpipe": what, "with 1F1B": f"{what} (1f1b)"}
    label = f"{what} of all devices, GiB"
    return _bars_of(f"{what}, GiB", ours, label)(benchmark, result, names)


_BARS: dict[str, Maker] = {
    "speed": _speed_bars,
    "memory": _memory_bars,
    "timeline": _bars_of(
        "utilization, %",
        {"jpipe": "utilization", "with 1F1B": "utilization (1f1b)"},
        "utilization, %",
    ),
    "largest": _bars_of("parameters", {"jpipe": "parameters"}, "parameters"),
    "accuracy": _bars_of("error, %", {"jpipe": "error"}, "test error, %"),
}
