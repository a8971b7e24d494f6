"""Runs the experiments of a table: which cells each kind of table has."""

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from rich.progress import Progress

from .. import accuracy
from ..cells.compiled import Way, peak
from ..cells.largest import Largest
from ..cells.measure import measure, prepare
from ..cells.predict import Link, Predictor
from ..experiment import Experiment
from ..provenance import provenance
from ..published import Benchmark
from ..result import COMPILED, GIB, PREDICTED, Cell, Result, Rows


@dataclass(frozen=True)
class Options:
    """How to run.

    Attributes:
      scale: ``"full"``, ``"small"`` or ``"tiny"``.
      steps: how many are timed.
      examples: the largest micro-batch that is timed for a prediction.
      bandwidth: of predicted transfers, in gigabytes per second.
      measured: the devices that cells may be measured on; none: only predictions.
      data: an ImageNet folder.
      seeds: of accuracy.
    """

    scale: str
    steps: int
    examples: int | None
    bandwidth: float
    measured: Sequence[Any]
    data: Path | None = None
    seeds: int = 5


class Runner:
    """Runs experiments.

    Args:
      options: how.
      progress: shows how far.
    """

    def __init__(self, options: Options, progress: Progress) -> None:
        self._options = options
        self._progress = progress
        self._predictor = Predictor(jax.devices()[0], most_examples=options.examples)
        # Read once: a result that is saved may be part of what is checked out.
        self._where = provenance() | {"options": self._told()}
        self._cells = {
            "speed": self.speed,
            "memory": self.memory,
            "timeline": self.timeline,
            "largest": Largest(options.scale, self._shown()).find,
        }

    def run(self, benchmark: Benchmark, names: Sequence[str]) -> Result:
        """Runs experiments of a table.

        Args:
          benchmark: the table.
          names: of the experiments.

        Returns:
          Their cells.

        Raises:
          ValueError: if images or devices that accuracy needs are not there.
        """
        scale = self._options.scale
        if benchmark.kind == "accuracy":
            rows = self._accuracy(names)
        else:
            cells = self._cells[benchmark.kind]
            rows = {name: cells(benchmark, benchmark.row(name)) for name in names}
        return Result(benchmark.name, scale, dict.fromkeys(rows, self._where), rows)

    def _accuracy(self, names: Sequence[str]) -> Rows:
        options = self._options
        rows = accuracy.run(
            options.scale,
            experiments=names,
            seeds=options.seeds,
            data=options.data,
            progress=self._progress,
        )
        if options.scale != "full":
            # A model this thin on cores that stages share: no throughput to speak of.
            for cells in rows.values():
                cells.pop("throughput", None)
        return rows

    def speed(self, benchmark: Benchmark, row: Experiment) -> dict[str, Cell]:
        """Throughput: measured where the devices are there, and predicted."""
        setting = benchmark.setting(row, self._options.scale)
        published, cells = self._published(row), {}
        # An interconnect that was asked for is not there.
        if row.num_stages <= len(self._options.measured) and row.bandwidth is None:
            with ThreadPoolExecutor() as pool:
                compiled = prepare(setting, published, self._options.measured, pool)
            row_of = compiled.result()
            found = measure(row_of, setting.batch, self._options.steps)
            cells = found.cells(row_of, published.detail(setting))
        ways = {"predicted samples/s": published}
        if row.num_stages > 1:
            ways["1f1b samples/s"] = Way("1f1b", "full")
        for column, way in ways.items():
            prediction = self._predictor.predict(setting, way, self._link(row))
            cells[column] = prediction.cell
        return cells

    def memory(self, benchmark: Benchmark, row: Experiment) -> dict[str, Cell]:
        """Bytes of all devices: as published, under 1F1B, and as jpipe comes."""
        setting = benchmark.setting(row, self._options.scale)
        cells = {}
        ways = {"": self._published(row)}
        if row.num_stages > 1:
            ways[" (1f1b)"] = Way("1f1b", "full")
            ways[" (default)"] = Way("1f1b", "min_cut")
        for suffix, way in ways.items():
            found = peak(setting, way)
            detail = way.detail(setting) | {"bytes of each device": found.devices}
            cells["parameters"] = Cell(found.parameters, COMPILED)
            cells["model"] = Cell(found.model / GIB, COMPILED, "GiB")
            cells[f"activations{suffix}"] = Cell(
                found.activations / GIB, COMPILED, "GiB", detail=detail
            )
            cells[f"memory{suffix}"] = Cell(
                sum(found.devices) / GIB, COMPILED, "GiB", detail=detail
            )
        return cells

    def timeline(self, benchmark: Benchmark, row: Experiment) -> dict[str, Cell]:
        """Throughput, utilization and memory."""
        setting = benchmark.setting(row, self._options.scale)
        cells = {}
        ways = {"": self._published(row), " (1f1b)": Way("1f1b", "full")}
        for suffix, way in ways.items():
            made = self._predictor.predict(setting, way, self._link(row))
            found = peak(setting, way)
            busy = 100 * (1 - made.timeline.bubble_fraction)
            cells |= {
                f"samples/s{suffix}": made.cell,
                f"utilization{suffix}": Cell(busy, PREDICTED, "%"),
                f"memory{suffix}": Cell(
                    sum(found.devices) / GIB,
                    COMPILED,
                    "GiB",
                    detail=way.detail(setting)
                    | {"bytes of each device": found.devices},
                ),
            }
        return cells

    def _shown(self) -> Callable[[str], None]:
        return lambda text: self._progress.console.print(f"  {text}")

    def _published(self, row: Experiment) -> Way:
        """As torchgpipe ran it; the tiny scale saves the programs of two modes."""
        tiny = self._options.scale == "tiny" and row.num_stages > 1
        return Way("gpipe", "full" if tiny else row.remat)

    def _link(self, row: Experiment) -> Link:
        return Link(1e9 * (row.bandwidth or self._options.bandwidth))

    def _told(self) -> dict[str, object]:
        told = dataclasses.asdict(dataclasses.replace(self._options, measured=()))
        told["measured"] = len(self._options.measured)
        told["data"] = self._options.data.name if self._options.data else None
        return told
