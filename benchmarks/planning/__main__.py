"""Ten plans for two processes of one core each, against what is typed without one.

Each model is profiled and planned in one process, then all ways to run it are timed in
turns in two: see `ways` and `pair`. Run it on a machine with two cores and nothing else
to do:

    python -m benchmarks.planning
    python -m benchmarks.planning --models "equal blocks" --json build/planning.json
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from .. import markdown
from ..peers.launch import ENVIRONMENT, ROOT
from ..peers.measure import separate_cores
from ..provenance import line, provenance
from .models import MODELS
from .ways import RIVALS, Link, Planned, Way

HEAD = (
    "model",
    "limit",
    "plan",
    "best named",
    "bytes",
    "ms",
    "equal",
    "torchgpipe",
    "its cut, 1F1B",
    "best named",
    "predicted",
    "profile, s",
    "plan, s",
)
NUM_WORDS = 4  # columns that hold words
# Losses of the same step in another order of sums.
SAME_LOSS = 1e-3


@dataclass
class Measured:
    """One way, as two processes ran it.

    Attributes:
      way: the way.
      seconds: of a step, one number a round.
      loss: of the first step.
      num_bytes: that the fullest device holds.
    """

    way: Way
    seconds: list[float]
    loss: float
    num_bytes: int

    @cached_property
    def median(self) -> float:
        """The median of the seconds of a step."""
        return statistics.median(self.seconds)


@dataclass
class Row:
    """A plan under a limit and its rivals.

    Attributes:
      model: the name of the model.
      profile_seconds: that measuring its layers took.
      planned: what the planner said.
      plan: the plan as it ran; ``None`` if nothing fits.
      rivals: those that need no more than the limit or the plan, by the name of their
        group.
    """

    model: str
    profile_seconds: float
    planned: Planned
    plan: Measured | None
    rivals: dict[str, list[Measured]]

    def best(self, rival: str) -> Measured | None:
        """The fastest of a group, by every second round; ``None`` if none fits.

        The other rounds compare it with the plan: the least of many noisy numbers is
        too small.
        """
        return min(
            self.rivals[rival],
            key=lambda measured: statistics.median(measured.seconds[::2]),
            default=None,
        )

    def ratio(self, rival: str) -> float | None:
        """The seconds of the fastest of a group by those of the plan in a round."""
        best = self.best(rival)
        if best is None or self.plan is None:
            return None
        pairs = zip(best.seconds[1::2], self.plan.seconds[1::2], strict=True)
        return statistics.median(
            rival_seconds / plan_seconds for rival_seconds, plan_seconds in pairs
        )

    @property
    def share(self) -> float | None:
        """The bytes of the fullest device under the plan by the limit."""
        limit = self.planned.limit
        return self.plan.num_bytes / limit if self.plan and limit else None

    @property
    def predicted(self) -> float | None:
        """The predicted seconds of a step by the measured ones."""
        return self.plan and self.plan.way.seconds / self.plan.median

    def cells(self) -> list[str]:
        """The cells of its line."""
        limit = self.planned.limit
        best = self.best("named")
        return [
            self.model,
            f"{limit / 2**20:.2f} MiB" if limit else "none",
            f"{self.plan.way}" if self.plan else "nothing fits",
            f"{best.way}" if best else "none fits",
            _cell(self.share),
            f"{1e3 * self.plan.median:.1f}" if self.plan else "-",
            *(_cell(self.ratio(rival)) for rival in RIVALS),
            _cell(self.predicted),
            f"{self.profile_seconds:.1f}",
            f"{self.planned.plan_seconds:.1f}",
        ]


def _cell(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def _run(command: Sequence[str]) -> None:
    """Runs a module in the environment of all processes that are measured.

    Raises:
      RuntimeError: if it fails; with its last words.
    """
    # What an earlier run compiled would be read in one of the processes alone.
    kept = {k: v for k, v in os.environ.items() if not k.startswith("JAX_COMPILATION")}
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env=kept | ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        words = (done.stdout + done.stderr).strip()[-3000:]
        raise RuntimeError(f"{' '.join(command)}\n{words}")


def run_pair(folder: Path, cores: list[int], *words: str) -> list[Any]:
    """What two processes of `pair` write, the first one first.

    Args:
      folder: where they write.
      cores: one for each.
      *words: further options.
    """
    launch = ["jpipe", "launch", "--processes", "2", "-m", f"{__package__}.pair"]
    _run([*launch, "--cores", json.dumps(cores), "--out", str(folder), *words])
    return [json.loads((folder / f"{i}.json").read_text()) for i in range(2)]


def measure_model(
    name: str, link: Link, rounds: int, cores: list[int]
) -> dict[str, Any]:
    """Plans a model and times all ways to run it.

    Returns:
      What `ways.find_ways` returns, and ``"measured"``: what each process of `pair`
      writes.
    """
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        path = folder / "ways.json"
        words = ["--latency", str(link.latency), "--bandwidth", str(link.bandwidth)]
        words += ["--out", str(path)]
        words += ["--core", str(cores[0])] if cores else []
        _run([f"{__package__}.ways", name, *words])
        words = ["--model", name, "--ways", str(path), "--rounds", str(rounds)]
        measured = run_pair(folder, cores, *words)
        return json.loads(path.read_text()) | {"measured": measured}


def rows_of(name: str, result: dict[str, Any]) -> list[Row]:
    """The rows of a model, one for each limit.

    Args:
      name: of the model.
      result: what `measure_model` returns.

    Raises:
      ValueError: if two ways train differently.
    """
    first, second = result["measured"]
    all_measured = [
        Measured(
            way=Way(**fields),
            # The first process waits for the other in each round.
            seconds=mine["seconds"],
            loss=mine["loss"],
            # Each knows the programs of its own device alone.
            num_bytes=max([*mine["bytes"].values(), *other["bytes"].values()]),
        )
        for fields, mine, other in zip(result["ways"], first, second, strict=True)
    ]
    reference = all_measured[0]
    for measured in all_measured:
        if not math.isclose(measured.loss, reference.loss, rel_tol=SAME_LOSS):
            raise ValueError(
                f"{name}: {measured.way} has a loss of {measured.loss}, "
                f"{reference.way} of {reference.loss}"
            )
    rows = []
    for fields in result["planned"]:
        planned = Planned(**fields)
        plan = None if planned.way is None else all_measured[planned.way]
        room = math.inf if planned.limit is None else planned.limit
        if plan is not None:
            room = max(room, plan.num_bytes)
        rivals: dict[str, list[Measured]] = {rival: [] for rival in RIVALS}
        for measured in all_measured:
            if measured.num_bytes <= room:
                for rival in measured.way.rivals:
                    rivals[rival].append(measured)
        rows.append(Row(name, result["profile_seconds"], planned, plan, rivals))
    return rows


def summary(rows: Sequence[Row]) -> str:
    """The medians and the worst of all rows."""
    parts = []
    for rival in RIVALS:
        ratios = [ratio for row in rows if (ratio := row.ratio(rival)) is not None]
        if ratios:
            parts.append(
                f"{rival}: median {statistics.median(ratios):.2f}, "
                f"worst {min(ratios):.2f} of {len(ratios)}"
            )
    errors = [row.predicted for row in rows if row.predicted is not None]
    if errors:
        parts.append(f"predicted by measured: median {statistics.median(errors):.2f}")
    shares = [row.share for row in rows if row.share is not None]
    if shares:
        parts.append(f"bytes by limit: most {max(shares):.2f}")
    return "; ".join(parts)


def main() -> None:
    """Prints a table row by row, what the planner refused, and a summary."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.planning",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=[*MODELS])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write everything to a file")
    options = parser.parse_args()
    cores = separate_cores()
    if len(cores) == 1:
        parser.error("needs two cores")
    if options.rounds < 2:
        parser.error("--rounds: at least 2")
    where = provenance()
    print(f"{line(where)}\n")
    with tempfile.TemporaryDirectory() as folder:
        fields, _ = run_pair(Path(folder), cores)
    link = Link(**fields)
    print(
        f"Between the processes: {1e6 * link.latency:.0f} µs and "
        f"{link.bandwidth / 2**20:,.0f} MiB/s\n"
    )
    print(markdown.table(HEAD, [], left=NUM_WORDS), flush=True)
    results: dict[str, Any] = {}
    rows: list[Row] = []
    failures: list[str] = []
    for name in options.models:
        try:
            results[name] = measure_model(name, link, options.rounds, cores)
        except RuntimeError as error:  # the others are measured all the same
            failures.append(f"{name}: {error}")
            continue
        if options.json:
            everything = {"provenance": where, "link": fields, "models": results}
            options.json.write_text(json.dumps(everything, indent=1) + "\n")
        for row in rows_of(name, results[name]):
            rows.append(row)
            print(markdown.line(row.cells()), flush=True)
    for row in rows:
        if row.planned.refusal:
            print(f"\n{row.model}: {row.planned.refusal}")
    print(f"\n{summary(rows)}")
    if failures:
        raise SystemExit("\n\n".join(failures))


if __name__ == "__main__":
    main()
