"""Timelines: the start and end of each action of a schedule, predicted or measured."""

import dataclasses
import functools
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ._action import BACKWARD, FORWARD, INPUT, OPS, WEIGHT, Action
from ._action_tables import ActionTables
from ._bound import compute_lower_bound
from ._costs import TIME_FIELDS, Costs
from ._formats import format_bytes, format_percent, format_seconds
from ._schedule_data import ScheduleData

# The most columns into which the text picture divides the shortest action.
_MAX_COLUMNS = 8


class MemoryEvent(NamedTuple):
    """A change of memory: from ``time`` on ``rank`` holds ``bytes``."""

    time: float
    rank: int
    bytes: float


class Exchange(NamedTuple):
    """The ``ranks`` of ``stage`` add up their gradients from ``start`` to ``end``."""

    stage: int
    ranks: tuple[int, ...]
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The start and end of every action, and the bytes that each rank holds.

    Prints as one line: its time, how far that is from what no schedule can beat, the
    bubble, the peaks.

    Attributes:
      schedule: the schedule.
      start: the start of each action, in the unit of the costs; seconds if measured.
      end: the end of each action.
      memory: the bytes of each rank: first of all ranks before the first action, then
        after each change, in order.
      costs: the costs from which it was predicted; if it was measured, the medians of
        its times and its bytes, or ``None``.
      exchanges: the exchanges of gradients between ranks that share a stage, each after
        the last gradient of its stage: at the end of the step, or hidden behind other
        stages that still compute.
    """

    schedule: ScheduleData
    start: Mapping[Action, float]
    end: Mapping[Action, float]
    memory: tuple[MemoryEvent, ...] = ()
    costs: Costs | None = None
    exchanges: tuple[Exchange, ...] = ()

    @property
    def name(self) -> str:
        """The name of the schedule."""
        return self.schedule.name

    @property
    def placement(self) -> tuple[int, ...]:
        """The rank of each stage."""
        return self.schedule.placement

    @property
    def rows(self) -> tuple[tuple[Action, ...], ...]:
        """The actions of each rank, in order."""
        return self.schedule.rows

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return self.schedule.num_stages

    @property
    def in_seconds(self) -> bool:
        """True if times are seconds and sizes bytes; else they are in other units."""
        return self.costs is None or self.costs.in_seconds

    @functools.cached_property
    def compute_start(self) -> Mapping[Action, float]:
        """The start of each action, after what its rank receives without computing."""
        return {action: start for action, (start, _) in self._compute_spans.items()}

    @functools.cached_property
    def compute_end(self) -> Mapping[Action, float]:
        """The end of each action, before what its rank sends without computing."""
        return {action: end for action, (_, end) in self._compute_spans.items()}

    @functools.cached_property
    def _compute_spans(self) -> Mapping[Action, tuple[float, float]]:
        return self._list_compute_spans(self.costs or Costs())

    def _list_compute_spans(self, costs: Costs) -> Mapping[Action, tuple[float, float]]:
        """The start and the end of what each action computes.

        Args:
          costs: the costs, which say how long the transfers in an action take.
        """
        spans: dict[Action, tuple[float, float]] = {}
        tables = ActionTables(costs, self.schedule)
        for action, start in self.start.items():
            end = self.end[action]
            action_id = tables.id_of(action)
            # A measured action may take less than its transfers were said to take.
            compute_start = min(start + tables.receive_times[action_id], end)
            compute_end = max(end - tables.send_times[action_id], compute_start)
            spans[action] = compute_start, compute_end
        return spans

    @functools.cached_property
    def begin(self) -> float:
        """The first start."""
        return min(self.start.values(), default=0.0)

    @functools.cached_property
    def makespan(self) -> float:
        """The time from the first start to the last end."""
        exchanged = [exchange.end for exchange in self.exchanges]
        return max([*self.end.values(), *exchanged], default=0.0) - self.begin

    @property
    def busy(self) -> tuple[float, ...]:
        """The time of each rank in actions, and in transfers that keep it from them."""
        return tuple(sum(self.end[a] - self.start[a] for a in row) for row in self.rows)

    @property
    def idle(self) -> tuple[float, ...]:
        """The time that each rank spends outside of actions, within the makespan."""
        return tuple(self.makespan - time for time in self.busy)

    @property
    def bubble_fraction(self) -> float:
        """The share of all ranks' time that is idle, between 0 and 1."""
        total = self.makespan * len(self.rows)
        return sum(self.idle) / total if total else 0.0

    @functools.cached_property
    def lower_bound(self) -> float:
        """The time that no schedule of these stages beats, at these costs.

        Each rank is looked at alone: all its actions, each not before its inputs can be
        there, and after each the stages that follow and the exchange of gradients. It
        may even interrupt its work, and its backwards are whole or split, whichever is
        less.

        Raises:
          ValueError: if the timeline was measured and has no costs.
        """
        if self.costs is None:
            raise ValueError(
                f"{self.name} was measured: schedule.simulate(costs) has costs that a "
                f"bound can be computed from"
            )
        return compute_lower_bound(ActionTables(self.costs, self.schedule))

    @property
    def gap(self) -> float:
        """The time beyond the lower bound, as a fraction of the bound."""
        bound = self.lower_bound
        # Sums in another order may be less by a rounding error.
        return max(self.makespan / bound - 1, 0.0) if bound else 0.0

    def __str__(self) -> str:
        time, peaks = format_time_and_peaks(self)
        text = f"{self.name}: time {time}"
        if self.costs is not None:
            text += f" ({format_percent(self.gap)} above the bound)"
        text += f", bubble {format_percent(self.bubble_fraction)}"
        if self.memory:
            text += f", peak bytes per rank {peaks}"
        return text

    @property
    def bottleneck(self) -> int:
        """The rank with the most to do: no order makes the step faster than that."""
        busy = self.busy
        return max(range(len(busy)), key=busy.__getitem__, default=0)

    @functools.cached_property
    def peak_bytes(self) -> tuple[float, ...]:
        """The most that each rank holds at any time."""
        peaks = [0.0] * len(self.rows)
        for _, rank, live in self.memory:
            peaks[rank] = max(peaks[rank], live)
        return tuple(peaks)

    def needs(self, action: Action) -> tuple[Action, ...]:
        """The actions that an action reads: of neighbours, and by skip connections."""
        op, stage, microbatch = action
        skips = self.costs.skips if self.costs else ()
        if op == FORWARD:
            sources = [stage - 1]
            sources += [skip.source for skip in skips if skip.target == stage]
            needed = [Action(FORWARD, s, microbatch) for s in dict.fromkeys(sources)]
        elif op == WEIGHT:
            needed = [Action(INPUT, stage, microbatch)]
        else:
            needed = [Action(FORWARD, stage, microbatch)]
            targets = [stage + 1]
            targets += [skip.target for skip in skips if skip.source == stage]
            for target in dict.fromkeys(targets):
                # Of the two, the one that the schedule has.
                needed.append(Action(INPUT, target, microbatch))
                needed.append(Action(BACKWARD, target, microbatch))
        return tuple(need for need in needed if need in self.end)

    def median_costs(self, costs: Costs | None = None) -> Costs:
        """The median time of each op of each stage.

        Args:
          costs: costs for the other fields; default: those of this timeline.

        Returns:
          Costs with one time per stage, for predicting this or another schedule of
          the same stages. The time of an op that no stage ran is that of ``costs``; of
          an op that only other stages ran, 0. Transfers that do not overlap are no part
          of these times.
        """
        costs = costs or self.costs or Costs()
        # op -> the times of each stage
        times = {op: [list[float]() for _ in self.placement] for op in OPS}
        for action, (start, end) in self._list_compute_spans(costs).items():
            times[action.op][action.stage].append(end - start)
        medians: dict[str, list[float]] = {}
        for op, stage_times in times.items():
            if any(stage_times):
                medians[TIME_FIELDS[op]] = [
                    statistics.median(durations) if durations else 0.0
                    for durations in stage_times
                ]
        return dataclasses.replace(costs, **medians)

    def to_text(self) -> str:
        """A picture: one line per rank, columns of equal time, ``.`` is idle.

        Columns are so fine that actions begin and end with one. The number of the stage
        is left out if each rank has a single stage. ``-`` is a transfer that keeps the
        rank from computing: before an action what it receives, after it what it sends.
        """
        shows_stage = self.num_stages > len(self.rows)

        width = 1
        lines: list[list[str]] = []
        for row in self.rows:
            cells = ["."] * self.num_columns
            for action in row:
                label = f"{action.op}{action.microbatch}"
                if shows_stage:
                    label = str(action)
                width = max(width, len(label))
                # What an action computes is written over its transfers.
                for index in self._columns(self.start[action], self.end[action]):
                    cells[index] = "-"
                start = self.compute_start[action]
                for index in self._columns(start, self.compute_end[action]):
                    cells[index] = label
            lines.append(cells)

        digits = len(str(len(self.rows) - 1))
        return "\n".join(
            f"rank {rank:{digits}} |{' '.join(cell.ljust(width) for cell in cells)}|"
            for rank, cells in enumerate(lines)
        )

    @functools.cached_property
    def num_columns(self) -> int:
        """The number of columns of `to_text`."""
        last = max(self.end.values(), default=self.begin) - self.begin
        return round(last / self._column_time)

    def _columns(self, start: float, end: float) -> range:
        """The columns from one time to another."""
        first = round((start - self.begin) / self._column_time)
        return range(first, round((end - self.begin) / self._column_time))

    @functools.cached_property
    def _column_time(self) -> float:
        """The greatest time of which all times are multiples, if not too fine."""
        durations = [self.end[action] - start for action, start in self.start.items()]
        shortest = min((time for time in durations if time > 0), default=1.0)
        times = [*self.start.values(), *self.end.values()]
        times += [*self.compute_start.values(), *self.compute_end.values()]
        multiples = [(time - self.begin) / shortest for time in times]
        for parts in range(1, _MAX_COLUMNS):
            if all(abs(x * parts - round(x * parts)) < 1e-6 for x in multiples):
                return shortest / parts
        # Times are rounded to columns, rather than a picture wider than any screen.
        return shortest / _MAX_COLUMNS


def format_time_and_peaks(timeline: Timeline) -> tuple[str, str]:
    """The makespan and the peaks of all ranks as text, with units if they have any."""
    peaks = timeline.peak_bytes
    if timeline.in_seconds:
        time = format_seconds(timeline.makespan)
        return time, ", ".join(format_bytes(int(peak)) for peak in peaks)
    return f"{timeline.makespan:.4g}", ", ".join(f"{peak:.4g}" for peak in peaks)
