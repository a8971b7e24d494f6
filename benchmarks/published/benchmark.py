"""A published table."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..experiment import Experiment, Setting, Work, fit


@dataclass(frozen=True)
class Benchmark:
    """A published table, and how its rows are worked out here.

    Attributes:
      name: what is typed.
      title: a line that says what it is about.
      kind: ``"speed"``, ``"memory"``, ``"timeline"``, ``"largest"`` or ``"accuracy"``:
        which cells its rows have.
      rows: the experiments.
      work: gives the model and its data, for an experiment and a scale.
      note: what has to be known to read the published figures.
      same_batch: whether all rows have one mini-batch.
      tiny: the rows that are run at the tiny scale if none are named; all, if empty.
    """

    name: str
    title: str
    kind: str
    rows: tuple[Experiment, ...]
    work: Callable[[Experiment, str], Work] | None = None
    note: str = ""
    same_batch: bool = False
    tiny: tuple[str, ...] = ()

    def setting(self, row: Experiment, scale: str) -> Setting:
        """A row at a scale."""
        assert self.work is not None, f"{self.name} has no model of its own"
        return fit(row, self.work(row, scale), scale, self.same_batch)

    def row(self, name: str) -> Experiment:
        """The experiment of a name."""
        return next(experiment for experiment in self.rows if experiment.name == name)

    def first(self, row: Experiment) -> Experiment:
        """The row by which the speed-ups of a row's group are divided."""
        return next(other for other in self.rows if other.group == row.group)

    def speed_up(self, row: Experiment) -> float | None:
        """Recomputed from the published throughput; else as published."""
        if "samples/s" not in row.published:
            return row.published.get("speed-up of GPipe")
        return row.published["samples/s"] / self.first(row).published["samples/s"]

    def row_names(self, scale: str, measured: bool = False) -> list[str]:
        """The experiments that run at a scale.

        Args:
          scale: one of `SCALES`.
          measured: whether those that are only measured are among them.
        """
        if self.kind == "accuracy":
            from .. import accuracy  # which needs what the others do not

            return accuracy.EXPERIMENTS[scale]
        return [
            row.name
            for row in self.rows
            if row.ours and (measured or not row.only_measured)
        ]

    def default_rows(self, scale: str, measured: bool = False) -> list[str]:
        """Those that run if none are named; see `row_names`."""
        if scale == "tiny" and self.tiny:
            return list(self.tiny)
        return self.row_names(scale, measured)


def read_rows(titles: str, text: str, **common: Any) -> tuple[Experiment, ...]:
    """The rows of a published table, as they stand in a text.

    Args:
      titles: of the columns, with a bar between two. ``row``, ``balance``, ``batch``,
        ``M``, ``remat`` and ``model`` are settings; the others are published figures.
      text: a line for each row, a blank between two cells; ``-`` for no figure.
      **common: settings of all rows.

    Example:
      >>> titles = "row | balance | batch | M | samples/s"
      >>> (row,) = read_rows(titles, "pipeline-2  135,235  600  4  135.539")
      >>> row.balance, row.published
      ((135, 235), {'samples/s': 135.539})
    """
    columns = [title.strip() for title in titles.split("|")]
    rows = []
    for line in text.strip().splitlines():
        cells = dict(zip(columns, line.split(), strict=True))
        settings = {
            field: read(cells.pop(title))
            for title, (field, read) in _SETTINGS.items()
            if title in cells
        }
        figures = {title: float(cell) for title, cell in cells.items() if cell != "-"}
        rows.append(Experiment(**settings, **common, published=figures))
    return tuple(rows)


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


# title of a column -> field of `Experiment`, and how to read it
_SETTINGS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "row": ("name", str),
    "balance": ("balance", _integers),
    "batch": ("batch", int),
    "M": ("microbatches", int),
    "remat": ("remat", str),
    "model": ("model", _integers),
}
