"""Pipeline schedules as data: the actions of every rank, in order."""

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from . import _validate
from ._action import FORWARD, Action
from ._action_tables import ActionTables, SimulatedOrder
from ._costs import Costs
from ._formats import format_count, format_percent
from ._json import decode, parse_json
from ._placement import infer_replicas
from ._schedule_data import ScheduleData
from ._simulate import (
    TOO_LONG,
    ScheduleError,
    build_timeline,
    check_costs,
    explain_deadlock,
)
from ._timeline import Timeline


@dataclass(frozen=True)
class Schedule(ScheduleData):
    """The actions of every rank, in order.

    Attributes:
      name: the name.
      num_stages: the number of stages.
      num_microbatches: the number of micro-batches of one step.
      placement: the rank of each stage.
      rows: the actions of each rank, in the order in which it runs them.
      forward_only: True for inference, without any backward.
      replicas: the ranks of each stage, if several take turns at one; else empty. The
        rows tell which of them runs a micro-batch; ``placement`` has the first.

    Example:
      >>> from jpipe.schedules import one_f_one_b
      >>> schedule = one_f_one_b(2, 3)
      >>> print(schedule.to_text())
      0F0 0F1 0B0 0F2 0B1 0B2
      1F0 1B0 1F1 1B1 1F2 1B2
      >>> print(schedule)
      1f1b: 2 ranks, 2 stages, 3 micro-batches, bubble 25.0 %
      rank 0 |F0 F1 .  .  B0 B0 F2 B1 B1 .  B2 B2|
      rank 1 |.  F0 B0 B0 F1 B1 B1 F2 B2 B2 .  . |
    """

    def to_text(self) -> str:
        """One line per rank, cells separated by blanks; `from_text` reads it."""
        return "\n".join(" ".join(map(str, row)) for row in self.rows)

    @classmethod
    def from_text(cls, text: str, name: str = "custom") -> "Schedule":
        r"""Reads a schedule that `to_text` or a person wrote.

        Args:
          text: one line per rank, cells such as ``2F0`` separated by blanks or commas.
            Empty cells, blank lines and comments after a ``#`` are ignored.
          name: the name of the schedule.

        Returns:
          A valid schedule; its sizes and placement are those of the cells. Where the
          forwards of a stage are on several ranks, these are its ``replicas``, in
          ascending order. Without any backward it is for inference.

        Raises:
          ScheduleError: if a cell is not an action or the schedule cannot run.

        Example:
          >>> Schedule.from_text("0F0 0B0\n1F0 1B0").placement
          (0, 1)
          >>> Schedule.from_text("0F0 1F1 1B1 0B0\n1F0 0F1 1B0 0B1").replicas
          ((0, 1), (0, 1))
        """
        lines = [
            line.partition("#")[0].replace(",", " ").split()
            for line in text.splitlines()
        ]
        rows = _parse_rows(name, [line for line in lines if line])
        actions = list(itertools.chain.from_iterable(rows))
        if not actions:
            raise ScheduleError("an empty text holds no schedule")

        num_stages = max(action.stage for action in actions) + 1
        replicas = infer_replicas(rows, num_stages)
        has_replicas = any(len(ranks) > 1 for ranks in replicas)
        schedule = cls(
            name=name,
            num_stages=num_stages,
            num_microbatches=max(action.microbatch for action in actions) + 1,
            placement=tuple(ranks[0] for ranks in replicas),
            rows=rows,
            forward_only=all(action.op == FORWARD for action in actions),
            replicas=replicas if has_replicas else (),
        )
        return schedule.validate()

    def to_json(self) -> str:
        """All fields as a JSON object; `from_json` reads it."""
        fields = dataclasses.asdict(self)
        fields["rows"] = [[str(action) for action in row] for row in self.rows]
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str) -> "Schedule":
        """Reads what `to_json` wrote.

        Raises:
          ScheduleError: if the text is something else, or the schedule cannot run.

        Example:
          >>> from jpipe.schedules import zb_h1
          >>> schedule = zb_h1(2, 3)
          >>> Schedule.from_json(schedule.to_json()) == schedule
          True
        """
        refusal = "no schedule as Schedule.to_json writes it"
        with parse_json(refusal, text, ScheduleError) as fields:
            schedule: Schedule = decode(cls, fields)
        return schedule.validate()

    def validate(self) -> "Schedule":
        """Checks that the schedule runs everything once, in an order that ends.

        Returns:
          The schedule itself.

        Raises:
          ScheduleError: with every fault, each with its rule: E0 a size or cell of a
            wrong type, E1 unknown op, E2 stage, E3 micro-batch out of range, E4 on a
            rank that is not its stage's, E5 missing, twice, or both whole and split, E6
            order on the rank, E7 a cycle of waiting ranks, E8 backward on another rank
            than its forward.

        Warns:
          UserWarning: E9, if a rank runs nothing.
        """
        faults = _validate.find_faults(self)
        if not faults:
            try:
                self.order()
            except ScheduleError as error:
                faults.append(f"E7 {error}")
        if faults:
            raise ScheduleError(_validate.format_refusal(self.name, faults))
        return self

    def simulate(self, costs: Costs | None = None) -> Timeline:
        """Predicts the start and end of each action, and the bytes that ranks hold.

        Args:
          costs: the costs of each action; default: a backward takes two forwards, its
            halves one each, and a stage stores one unit of memory per micro-batch.

        Returns:
          The timeline, in the unit of the costs.

        Raises:
          ScheduleError: if the schedule deadlocks, or costs are for other numbers of
            stages or micro-batches, negative or not finite.
        """
        costs = Costs() if costs is None else costs
        check_costs(self.name, costs, self.num_microbatches, self.num_stages)
        return build_timeline(self._simulate_rows(costs), self.order())

    def order(self) -> tuple[Action, ...]:
        """All actions in the order in which a step dispatches them.

        They are sorted by end, with the default costs, in which a backward takes two
        forwards.
        """
        return self._order

    @cached_property
    def _order(self) -> tuple[Action, ...]:
        simulated = self._simulate_rows(Costs())
        return tuple(map(simulated.tables.action, simulated.sort_by_end()))

    def _simulate_rows(self, costs: Costs) -> SimulatedOrder:
        """Simulates the rows; raises a ScheduleError if they deadlock."""
        tables = ActionTables(costs, self)
        simulated = tables.simulate(tables.to_ids(self.rows))
        if not simulated.is_complete:
            raise ScheduleError(explain_deadlock(simulated))
        if simulated.makespan == math.inf:
            raise ScheduleError(f"{self.name}: {TOO_LONG}")
        return simulated

    def forwards(self) -> "Schedule":
        """The same schedule without its backwards, as inference runs it."""
        if self.forward_only:
            return self
        rows = tuple(
            tuple(action for action in row if action.op == FORWARD) for row in self.rows
        )
        name = f"{self.name} (forward)"
        return dataclasses.replace(self, name=name, rows=rows, forward_only=True)

    def __str__(self) -> str:
        return self.drawn(Costs())

    def drawn(self, costs: Costs, *, has_bubble: bool = True) -> str:
        """Formats sizes, bubble and picture, at these costs.

        Actions that take no time are not in the picture.
        """
        timeline = self.simulate(costs)
        facts = [
            format_count(self.num_ranks, "rank"),
            format_count(self.num_stages, "stage"),
            format_count(self.num_microbatches, "micro-batch"),
        ]
        if has_bubble:
            facts.append(f"bubble {format_percent(timeline.bubble_fraction)}")
        return f"{self.name}: {', '.join(facts)}\n{timeline.to_text()}"


ScheduleBuilder = Callable[[int, int], Schedule]


def simulate_rows(schedule: Schedule, costs: Costs) -> SimulatedOrder:
    """Simulates a schedule for its makespan and peaks, with costs that are not checked.

    A `Timeline`, which has each action by name, takes three times as long to make.
    """
    return schedule._simulate_rows(costs)


def _parse_rows(
    name: str, lines: Sequence[Sequence[str]]
) -> tuple[tuple[Action, ...], ...]:
    """Parses the cells of each rank; raises a ScheduleError with every fault."""
    faults: list[str] = []
    rows: list[tuple[Action, ...]] = []
    for rank, cells in enumerate(lines):
        row: list[Action] = []
        for position, cell in enumerate(cells):
            try:
                row.append(Action.parse(cell))
            except ValueError as error:
                faults.append(f"E1 {error} (rank {rank}, position {position})")
        rows.append(tuple(row))
    if faults:
        raise ScheduleError(_validate.format_refusal(name, faults))
    return tuple(rows)
