"""When each action of a schedule runs, given what each one costs."""

from collections.abc import Mapping
from dataclasses import dataclass

from ._action import BACKWARD, FORWARD, Action


class ScheduleError(ValueError):
    """A schedule that cannot run; the message lists every fault."""


@dataclass(frozen=True)
class Costs:
    """What one action costs: the same for every stage, in any unit of time.

    Attributes:
      forward: time of one forward.
      backward: time of one backward, recomputation included.
    """

    forward: float = 1.0
    backward: float = 2.0

    def of(self, action: Action) -> float:
        """The cost of one action, in the unit of the fields."""
        return {FORWARD: self.forward, BACKWARD: self.backward}[action.op]


@dataclass(frozen=True)
class Timeline:
    """The start and end of every action, in the unit of the costs.

    Attributes:
      rows: the actions of each rank, in order.
      start: when each action starts.
      end: when it ends.
      num_stages: the number of stages, for the labels of the picture.
    """

    rows: tuple[tuple[Action, ...], ...]
    start: Mapping[Action, float]
    end: Mapping[Action, float]
    num_stages: int

    @property
    def makespan(self) -> float:
        """The time from the first start to the last end."""
        return max(self.end.values(), default=0.0)

    @property
    def idle(self) -> tuple[float, ...]:
        """The time that each rank spends waiting, within the makespan."""
        busy = [sum(self.end[a] - self.start[a] for a in row) for row in self.rows]
        return tuple(self.makespan - time for time in busy)

    @property
    def bubble_fraction(self) -> float:
        """The share of all ranks' time that is idle, between 0 and 1."""
        total = self.makespan * len(self.rows)
        return sum(self.idle) / total if total else 0.0

    def order(self) -> tuple[Action, ...]:
        """All actions in one order that respects every dependency: by start."""
        ranked = (
            (self.start[action], rank, action)
            for rank, row in enumerate(self.rows)
            for action in row
        )
        return tuple(action for _, _, action in sorted(ranked))

    def to_text(self) -> str:
        """A picture: one line per rank, one column per unit of time, ``.`` is idle.

        The number of the stage is left out where each rank has a single one.
        """
        several = self.num_stages > len(self.rows)
        labels = {
            action: str(action) if several else f"{action.op}{action.microbatch}"
            for row in self.rows
            for action in row
        }
        width = max((len(label) for label in labels.values()), default=1)
        lines = []
        for rank, row in enumerate(self.rows):
            cells = ["."] * round(self.makespan)
            for action in row:
                span = range(round(self.start[action]), round(self.end[action]))
                for column in span:
                    cells[column] = labels[action]
            line = " ".join(cell.ljust(width) for cell in cells)
            lines.append(f"rank {rank} |{line}|")
        return "\n".join(lines)


def simulate(
    rows: tuple[tuple[Action, ...], ...], num_stages: int, costs: Costs
) -> Timeline:
    """Runs the rows on paper: each rank in its order, each action once it can.

    Args:
      rows: the actions of each rank, in order.
      num_stages: the number of stages.
      costs: what each action costs. Transfers are free.

    Returns:
      The timeline.

    Raises:
      ScheduleError: if some ranks wait for ever; the message says for what.
    """
    start: dict[Action, float] = {}
    end: dict[Action, float] = {}
    free = [0.0] * len(rows)
    position = [0] * len(rows)
    progress = True
    while progress:
        progress = False
        for rank, row in enumerate(rows):
            while position[rank] < len(row):
                action = row[position[rank]]
                needs = action.needs(num_stages)
                if not all(need in end for need in needs):
                    break
                begin = max([free[rank], *(end[need] for need in needs)])
                start[action] = begin
                end[action] = free[rank] = begin + costs.of(action)
                position[rank] += 1
                progress = True
    stuck = [rank for rank, row in enumerate(rows) if position[rank] < len(row)]
    if stuck:
        raise ScheduleError(
            "the schedule waits for ever: "
            + "; ".join(
                _wait(rank, rows[rank][position[rank]], end, num_stages)
                for rank in stuck
            )
        )
    return Timeline(rows, start, end, num_stages)


def _wait(
    rank: int, action: Action, done: Mapping[Action, float], num_stages: int
) -> str:
    missing = [str(need) for need in action.needs(num_stages) if need not in done]
    return f"rank {rank} cannot start {action} before {' and '.join(missing)}"
