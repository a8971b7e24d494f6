"""When each action of a schedule runs, predicted or measured."""

import dataclasses
import functools
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ._action import BACKWARD, FORWARD, INPUT, OPS, WEIGHT, Action
from ._bound import lower_bound
from ._costs import FIELDS, Costs
from ._tables import Tables
from ._units import duration, share, size

# Into so many columns the text picture cuts the shortest action at most.
_FINEST = 8


class MemoryEvent(NamedTuple):
    """From ``time`` on ``rank`` holds so many ``bytes``."""

    time: float
    rank: int
    bytes: float


class Exchange(NamedTuple):
    """From ``start`` to ``end`` the ``ranks`` of ``stage`` add up their gradients."""

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
      name: of the schedule.
      placement: the rank of each stage.
      rows: the actions of each rank, in order.
      start: when each action starts, in the unit of the costs; seconds if measured.
      end: when it ends.
      memory: what each rank holds from when on: first all ranks before the first
        action, then each change in the order in which it came about.
      costs: what it was predicted from; if it was measured, the medians of its times
        and its bytes, or ``None``.
      replicas: the ranks of each stage, where several take turns; else empty.
      exchanges: when such ranks add up their gradients, after the last of a stage: at
        the end of the step, or hidden behind other stages that still compute.
    """

    name: str
    placement: tuple[int, ...]
    rows: tuple[tuple[Action, ...], ...]
    start: Mapping[Action, float]
    end: Mapping[Action, float]
    memory: tuple[MemoryEvent, ...] = ()
    costs: Costs | None = None
    replicas: tuple[tuple[int, ...], ...] = ()
    exchanges: tuple[Exchange, ...] = ()

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.placement)

    @property
    def in_seconds(self) -> bool:
        """Whether times are seconds and sizes bytes; else they are in other units."""
        return self.costs is None or self.costs.in_seconds

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
        """The time that each rank spends in actions."""
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

        Each rank is looked at alone: everything it has to do, nothing before what it
        reads can be there, and after each action the stages that follow, and the
        exchange of gradients. It may even interrupt its work, and its backwards are
        whole or split, whichever is less.

        Raises:
          ValueError: if it was measured: then there are no costs to count with.
        """
        if self.costs is None:
            raise ValueError(
                f"{self.name} was measured: schedule.simulate(costs) has costs that a "
                f"bound can be computed from"
            )
        sizes = len(self.rows), max((a.microbatch for a in self.end), default=-1) + 1
        training = any(action.op != FORWARD for action in self.end)
        ranks = training, self.rows, self.replicas
        tables = Tables(self.costs, self.placement, *sizes, *ranks)
        return lower_bound(tables)

    @property
    def gap(self) -> float:
        """How much longer it takes than the bound, as a share of the bound."""
        bound = self.lower_bound
        # Sums in another order are a little other.
        return max(self.makespan / bound - 1, 0.0) if bound else 0.0

    def __str__(self) -> str:
        gap = "" if self.costs is None else f" ({share(self.gap)} above the bound)"
        time, peaks = in_words(self)
        text = f"{self.name}: time {time}{gap}, bubble {share(self.bubble_fraction)}"
        return f"{text}, peak bytes per rank {peaks}" if self.memory else text

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

    def order(self) -> tuple[Action, ...]:
        """All actions in one order that respects every dependency: by end."""
        # A dependency ends first, or with it if it takes no time; the mapping holds
        # the actions in an order of execution already, and the sort is stable.
        return tuple(sorted(self.end, key=self.end.__getitem__))

    def needs(self, action: Action) -> tuple[Action, ...]:
        """The actions that an action reads: of neighbours, and by skip connections."""
        op, stage, i = action
        skips = self.costs.skips if self.costs else ()
        if op == FORWARD:
            sources = [stage - 1, *(x.source for x in skips if x.target == stage)]
            reads = [Action(FORWARD, s, i) for s in dict.fromkeys(sources)]
        elif op == WEIGHT:
            reads = [Action(INPUT, stage, i)]
        else:
            reads = [Action(FORWARD, stage, i)]
            targets = [stage + 1, *(x.target for x in skips if x.source == stage)]
            for s in dict.fromkeys(targets):
                reads += [Action(other, s, i) for other in (INPUT, BACKWARD)]
        return tuple(read for read in reads if read in self.end)

    def median_costs(self, costs: Costs | None = None) -> Costs:
        """The median time of each op of each stage.

        Args:
          costs: what the other fields are; default: those of this timeline.

        Returns:
          Costs with one time per stage, for predicting this or another schedule of
          the same stages. An op that did not run costs what it costs by default:
          nothing, for those that were not requested.
        """
        times = {op: [list[float]() for _ in self.placement] for op in OPS}
        for action, start in self.start.items():
            times[action.op][action.stage].append(self.end[action] - start)
        fields = {
            FIELDS[op]: [statistics.median(own or [0.0]) for own in by_stage]
            for op, by_stage in times.items()
            if any(by_stage)
        }
        return dataclasses.replace(costs or self.costs or Costs(), **fields)

    def to_text(self) -> str:
        """A picture: one line per rank, columns of equal time, ``.`` is idle.

        Columns are so fine that actions begin and end with one. The number of the stage
        is left out where each rank has a single one.
        """
        several, column = self.num_stages > len(self.rows), self._column()
        last = max(self.end.values(), default=self.begin) - self.begin
        width = 1
        lines = []
        for row in self.rows:
            cells = ["."] * round(last / column)
            for action in row:
                first, end = (
                    (t - self.begin) / column
                    for t in (self.start[action], self.end[action])
                )
                label = str(action) if several else f"{action.op}{action.microbatch}"
                width = max(width, len(label))
                for at_column in range(round(first), round(end)):
                    cells[at_column] = label
            lines.append(cells)
        digits = len(str(len(self.rows) - 1))
        return "\n".join(
            f"rank {rank:{digits}} |{' '.join(cell.ljust(width) for cell in cells)}|"
            for rank, cells in enumerate(lines)
        )

    def _column(self) -> float:
        """The greatest time of which all times are multiples, if not too fine."""
        start, end = self.start, self.end
        lasting = [end[a] - start[a] for a in start if end[a] > start[a]]
        shortest = min(lasting, default=1.0)
        times = [(t - self.begin) / shortest for t in (*start.values(), *end.values())]
        for parts in range(1, _FINEST):
            if all(abs(time * parts - round(time * parts)) < 1e-6 for time in times):
                return shortest / parts
        # Rather rounded times than a picture that is wider than any screen.
        return shortest / _FINEST


def in_words(timeline: Timeline) -> tuple[str, str]:
    """The makespan, and the peaks of all ranks, with units where they are known."""
    known, peaks = timeline.in_seconds, timeline.peak_bytes
    time = duration(timeline.makespan) if known else f"{timeline.makespan:.4g}"
    return time, ", ".join(size(int(x)) if known else f"{x:.4g}" for x in peaks)
