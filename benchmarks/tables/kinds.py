"""The kinds of tables: their columns, and what pages and pictures compare."""

from collections.abc import Callable
from typing import NamedTuple

from ..experiment import Experiment
from ..published import Benchmark
from .view import EMPTY, View, as_published, shown

Text = Callable[[View, Experiment], str]
Column = tuple[str, Text]


class Kind(NamedTuple):
    """A kind of table.

    Attributes:
      columns: title and text of each; those that are empty in all rows are left out.
      compared: the figure that the summary and the picture compare, with its unit.
      published: that figure as published, of a row.
      ours: the columns of our cells that have it -> the settings that they are of,
        where these are not the published ones.
      axis: what the picture calls the figure, where that is another.
      smaller: what is smaller at other scales than the published one.
    """

    columns: list[Column]
    compared: str
    published: Callable[[Benchmark, Experiment], float | None]
    ours: dict[str, str]
    axis: str = ""
    smaller: str = (
        "fewer filters or narrower layers, smaller images or shorter sequences; "
        "published at full size."
    )


def _named(name: str) -> Callable[[Benchmark, Experiment], float | None]:
    return lambda benchmark, row: row.published.get(name)


def _published(name: str) -> Text:
    return lambda view, row: as_published(row.published.get(name))


def _ours(column: str) -> Text:
    return lambda view, row: shown(view.cells(row).get(column))


def _speed_up(column: str) -> Text:
    return lambda view, row: shown(view.speed_up(row, column), digits=3)


def _torchgpipe_speed_up(view: View, row: Experiment) -> str:
    speed_up = view.benchmark.speed_up(row) if "samples/s" in row.published else None
    return EMPTY if speed_up is None else f"{speed_up:.3f}"


def _name(view: View, row: Experiment) -> str:
    return row.name


def _microbatches(view: View, row: Experiment) -> str:
    """Micro-batches and the examples in each, of ours."""
    cells = view.cells(row)
    if cells and view.result.scale == "full" and not view.result.variant:
        return f"{row.microbatches} x {round(row.batch / row.microbatches)}"
    for cell in cells.values():
        if "micro-batches" in cell.detail:
            return "{micro-batches} x {examples in each}".format_map(cell.detail)
    return EMPTY


def _devices(view: View, row: Experiment) -> str:
    detail = view.detail(row)
    if "devices" not in detail:
        return EMPTY
    return f"{len(detail['layers per stage'])} on {detail['devices']}"


def _prediction_error(view: View, row: Experiment) -> str:
    """By how much a prediction is too high, where both were made."""
    cells = view.cells(row)
    predicted, measured = cells.get("predicted samples/s"), cells.get("samples/s")
    if predicted is None or measured is None:
        return EMPTY
    return f"{100 * (predicted.value / measured.value - 1):+.1f} %"


def _all_bytes(benchmark: Benchmark, row: Experiment) -> float | None:
    """GiB of all devices: as published, or model and activations added."""
    published = row.published
    if "memory, GiB" in published:
        return published["memory, GiB"]
    if "model, GiB" in published and "activations, GiB" in published:
        return published["model, GiB"] + published["activations, GiB"]
    return None


def _published_error(view: View, row: Experiment) -> str:
    error = row.published.get("error, %")
    if error is None:
        return EMPTY
    return f"{error:.2f} ± {row.published['spread of the error, %']:.2f}"


_EXPERIMENT: Column = ("experiment", _name)
_CUT: Column = ("jpipe, M x examples", _microbatches)
_DEVICES: Column = ("stages on devices", _devices)
_COMPILING: Column = ("compiling, s", _ours("compiling"))


def sharing_columns(first: str) -> list[Column]:
    """The columns of rows in which stages share a device; the first row's name."""
    return [
        _EXPERIMENT,
        _CUT,
        _DEVICES,
        ("jpipe, samples/s", _ours("samples/s")),
        (f"by {first}'s", _speed_up("samples/s")),
        ("all, GiB", _ours("memory")),
        _COMPILING,
    ]


def _three_columns(name: str, column: str) -> list[Column]:
    return [
        (f"torchgpipe, {name}", _published(name)),
        (f"jpipe, {name}", _ours(column)),
        (f"with 1F1B, {name}", _ours(f"{column} (1f1b)")),
    ]


KINDS = {
    "speed": Kind(
        columns=[
            _EXPERIMENT,
            _CUT,
            _DEVICES,
            ("torchgpipe, samples/s", _published("samples/s")),
            ("torchgpipe, speed-up", _torchgpipe_speed_up),
            ("GPipe, speed-up", _published("speed-up of GPipe")),
            ("jpipe, samples/s", _ours("samples/s")),
            ("speed-up", _speed_up("samples/s")),
            ("jpipe, samples/s", _ours("predicted samples/s")),
            ("speed-up", _speed_up("predicted samples/s")),
            ("predicted by measured", _prediction_error),
            ("with 1F1B, samples/s", _ours("1f1b samples/s")),
            ("speed-up", _speed_up("1f1b samples/s")),
            _COMPILING,
        ],
        compared="speed-up",
        published=Benchmark.speed_up,
        ours={"samples/s": "", "predicted samples/s": "", "1f1b samples/s": "1F1B "},
    ),
    "memory": Kind(
        columns=[
            _EXPERIMENT,
            _CUT,
            *(
                (f"published: {name}", _published(name))
                for name in (
                    "parameters",
                    "model, GiB",
                    "GPipe's parameters",
                    "GPipe's model, GB",
                    "GPipe's activations, GB",
                    "activations, GiB",
                    "memory, GiB",
                )
            ),
            ("jpipe, parameters", _ours("parameters")),
            ("model, GiB", _ours("model")),
            ("activations, GiB", _ours("activations")),
            ("all, GiB", _ours("memory")),
            ("activations with 1F1B, GiB", _ours("activations (1f1b)")),
            ("all with 1F1B, GiB", _ours("memory (1f1b)")),
            ("activations with 1F1B and min_cut, GiB", _ours("activations (default)")),
            ("all with 1F1B and min_cut, GiB", _ours("memory (default)")),
            _COMPILING,
        ],
        compared="all, GiB",
        published=_all_bytes,
        ours={"memory": "", "memory (1f1b)": "1F1B ", "memory (default)": "default "},
        axis="memory of all devices, GiB",
    ),
    "timeline": Kind(
        columns=[
            _EXPERIMENT,
            *_three_columns("samples/s", "samples/s"),
            *_three_columns("utilization, %", "utilization"),
            *_three_columns("memory, GiB", "memory"),
        ],
        compared="busy, %",
        published=_named("utilization, %"),
        ours={"utilization": "", "utilization (1f1b)": "1F1B "},
        axis="utilization, %",
    ),
    "largest": Kind(
        columns=[
            _EXPERIMENT,
            ("GPipe, size", _published("size")),
            ("jpipe, size", _ours("size")),
            ("GPipe, parameters", _published("parameters")),
            ("jpipe, parameters", _ours("parameters")),
            ("GPipe, model, GB", _published("model, GB")),
            ("jpipe, model, GiB", _ours("model")),
            ("GPipe, activations, GB", _published("activations, GB")),
            ("jpipe, activations, GiB", _ours("activations")),
        ],
        compared="parameters",
        published=_named("parameters"),
        ours={"parameters": ""},
    ),
    "accuracy": Kind(
        columns=[
            _EXPERIMENT,
            ("published, error in %", _published_error),
            ("published, samples/s", _published("samples/s")),
            ("jpipe, error in %", _ours("error")),
            ("jpipe, samples/s", _ours("throughput")),
            ("largest difference of a parameter", _ours("difference")),
        ],
        compared="error, %",
        published=_named("error, %"),
        ours={"error": ""},
        axis="test error, %",
        smaller="a thin ResNet on the digits of scikit-learn, 360 of 1797 held back, "
        "means and standard deviations over seeds. One device normalizes the whole "
        "mini-batch, pipelines each micro-batch of 16 images; with as many "
        "micro-batches one device has the parameters of the pipeline, as the last row "
        "says.",
    ),
}
