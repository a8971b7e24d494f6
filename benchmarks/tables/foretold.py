"""Rows that are compiled or predicted, and measured where there are devices for it."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax

from .. import accuracy
from ..cells.compiled import Peak, Way, peak
from ..cells.largest import Largest
from ..cells.measure import measure, prepare
from ..cells.predict import Link, Predictor
from ..experiment import Experiment, Setting
from ..published import Benchmark
from ..result import COMPILED, GIB, PREDICTED, Cell
from .options import Jobs, Options, devices_for

_ONE_F_ONE_B = Way("1f1b", "full")
_DEFAULT = Way("1f1b", "min_cut")


def rows(
    benchmark: Benchmark, names: Sequence[str], options: Options
) -> tuple[str, Jobs]:
    """What fills the cells of each row.

    Args:
      benchmark: the table.
      names: of its rows.
      options: how.

    Raises:
      ValueError: if images or devices that accuracy needs are not there.
    """
    if benchmark.kind == "accuracy":
        jobs = accuracy.jobs(
            options.scale, experiments=names, seeds=options.seeds, data=options.data
        )
        return "", iter(jobs)
    table = _Table(benchmark, options)
    fill_cells = {
        "speed": table.speed,
        "memory": table.memory,
        "timeline": table.timeline,
        "largest": Largest(benchmark, options.scale).find,
    }[benchmark.kind]
    return "", ((name, partial(fill_cells, benchmark.row(name))) for name in names)


class _Table:
    """Fills the cells of one table.

    Args:
      benchmark: the table.
      options: how.
    """

    def __init__(self, benchmark: Benchmark, options: Options) -> None:
        self._benchmark = benchmark
        self._options = options
        self._devices = devices_for(options.scale)
        self._predictor = Predictor(
            jax.devices()[0], most_examples=options.examples or None
        )

    def speed(self, row: Experiment) -> dict[str, Cell]:
        """Throughput: measured where the devices are there, and predicted."""
        setting = self._setting(row)
        way = self._published(row)
        cells = {}
        # An interconnect that was asked for is not there.
        if row.num_stages <= len(self._devices) and row.bandwidth is None:
            with ThreadPoolExecutor() as pool:
                compiled = prepare(setting, way, self._devices, pool).result()
            steps = measure(compiled, setting.batch, self._options.steps)
            cells = steps.cells(compiled, way.detail(setting))
        ways = {"predicted samples/s": way}
        if row.num_stages > 1:
            ways["1f1b samples/s"] = _ONE_F_ONE_B
        for column, way in ways.items():
            prediction = self._predictor.predict(setting, way, self._link(row))
            cells[column] = prediction.cell
        return cells

    def memory(self, row: Experiment) -> dict[str, Cell]:
        """Bytes of all devices: as published, under 1F1B, and as jpipe comes."""
        setting = self._setting(row)
        ways = {"": self._published(row)}
        if row.num_stages > 1:
            ways |= {" (1f1b)": _ONE_F_ONE_B, " (default)": _DEFAULT}
        cells = {}
        for suffix, way in ways.items():
            bytes_of_step = peak(setting, way)
            memory = _memory_cell(setting, way, bytes_of_step)
            activations = bytes_of_step.activations / GIB
            cells |= {
                "parameters": Cell(bytes_of_step.parameters, COMPILED),
                "model": Cell(bytes_of_step.model / GIB, COMPILED, "GiB"),
                f"activations{suffix}": Cell(
                    activations, COMPILED, "GiB", detail=memory.detail
                ),
                f"memory{suffix}": memory,
            }
        return cells

    def timeline(self, row: Experiment) -> dict[str, Cell]:
        """Throughput, utilization and memory."""
        setting = self._setting(row)
        cells = {}
        ways = {"": self._published(row), " (1f1b)": _ONE_F_ONE_B}
        for suffix, way in ways.items():
            prediction = self._predictor.predict(setting, way, self._link(row))
            busy = 100 * (1 - prediction.timeline.bubble_fraction)
            cells |= {
                f"samples/s{suffix}": prediction.cell,
                f"utilization{suffix}": Cell(busy, PREDICTED, "%"),
                f"memory{suffix}": _memory_cell(setting, way, peak(setting, way)),
            }
        return cells

    def _setting(self, row: Experiment) -> Setting:
        return self._benchmark.setting(row, self._options.scale)

    def _published(self, row: Experiment) -> Way:
        """As torchgpipe ran it; the tiny scale saves the programs of two modes."""
        is_tiny = self._options.scale == "tiny" and row.num_stages > 1
        return Way("gpipe", "full" if is_tiny else row.remat)

    def _link(self, row: Experiment) -> Link:
        return Link(1e9 * (row.bandwidth or self._options.bandwidth))


def _memory_cell(setting: Setting, way: Way, bytes_of_step: Peak) -> Cell:
    devices = bytes_of_step.devices
    detail = way.detail(setting) | {"bytes of each device": devices}
    return Cell(sum(devices) / GIB, COMPILED, "GiB", detail=detail)
