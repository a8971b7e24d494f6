"""The tables of plans: each way to run a model beside the tuned plan.

    ratio = seconds of a step of the way / those of the tuned plan in the same round

The fastest of several ways is chosen by every second round and compared in the others:
the least of many noisy numbers is too small.
"""

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .. import markdown
from ..provenance import line
from .ways import EQUAL, GPIPE_CUT, NAMED, TORCHGPIPE, Planned, Tuned, Way

PAPER = "plan on paper"
TUNED = "tuned plan"
# group -> the title of its column
GROUPS = {
    EQUAL: "even split",
    GPIPE_CUT: "torchgpipe",
    TORCHGPIPE: "its cut, 1F1B",
    NAMED: "named",
    PAPER: PAPER,
}
SPEED_HEAD = ("model", "limit", TUNED, "ms", *GROUPS.values())
FORECAST_HEAD = (
    "model",
    "limit",
    PAPER,
    "best named",
    "paper",
    "tuned",
    "finalists",
    "profile, s",
    "plan, s",
    "tune, s",
)
# Losses of the same step in another order of sums.
SAME_LOSS = 1e-3
# The aims: of the speed of the fastest way, and the error of a forecast.
LEAST_SPEED = 0.99
MOST_ERROR = 0.1


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
    """All ways to run a model under a limit.

    Attributes:
      model: the name of the model.
      profile_seconds: that measuring its layers took.
      planned: what the planner said.
      tuned: what `jpipe.tune` returned.
      paper_plan: the plan on paper as it ran; ``None`` if nothing fits.
      tuned_plan: the tuned plan as it ran; ``None`` if nothing fits.
      fitting: the name of a group -> its ways that fit the limit as they are compiled.
    """

    model: str
    profile_seconds: float
    planned: Planned
    tuned: Tuned
    paper_plan: Measured | None
    tuned_plan: Measured | None
    fitting: dict[str, list[Measured]]

    def find_fastest(self, group: str) -> Measured | None:
        """The fastest way of a group, by every second round; ``None`` if none fits."""
        return min(
            self.fitting[group],
            key=lambda measured: statistics.median(measured.seconds[::2]),
            default=None,
        )

    def ratio(self, group: str) -> float | None:
        """The seconds of the fastest of a group by those of the tuned plan."""
        fastest = self.find_fastest(group)
        if fastest is None or self.tuned_plan is None:
            return None
        pairs = zip(fastest.seconds[1::2], self.tuned_plan.seconds[1::2], strict=True)
        return statistics.median(seconds / tuned for seconds, tuned in pairs)

    @property
    def ratios(self) -> dict[str, float]:
        """The ratio of each group of which a way fits."""
        ratios = {group: self.ratio(group) for group in GROUPS}
        return {group: ratio for group, ratio in ratios.items() if ratio is not None}

    @property
    def speed(self) -> float | None:
        """The speed of the tuned plan by that of the fastest of all ways, at most 1."""
        return min([1.0, *self.ratios.values()]) if self.tuned_plan else None

    @property
    def paper_error(self) -> float | None:
        """The predicted seconds of the plan on paper by the measured ones."""
        return _divide(self.planned.predicted, self.paper_plan)

    @property
    def tuned_error(self) -> float | None:
        """The predicted seconds of the tuned plan by the measured ones."""
        return _divide(self.tuned.predicted, self.tuned_plan)

    @property
    def finalist_errors(self) -> list[float]:
        """The predicted seconds of each plan that `tune` ran by those it measured."""
        return [predicted / seconds for predicted, seconds in self.tuned.trials]

    @property
    def limit_text(self) -> str:
        """The limit of bytes."""
        limit = self.planned.limit
        return f"{limit / 2**20:.2f} MiB" if limit else "none"

    def list_speed_cells(self) -> list[str]:
        """The cells of its line in the table of speeds; the fastest is bold."""
        tuned_text = "nothing fits"
        milliseconds = "-"
        if self.tuned_plan is not None:
            tuned_text = f"{self.tuned_plan.way}"
            milliseconds = f"{1e3 * self.tuned_plan.median:.1f}"
        cells = {group: self._cell(group) for group in GROUPS}
        ratios = self.ratios
        if ratios:
            fastest = min(ratios, key=lambda group: ratios[group])
            if round(ratios[fastest], 2) < 1:
                cells[fastest] = f"**{cells[fastest]}**"
            else:
                milliseconds = f"**{milliseconds}**"
        words = [self.model, self.limit_text, tuned_text]
        return [*words, milliseconds, *cells.values()]

    def list_forecast_cells(self) -> list[str]:
        """The cells of its line in the table of forecasts."""
        named = self.find_fastest(NAMED)
        errors = self.finalist_errors
        tune_seconds = self.tuned.seconds
        return [
            self.model,
            self.limit_text,
            f"{self.paper_plan.way}" if self.paper_plan else "nothing fits",
            f"{named.way}" if named else "none fits",
            _format(self.paper_error),
            _format(self.tuned_error),
            f"{min(errors):.2f} to {max(errors):.2f}" if errors else "-",
            f"{self.profile_seconds:.0f}",
            f"{self.planned.plan_seconds:.0f}",
            "-" if tune_seconds is None else f"{tune_seconds:.0f}",
        ]

    def _cell(self, group: str) -> str:
        """The ratio of a group; the milliseconds of its step if nothing was tuned."""
        if (ratio := self.ratio(group)) is not None:
            return f"{ratio:.2f}"
        if (fastest := self.find_fastest(group)) is not None:
            return f"{1e3 * fastest.median:.1f} ms"
        if group == PAPER and self.paper_plan is not None and self.planned.limit:
            share = self.paper_plan.num_bytes / self.planned.limit
            return f"needs {share:.2f}"
        return "-"


def _divide(predicted: float | None, measured: Measured | None) -> float | None:
    if predicted is None or measured is None:
        return None
    return predicted / measured.median


def _format(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def rows_of(name: str, result: dict[str, Any]) -> list[Row]:
    """The rows of a model, one for each limit.

    Args:
      name: of the model.
      result: what ``measure_model`` of the command returns.

    Raises:
      ValueError: if two ways train differently.
    """
    first, second = result["measured"]
    all_measured = [
        Measured(
            way=Way(**fields),
            # The first process waits for the other in each round.
            seconds=mine["seconds"],
            # A process that runs no stage has none.
            loss=other["loss"] if mine["loss"] is None else mine["loss"],
            # Each knows the programs of its own device alone.
            num_bytes=max([*mine["bytes"].values(), *other["bytes"].values()]),
        )
        for fields, mine, other in zip(result["ways"], first, second, strict=True)
    ]
    _check_losses(name, all_measured)
    rows = []
    for planned_fields, tuned_fields in zip(
        result["planned"], result["tuned"], strict=True
    ):
        planned = Planned(**planned_fields)
        tuned = Tuned(**tuned_fields)
        paper_plan = None if planned.way is None else all_measured[planned.way]
        tuned_plan = None if tuned.way is None else all_measured[tuned.way]
        room = math.inf if planned.limit is None else planned.limit
        fitting: dict[str, list[Measured]] = {group: [] for group in GROUPS}
        for measured in all_measured:
            if measured.num_bytes <= room:
                for rival in measured.way.rivals:
                    fitting[rival].append(measured)
        if paper_plan is not None and paper_plan.num_bytes <= room:
            fitting[PAPER].append(paper_plan)
        seconds = result["profile_seconds"]
        rows.append(Row(name, seconds, planned, tuned, paper_plan, tuned_plan, fitting))
    return rows


def _check_losses(name: str, all_measured: Sequence[Measured]) -> None:
    """Checks that ways with as many micro-batches have the same loss.

    Batch statistics are those of a micro-batch.
    """
    # number of micro-batches -> the first way with so many
    references: dict[int, Measured] = {}
    for measured in all_measured:
        reference = references.setdefault(measured.way.num_microbatches, measured)
        if not math.isclose(measured.loss, reference.loss, rel_tol=SAME_LOSS):
            raise ValueError(
                f"{name}: {measured.way} has a loss of {measured.loss}, "
                f"{reference.way} of {reference.loss}"
            )


def summarize(rows: Sequence[Row]) -> Iterator[str]:
    """Sentences on all rows, by the aims."""
    speeds = [row.speed for row in rows if row.speed is not None]
    if speeds:
        num_fast = sum(round(speed, 2) >= LEAST_SPEED for speed in speeds)
        yield (
            f"tuned plans reach {LEAST_SPEED} of the fastest way in {num_fast} of "
            f"{len(speeds)} rows, at least {min(speeds):.2f}"
        )
    for group, title in GROUPS.items():
        ratios = [row.ratios[group] for row in rows if group in row.ratios]
        if ratios:
            yield (
                f"{title}: median {statistics.median(ratios):.2f}, {min(ratios):.2f} "
                f"to {max(ratios):.2f} of the tuned plan's step, {len(ratios)} rows"
            )
    forecasts = {
        "finalists": [error for row in rows for error in row.finalist_errors],
        TUNED: [row.tuned_error for row in rows if row.tuned_error is not None],
        PAPER: [row.paper_error for row in rows if row.paper_error is not None],
    }
    for title, errors in forecasts.items():
        if errors:
            num_good = sum(abs(error - 1) <= MOST_ERROR for error in errors)
            yield (
                f"predicted by measured seconds, {title}: {min(errors):.2f} to "
                f"{max(errors):.2f}, within {MOST_ERROR:.0%} in {num_good} of "
                f"{len(errors)}"
            )
    seconds = [row.tuned.seconds for row in rows if row.tuned.seconds is not None]
    if seconds:
        yield (
            f"seconds of tuning: median {statistics.median(seconds):.0f}, at most "
            f"{max(seconds):.0f}"
        )


def format_page(results: dict[str, dict[str, Any]]) -> str:
    """The tables of all models, the refusals, and a summary.

    Args:
      results: the name of each model and what was measured.
    """
    rows = [row for name, result in results.items() for row in rows_of(name, result)]
    parts = [
        markdown.table(SPEED_HEAD, [row.list_speed_cells() for row in rows], left=3),
        markdown.table(
            FORECAST_HEAD, [row.list_forecast_cells() for row in rows], left=4
        ),
        "\n".join(f"* {sentence}" for sentence in summarize(rows)),
    ]
    links = {json.dumps(x["link"]): x["link"] for x in results.values()}
    parts += [
        f"Between the processes: {1e6 * link['latency']:.0f} µs and "
        f"{link['bandwidth'] / 2**20:,.0f} MiB/s"
        for link in links.values()
    ]
    parts += sorted({line(result["provenance"]) for result in results.values()})
    for row in rows:
        refusals = [row.planned.refusal, row.tuned.refusal]
        parts += [f"{row.model}, {row.limit_text}: {x}" for x in refusals if x]
    return "\n\n".join(parts)
