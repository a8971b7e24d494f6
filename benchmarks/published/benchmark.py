"""A published table."""

from collections.abc import Callable
from dataclasses import dataclass

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
