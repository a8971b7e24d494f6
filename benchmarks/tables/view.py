"""What a table shows of a result: which rows, which figures, in which digits."""

from typing import Any

from ..experiment import Experiment
from ..published import Benchmark
from ..result import PREDICTED, Cell, Result

EMPTY = "-"
# How a cell is marked: measured ones are not.
MARKS = {"measured": "", "compiled": " ᶜ", "predicted": " ᵖ"}
# Figures of one kind may be divided by each other where all of these agree.
_SAME_MACHINE = ("devices", "processor", "cores", "jax")


class View:
    """A published table beside what was made of it here.

    Args:
      benchmark: the published table.
      result: our cells.

    Attributes:
      rows: the published rows, and after them those that are only ours. At other
        scales than the published one, and where it is measured, rows that were not run
        are left out.
      sharing: rows in which stages share a device; they are not among `rows`.
    """

    def __init__(self, benchmark: Benchmark, result: Result) -> None:
        self.benchmark = benchmark
        self.result = result
        is_full = result.scale == "full" or benchmark.kind == "accuracy"
        shows_all = is_full and not result.variant
        self.sharing = [row for row in benchmark.rows if self._shares_devices(row)]
        self.rows = [
            row
            for row in benchmark.rows
            if row.name in result.rows or (shows_all and not row.only_measured)
            if row not in self.sharing
        ]
        published = {row.name for row in benchmark.rows}
        self.rows += [
            Experiment(name, (1,), 1, 1)
            for name in result.rows
            if name not in published
        ]

    def cells(self, row: Experiment) -> dict[str, Cell]:
        """Our cells of a row by column; none if it was not run."""
        return self.result.rows.get(row.name, {})

    def detail(self, row: Experiment) -> dict[str, Any]:
        """What ran, of a row that was measured."""
        cells = self.cells(row)
        return cells["compiling"].detail if "compiling" in cells else {}

    def speed_up(self, row: Experiment, column: str) -> Cell | None:
        """Our throughput by that of the first row of its group, filled the same way."""
        cell = self.cells(row).get(column)
        first = self.benchmark.first(row)
        # Other schedules as well are divided by what the table divides by.
        is_predicted = cell is not None and cell.kind == PREDICTED
        divisor = self.cells(first).get(
            "predicted samples/s" if is_predicted else "samples/s"
        )
        if cell is None or divisor is None or not self._is_same_machine(row, first):
            return None
        return Cell(cell.value / divisor.value, cell.kind, "")

    def _is_same_machine(self, *rows: Experiment) -> bool:
        provenance = self.result.provenance
        machines = [
            [provenance[row.name].get(key) for key in _SAME_MACHINE] for row in rows
        ]
        return all(machine == machines[0] for machine in machines)

    def _shares_devices(self, row: Experiment) -> bool:
        detail = self.detail(row)
        stages = len(detail.get("layers per stage", ()))
        return "devices" in detail and stages > detail["devices"]


def shown(cell: Cell | None, digits: int | None = None) -> str:
    """A cell with its mark; a dash for none.

    Args:
      cell: the figure.
      digits: after the point; ``None``: as `number` writes it, with the spread.
    """
    if cell is None:
        return EMPTY
    if digits is not None:
        return f"{cell.value:.{digits}f}{MARKS[cell.kind]}"
    spread = f" ± {number(cell.spread)}" if cell.spread else ""
    return f"{number(cell.value)}{spread}{MARKS[cell.kind]}"


def number(value: float) -> str:
    """Three significant digits, all of an integer."""
    if value == int(value) and abs(value) >= 1:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) < 0.1:
        return f"{value:.3g}"
    return f"{value:.{3 - len(str(int(abs(value)))) + (abs(value) < 1)}f}"


def as_published(value: float | None) -> str:
    """A figure with the digits that it was published with; a dash for none."""
    if value is None:
        return EMPTY
    for unit, size in (("B", 1e9), ("M", 1e6)):
        if value >= size:
            return f"{value / size:g} {unit}"
    return f"{value:g}"
