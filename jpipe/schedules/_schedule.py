"""Pipeline schedules as data: who runs which action, in which order."""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from . import _validate
from ._action import FORWARD, Action
from ._costs import Costs
from ._json import reading, value_of
from ._placement import rank_of, ranks_of
from ._simulate import TOO_LONG, ScheduleError, check_costs, deadlock, predicted
from ._tables import Run, Tables
from ._timeline import Timeline
from ._units import many, share


@dataclass(frozen=True)
class Schedule:
    """The actions of every rank, in order.

    Attributes:
      name: what to call it.
      num_stages: the number of stages.
      num_microbatches: the number of micro-batches of one step.
      placement: the rank of each stage.
      rows: the actions of each rank, in the order in which it runs them.
      forward_only: whether it is for inference: no backward at all.
      replicas: the ranks of each stage, where several take turns; else empty. Which of
        them runs all of a micro-batch follows from the rows; ``placement`` has the
        first. `to_json` keeps it, a text does not have it.

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

    name: str
    num_stages: int
    num_microbatches: int
    placement: tuple[int, ...]
    rows: tuple[tuple[Action, ...], ...]
    forward_only: bool = False
    replicas: tuple[tuple[int, ...], ...] = ()

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return len(self.rows)

    @cached_property
    def rank_of(self) -> Mapping[int, Sequence[int]]:
        """Of each micro-batch the rank of each stage."""
        return rank_of(self.placement, self.rows, self.replicas)

    @property
    def ranks_of(self) -> Sequence[Sequence[int]]:
        """All ranks of each stage."""
        return ranks_of(self.placement, self.replicas)

    def to_text(self) -> str:
        """One line per rank, cells separated by blanks; `from_text` reads it."""
        return "\n".join(" ".join(map(str, row)) for row in self.rows)

    @classmethod
    def from_text(cls, text: str, name: str = "custom") -> "Schedule":
        r"""Reads a schedule that `to_text` or a person wrote.

        Args:
          text: one line per rank, cells such as ``2F0`` separated by blanks. Blank
            lines and what follows a ``#`` do not count.
          name: what to call it.

        Returns:
          A valid schedule; sizes and placement are read off the cells. Without any
          backward it is one for inference.

        Raises:
          ScheduleError: if a cell is not an action or the schedule cannot run.

        Example:
          >>> Schedule.from_text("0F0 0B0\n1F0 1B0").placement
          (0, 1)
        """
        lines = [line.partition("#")[0].split() for line in text.splitlines()]
        rows = _parse(name, [line for line in lines if line])
        cells = [(action, rank) for rank, row in enumerate(rows) for action in row]
        if not cells:
            raise ScheduleError("an empty text holds no schedule")
        placement = {action.stage: rank for action, rank in reversed(cells)}
        num_stages = max(placement) + 1
        return cls(
            name,
            num_stages,
            max(action.microbatch for action, _ in cells) + 1,
            tuple(placement.get(stage, 0) for stage in range(num_stages)),
            rows,
            forward_only=all(action.op == FORWARD for action, _ in cells),
        ).validate()

    def to_json(self) -> str:
        """All of it as a JSON object; `from_json` reads it."""
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
        with reading(refusal, text, ScheduleError) as fields:
            schedule: Schedule = value_of(cls, fields)
        return schedule.validate()

    def validate(self) -> "Schedule":
        """Checks that the schedule runs everything once, in an order that ends.

        Returns:
          The schedule itself.

        Raises:
          ScheduleError: with every fault that was found, each with its rule: E0 a
            size or cell that is none, E1 unknown op, E2 stage, E3 micro-batch
            out of range, E4 on a rank that is not its stage's, E5 missing, twice, or
            both whole and split, E6 order on the rank, E7 a cycle of waiting ranks,
            E8 backward on another rank than its forward.

        Warns:
          UserWarning: E9, if a rank runs nothing.
        """
        faults = _validate.faults(self)
        if not faults:
            try:
                self.order()
            except ScheduleError as error:
                faults.append(f"E7 {error}")
        if faults:
            raise ScheduleError(_validate.refusal(self.name, faults))
        return self

    def simulate(self, costs: Costs | None = None) -> Timeline:
        """When each action would run, and what each rank would hold.

        Args:
          costs: what each action costs; default: a backward is two forwards, its
            halves one each, and a stage stores one unit of memory of a micro-batch.

        Returns:
          The timeline, in the unit of the costs.

        Raises:
          ScheduleError: if the schedule deadlocks, or costs are for other numbers of
            stages or micro-batches, negative or not finite.
        """
        costs = Costs() if costs is None else costs
        check_costs(self.name, costs, self.num_microbatches, self.num_stages)
        return predicted(self, self._run(costs))

    def order(self) -> tuple[Action, ...]:
        """All actions in the order in which a step dispatches them.

        It is that in which they would end if a backward took two forwards.
        """
        return self._order

    @cached_property
    def _order(self) -> tuple[Action, ...]:
        run = self._run(Costs())
        return tuple(map(run.tables.action, run.by_end()))

    def _run(self, costs: Costs) -> Run:
        """Times the rows."""
        sizes = self.num_ranks, self.num_microbatches
        ranks = not self.forward_only, self.rows, self.replicas
        tables = Tables(costs, self.placement, *sizes, *ranks)
        run = tables.run(tables.numbered(self.rows))
        if not run.is_complete:
            raise ScheduleError(deadlock(run))
        if run.makespan == math.inf:
            raise ScheduleError(f"{self.name}: {TOO_LONG}")
        return run

    def forwards(self) -> "Schedule":
        """The same schedule without its backwards: how inference runs."""
        if self.forward_only:
            return self
        rows = tuple(
            tuple(action for action in row if action.op == FORWARD) for row in self.rows
        )
        name = f"{self.name} (forward)"
        return dataclasses.replace(self, name=name, rows=rows, forward_only=True)

    def __str__(self) -> str:
        return self.drawn(Costs())

    def drawn(self, costs: Costs, has_bubble: bool = True) -> str:
        """The schedule as text, with other costs; what takes no time is not there."""
        timeline = self.simulate(costs)
        bubble = f", bubble {share(timeline.bubble_fraction)}"
        return (
            f"{self.name}: {many(self.num_ranks, 'rank')}, "
            f"{many(self.num_stages, 'stage')}, "
            f"{many(self.num_microbatches, 'micro-batch')}"
            + (bubble if has_bubble else "")
            + "\n"
            + timeline.to_text()
        )


ScheduleBuilder = Callable[[int, int], Schedule]


def _parse(name: str, lines: Sequence[Sequence[Any]]) -> tuple[tuple[Action, ...], ...]:
    faults, rows = [], []
    for rank, line in enumerate(lines):
        row = []
        for position, cell in enumerate(line):
            try:
                row.append(Action.parse(cell))
            except ValueError as error:
                faults.append(f"E1 {error} (rank {rank}, position {position})")
        rows.append(tuple(row))
    if faults:
        raise ScheduleError(_validate.refusal(name, faults))
    return tuple(rows)
