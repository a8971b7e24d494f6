"""Pipeline schedules as data: who runs which action, in which order."""

import dataclasses
import json
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from . import _validate
from ._action import FORWARD, Action
from ._costs import Costs
from ._homes import Homes
from ._simulate import ScheduleError, check_costs, times, with_memory
from ._timeline import Timeline
from ._without import peers, taken_over

_NO_JSON = "no schedule as Schedule.to_json writes it"


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
        them runs a micro-batch, all of it, is what the rows say; ``placement`` has the
        first. `to_json` keeps it, a text does not say it.

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
    def homes(self) -> Homes:
        """The ranks that run each micro-batch."""
        return Homes(self.placement, self.rows, self.replicas)

    @property
    def running(self) -> list[int]:
        """The ranks that are those of stages, in their order."""
        stages = range(self.num_stages)
        return [rank for stage in stages for rank in self.homes.ranks(stage)]

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
        rank_of = {action.stage: rank for action, rank in reversed(cells)}
        num_stages = max(rank_of) + 1
        num_microbatches = max(action.microbatch for action, _ in cells) + 1
        pairs = {action[1:] for action, _ in cells}
        if says := _validate.absent(pairs, num_stages, num_microbatches):
            # Said before anything is as long as a number is large.
            raise ScheduleError(_validate.refusal(name, [says]))
        return cls(
            name,
            num_stages,
            num_microbatches,
            tuple(rank_of.get(stage, 0) for stage in range(num_stages)),
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
        needs = [field.name for field in dataclasses.fields(cls)]
        try:
            fields = json.loads(text)
        # A number of thousands of digits is a ValueError, as is what is no JSON.
        except (ValueError, RecursionError) as error:
            raise ScheduleError(f"{_NO_JSON}: {error!r}") from None
        if not isinstance(fields, dict):
            kind = type(fields).__name__
            raise ScheduleError(f"{_NO_JSON}: a {kind}, needs an object")
        missing = [name for name in needs[:-2] if name not in fields]
        surplus = [name for name in fields if name not in needs]
        if missing or surplus:
            faults = [f"missing: {reprlib.repr(missing)}"] if missing else []
            faults += [f"surplus: {reprlib.repr(surplus)}"] if surplus else []
            raise ScheduleError(f"{_NO_JSON}: {'; '.join(faults)}")
        name, rows, placement = (fields[key] for key in ("name", "rows", "placement"))
        if isinstance(rows, list) and all(isinstance(row, list) for row in rows):
            fields["rows"] = _parse(name, rows)
        if isinstance(placement, list):
            fields["placement"] = tuple(placement)
        if isinstance(replicas := fields.get("replicas"), list):
            each = (tuple(own) if isinstance(own, list) else own for own in replicas)
            fields["replicas"] = tuple(each)
        schedule = cls(**fields)
        return schedule.validate()

    def validate(
        self, *, max_bytes: float | None = None, costs: Costs | None = None
    ) -> "Schedule":
        """Checks that the schedule runs everything once, in an order that ends.

        Args:
          max_bytes: the most that a rank may hold at any time.
          costs: what `max_bytes` is counted in; see `Costs`.

        Returns:
          The schedule itself.

        Raises:
          ScheduleError: with every fault that was found, each with its rule: E0 a
            field or cell that is of no use, E1 unknown op, E2 stage, E3 micro-batch
            out of range, E4 on a rank that is not its stage's, E5 missing, E6 twice,
            E7 both whole and split, E8 order on the rank, E9 a cycle of waiting
            ranks, E10 backward on another rank than its forward, E11 memory; or if
            costs are not of its stages.

        Warns:
          UserWarning: E12, if a rank runs nothing.
        """
        fields = (getattr(self, field.name) for field in dataclasses.fields(self))
        faults = list(_validate.malformed(*fields))
        if not faults and len(self.placement) != self.num_stages:
            faults.append(
                f"E4 placement has {len(self.placement)} entries for "
                f"{self.num_stages} stages"
            )
        faults = faults or _validate.faults(
            self.rows,
            self.placement,
            self.num_microbatches,
            self.forward_only,
            self.replicas,
        )
        if not faults:
            costs = self._checked(costs)
            on_paper = self._timed if max_bytes is None else self._simulated
            try:
                timeline = on_paper(costs)
            except ScheduleError as error:
                faults.append(f"E9 {error}")
            else:
                faults += [
                    f"E11 rank {rank} holds {peak:g} bytes, more than {max_bytes:g}"
                    for rank, peak in enumerate(timeline.peak_bytes)
                    if max_bytes is not None and peak > max_bytes
                ]
        if faults:
            raise ScheduleError(_validate.refusal(self.name, faults))
        return self

    def simulate(self, costs: Costs | None = None) -> Timeline:
        """When each action would run, and what each rank would hold.

        Args:
          costs: what each action costs; default: a backward is two forwards, its
            halves one each, and a stage keeps one unit of memory of a micro-batch.

        Returns:
          The timeline, in the unit of the costs.

        Raises:
          ScheduleError: if the schedule deadlocks, or costs are for other numbers of
            stages or micro-batches, negative or not finite.
        """
        return self._simulated(self._checked(costs))

    def without(self, rank: int) -> "Schedule":
        """The same work with one rank less, which its peers take over.

        Args:
          rank: one of several that take turns at a stage; see `replicated`. Ranks above
            it count one less.

        Returns:
          A valid schedule, whose gradients are those of this one.

        Raises:
          ScheduleError: if no other rank runs its stage, or ranks would then wait for
            each other.

        Example:
          >>> from jpipe.schedules import replicated
          >>> print(replicated([2, 1], 4).without(0).to_text())
          0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3
          1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3

        References:
          Gandhi et al., `ReCycle <https://arxiv.org/abs/2405.14009>`_ (2024).
        """
        others = peers(self.replicas, rank)
        if not others:
            several = [list(ranks) for ranks in self.replicas if len(ranks) > 1]
            raise ScheduleError(
                f"schedule {self.name!r}: no rank does what rank {rank!r} does; "
                + (f"those that take turns are {several}" if several else "none has ")
                + ("" if several else "a peer, as those of replicated([2, 1], 8) do")
            )
        replicas = tuple(
            tuple(other - (other > rank) for other in ranks if other != rank)
            for ranks in self.replicas
        )
        return dataclasses.replace(
            self,
            name=f"{self.name}, without rank {rank}",
            rows=taken_over(self.rows, rank, others, self.simulate().start),
            placement=tuple(ranks[0] for ranks in replicas),
            replicas=replicas,
        ).validate()

    def order(self) -> tuple[Action, ...]:
        """All actions in the order in which a step dispatches them.

        It is that in which they would end if a backward took two forwards.
        """
        return self._order

    @cached_property
    def _order(self) -> tuple[Action, ...]:
        return self._timed(Costs()).order()

    def _timed(self, costs: Costs) -> Timeline:
        return times(self.name, self.rows, self.placement, costs, self.replicas)

    def _simulated(self, costs: Costs) -> Timeline:
        """With what each rank holds, its memory taken in the order of dispatch."""
        return with_memory(self._timed(costs), self._order)

    def _checked(self, costs: Costs | None) -> Costs:
        """Costs of these stages and micro-batches, or a refusal."""
        costs = Costs() if costs is None else costs
        check_costs(self.name, costs, self.num_microbatches, self.num_stages)
        return costs

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
        bubble = f", bubble {timeline.bubble_fraction:.1%}".replace("%", " %")
        return (
            f"{self.name}: {_count(self.num_ranks, 'rank')}, "
            f"{_count(self.num_stages, 'stage')}, "
            f"{_count(self.num_microbatches, 'micro-batch', 'es')}"
            + has_bubble * bubble
            + "\n"
            + timeline.to_text()
        )


ScheduleBuilder = Callable[[int, int], Schedule]


def _parse(name: str, lines: list[list[Any]]) -> tuple[tuple[Action, ...], ...]:
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


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural if number != 1 else ''}"
