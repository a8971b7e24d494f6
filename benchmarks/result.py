"""What a benchmark gives: cells of a table, each with how it was filled.

There are three ways to fill a cell, and they are never mixed up. *Measured*: it ran,
on as many devices as it speaks of. *Compiled*: bytes of the compiled executables and
of the simulated schedule; nothing ran. *Predicted*: the times of the stages were
measured one after the other on one device, and the simulator says what that many
devices would do.
"""

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

MEASURED, COMPILED, PREDICTED = KINDS = ("measured", "compiled", "predicted")
GIB = 1 << 30
SCALES = ("full", "small", "tiny")
DTYPES = ("float32", "bfloat16")
FOLDER = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Cell:
    """One figure.

    Attributes:
      value: the figure.
      kind: one of `KINDS`.
      unit: of the value, such as ``"samples/s"``, ``"GiB"`` or ``"%"``.
      spread: in the same unit: the standard deviation over seeds, or half the distance
        between the quartiles of steps.
      detail: how it was made, for the reader of the JSON.
    """

    value: float
    kind: str
    unit: str = ""
    spread: float | None = None
    detail: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind is {self.kind!r}; needs one of {', '.join(KINDS)}")


# The cells of each experiment, by the name of the column.
Rows = dict[str, dict[str, Cell]]


@dataclass(frozen=True)
class Result:
    """One run of a benchmark.

    Attributes:
      benchmark: its name.
      scale: ``"full"``, ``"small"`` or ``"tiny"``.
      variant: ``""``, or the options of a run on the devices that there are, joined:
        ``"measured"``, ``"measured-bfloat16-1f1b-min_cut"``.
      provenance: of each experiment: see `benchmarks.provenance`.
      rows: the cells of each experiment.
    """

    benchmark: str
    scale: str
    provenance: dict[str, dict[str, Any]]
    rows: Rows
    variant: str = ""

    @property
    def stem(self) -> str:
        """Of the names of its files."""
        return "-".join(filter(None, (self.benchmark, self.scale, self.variant)))

    def keep(self, folder: Path) -> "tuple[Result, Path]":
        """Saves it over an earlier one; returns both together, and the path."""
        path = folder / f"{self.stem}.json"
        whole = self.merged(Result.load(path) if path.exists() else None)
        return whole, whole.save(folder)

    def save(self, folder: Path) -> Path:
        """Writes ``<stem>.json``, all of it or nothing; returns its path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.stem}.json"
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(self), indent=1) + "\n")
        return part.replace(path)

    @classmethod
    def load(cls, path: Path) -> "Result":
        """Reads what `save` wrote."""
        read = json.loads(path.read_text())
        rows = {
            name: {column: Cell(**cell) for column, cell in cells.items()}
            for name, cells in read.pop("rows").items()
        }
        return cls(**(read | {"rows": rows}))

    def merged(self, before: "Result | None") -> "Result":
        """This run over an earlier one: experiments that did not run again stay.

        Raises:
          ValueError: if they are of another benchmark or scale.
        """
        if before is None:
            return self
        if self.stem != before.stem:
            raise ValueError("results of two benchmarks or scales cannot be merged")
        where, rows = before.provenance | self.provenance, before.rows | self.rows
        return replace(self, provenance=where, rows=rows)
