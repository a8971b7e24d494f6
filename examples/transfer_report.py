"""What `transfer.py` shows of its results: a table, JSON, Markdown and a picture."""

import datetime
import json
import math
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import matplotlib
import numpy as np
from images import Task
from matplotlib.lines import Line2D
from PIL import Image
from rich.console import Console
from rich.table import Table

ARMS = {"tuned": "fine-tuned", "scratch": "from scratch"}
COLORS = {"tuned": "#2c5f9e", "scratch": "#d1702a"}
PANELS = 4  # beside each other
SAMPLES = 28  # images in a line


class Row(NamedTuple):
    """What was learnt of one set of images.

    Attributes:
      name: the name of the task.
      num_train: the number of images that were trained on.
      num_test: the number of images held back.
      num_classes: the number of classes.
      records: arm -> the record of each seed, as `runs.Runs.fit` returns it.
    """

    name: str
    num_train: int
    num_test: int
    num_classes: int
    records: dict[str, list[dict[str, Any]]]

    def accuracies(self, arm: str) -> np.ndarray:
        """The accuracies after the last step, in percent, one per seed."""
        records = self.records.get(arm, [])
        return np.array([100 * [*record["tests"].values()][-1] for record in records])

    def make_cells(self) -> list[str]:
        """The texts of a line of the table."""
        sizes = (self.num_train, self.num_test, self.num_classes)
        counts = [f"{size:,}" for size in sizes]
        accuracies = [show_spread(self.accuracies(arm)) for arm in ARMS]
        return [self.name, *counts, *accuracies]


def make_row(task: Task, records: dict[str, list[dict[str, Any]]]) -> Row:
    """The row of a task; records are as in `Row`."""
    return Row(task.name, len(task.x), len(task.x_test), task.num_classes, records)


def show_spread(values: np.ndarray) -> str:
    """The mean, and with several values their standard deviation."""
    if not len(values):
        return "-"
    if len(values) == 1:
        return f"{values[0]:.1f}"
    return f"{values.mean():.1f} ± {values.std(ddof=1):.1f}"


def describe(
    rows: list[Row], *, losses: dict[str, list[float]], command: str, model: str
) -> str:
    """The table and how it was made, in Markdown.

    Args:
      rows: one row per set of images, that of the first task first.
      losses: the losses of the same steps, ``"pipelined"`` and ``"unpipelined"``.
      command: the command that was typed.
      model: the model in a few words.
    """
    lines = [
        "| images | train | test | classes | fine-tuned, % | from scratch, % |",
        "| --- | --: | --: | --: | --: | --: |",
        *("| " + " | ".join(row.make_cells()) + " |" for row in rows),
    ]
    runs = [record for row in rows for arm in row.records.values() for record in arm]
    seconds = sum(record["seconds"] for record in runs)
    pairs = zip(losses["pipelined"], losses["unpipelined"], strict=True)
    lines += ["", "| step | loss, four stages | loss, unpipelined |"]
    lines += ["| --: | --: | --: |"]
    lines += [f"| {i} | {a:.6f} | {b:.6f} |" for i, (a, b) in enumerate(pairs, 1)]
    versions = [f"{name} {version(name)}" for name in ("jax", "flax", "optax")]
    lines += [
        "",
        f"`{command}`: {model}; {len(runs)} runs, {seconds / 60:.1f} minutes of "
        f"processor time; {jax.devices()[0].device_kind}, "
        f"Python {platform.python_version()}, {', '.join(versions)}; "
        f"{datetime.date.today()}.",
    ]
    return "\n".join(lines) + "\n"


def draw_curves(rows: list[Row], path: Path) -> None:
    """Test accuracies during training, by seed, one panel per set of images."""
    matplotlib.use("agg")
    from matplotlib import pyplot

    height = math.ceil(len(rows) / PANELS)
    figure, axes = pyplot.subplots(
        height,
        PANELS,
        figsize=(10, 2.3 * height),
        squeeze=False,
        sharey=True,
        layout="constrained",
    )
    for axis, row in zip(axes.flat, rows, strict=False):
        for arm, records in row.records.items():
            for record in records:
                steps = [int(step) for step in record["tests"]]
                values = [100 * value for value in record["tests"].values()]
                axis.plot(steps, values, color=COLORS[arm], alpha=0.6, linewidth=1)
        axis.set_title(f"{row.name}, {row.num_train:,} images", fontsize=9)
        axis.grid(alpha=0.3)
        axis.set_ylim(0, 100)
        axis.tick_params(labelsize=8)
    for axis in axes.flat[len(rows) :]:
        axis.axis("off")
    lines = [Line2D([], [], color=color) for color in COLORS.values()]
    figure.legend(lines, [*ARMS.values()], loc="outside upper center", ncols=2)
    figure.supxlabel("steps", fontsize=9)
    figure.supylabel("test accuracy, %", fontsize=9)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def draw_samples(tasks: list[Task], path: Path) -> None:
    """Some images of each task at random: a line of training, a line of test."""
    lines = []
    for task in tasks:
        for x in (task.x, task.x_test):
            rows = np.random.default_rng(0).choice(len(x), SAMPLES)
            rgb = np.broadcast_to(x[rows], (*x[rows].shape[:3], 3))
            lines.append(np.concatenate(list(rgb), axis=1))
    Image.fromarray(np.concatenate(lines)).save(path)


def write_report(
    folder: Path,
    *,
    rows: list[Row],
    losses: dict[str, list[float]],
    command: str,
    model: str,
) -> None:
    """Prints the table; writes ``results.json``, ``results.md`` and ``curves.png``."""
    table = Table(title=model)
    for column in ("images", "train", "test", "classes", *ARMS.values()):
        table.add_column(column, justify="left" if column == "images" else "right")
    for row in rows:
        table.add_row(*row.make_cells())
    Console().print(table)
    text = describe(rows, losses=losses, command=command, model=model)
    print(text.split("\n\n", maxsplit=1)[1])
    results = {"rows": [row._asdict() for row in rows], "losses": losses}
    (folder / "results.json").write_text(json.dumps(results, indent=1), "utf-8")
    (folder / "results.md").write_text(text, "utf-8")
    draw_curves(rows, folder / "curves.png")
    print(f"wrote results.json, results.md and curves.png in {folder}")
