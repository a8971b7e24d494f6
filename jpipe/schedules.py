"""Pipeline schedules as data: who runs which action, in which order.

A schedule is a value. It knows nothing of arrays, devices or models; transfers
follow from the dependencies between its actions and are never written down.
To add one, write a builder ``(num_ranks, num_microbatches) -> Schedule`` and
name it in `BY_NAME`.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from ._action import BACKWARD, FORWARD, OPS, Action
from .timeline import Costs, ScheduleError, Timeline, simulate

__all__ = [
    "BY_NAME",
    "Action",
    "Costs",
    "Schedule",
    "ScheduleBuilder",
    "ScheduleError",
    "Timeline",
    "gpipe",
    "one_f_one_b",
]


@dataclass(frozen=True)
class Schedule:
    """The actions of every rank, in order.

    Attributes:
      name: what to call it.
      num_stages: the number of stages.
      num_microbatches: the number of micro-batches of one step.
      placement: the rank of each stage.
      rows: the actions of each rank, in the order in which it runs them.

    Example:
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

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return len(self.rows)

    def to_text(self) -> str:
        """One line per rank, cells separated by blanks; `from_text` reads it."""
        return "\n".join(" ".join(map(str, row)) for row in self.rows)

    @classmethod
    def from_text(cls, text: str, name: str = "custom") -> "Schedule":
        r"""Reads a schedule that `to_text` or a person wrote.

        Args:
          text: one line per rank, cells such as ``2F0`` separated by blanks.
          name: what to call it.

        Returns:
          A valid schedule; sizes and placement are read off the cells.

        Raises:
          ScheduleError: if a cell is no action or the schedule cannot run.

        Example:
          >>> Schedule.from_text("0F0 0B0\n1F0 1B0").placement
          (0, 1)
        """
        lines = [line for line in text.splitlines() if line.strip()]
        try:
            rows = tuple(
                tuple(Action.parse(cell) for cell in line.split()) for line in lines
            )
        except ValueError as error:
            raise ScheduleError(str(error)) from None
        if not rows:
            raise ScheduleError("an empty text holds no schedule")
        cells = [(action, rank) for rank, row in enumerate(rows) for action in row]
        rank_of = {action.stage: rank for action, rank in reversed(cells)}
        num_stages = max(rank_of) + 1
        placement = tuple(rank_of.get(stage, 0) for stage in range(num_stages))
        num_microbatches = max(action.microbatch for action, _ in cells) + 1
        schedule = cls(name, num_stages, num_microbatches, placement, rows)
        return schedule.validate()

    def validate(self) -> "Schedule":
        """Checks that the schedule runs everything once, in an order that ends.

        Losses are summed in the order of the forwards and gradients in that of the
        backwards, so both must ascend in each stage: then every schedule gives the
        same bits.

        Returns:
          The schedule itself.

        Raises:
          ScheduleError: with every fault that was found.
        """
        faults = [*_shape_faults(self), *_count_faults(self)]
        if not faults:
            faults = _order_faults(self)
        if faults:
            raise ScheduleError(
                f"schedule {self.name!r} cannot run:\n"
                + "\n".join(f"  * {fault}" for fault in faults)
            )
        self.simulate()
        return self

    def simulate(self, costs: Costs | None = None) -> Timeline:
        """When each action would run.

        Args:
          costs: what each action costs; default: a backward is two forwards.

        Returns:
          The timeline, in the unit of the costs.

        Raises:
          ScheduleError: if some ranks wait for ever.
        """
        return simulate(self.rows, self.num_stages, costs or Costs())

    def forwards(self) -> "Schedule":
        """The same schedule without its backwards: how inference runs."""
        rows = tuple(
            tuple(action for action in row if action.op == FORWARD) for row in self.rows
        )
        return Schedule(
            f"{self.name} (forward)",
            self.num_stages,
            self.num_microbatches,
            self.placement,
            rows,
        )

    def __str__(self) -> str:
        timeline = self.simulate()
        return (
            f"{self.name}: {_count(self.num_ranks, 'rank')}, "
            f"{_count(self.num_stages, 'stage')}, "
            f"{_count(self.num_microbatches, 'micro-batch', 'es')}, "
            f"bubble {timeline.bubble_fraction:.1%}".replace("%", " %")
            + "\n"
            + timeline.to_text()
        )


ScheduleBuilder = Callable[[int, int], Schedule]


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """GPipe: all forwards, then all backwards.

    Every rank holds all micro-batches at the turn. The backwards run in ascending
    order (torchgpipe runs them descending; the time is the same).

    Args:
      num_ranks: the number of ranks, one stage on each.
      num_microbatches: the number of micro-batches, any positive number.

    Returns:
      A valid schedule. With equal stages its idle fraction is
      ``(p - 1) / (m + p - 1)`` for p ranks and m micro-batches.

    Raises:
      ScheduleError: if either number is less than 1.

    Example:
      >>> print(gpipe(2, 2).to_text())
      0F0 0F1 0B0 0B1
      1F0 1F1 1B0 1B1

    References:
      Huang et al., `GPipe: Efficient Training of Giant Neural Networks using
      Pipeline Parallelism <https://arxiv.org/abs/1811.06965>`_ (2019).
    """

    def row(rank: int) -> list[tuple[str, int]]:
        return [(op, i) for op in (FORWARD, BACKWARD) for i in range(num_microbatches)]

    return _one_stage_per_rank("gpipe", num_ranks, num_microbatches, row)


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B: after warm-up each rank alternates one forward and one backward.

    Rank ``r`` holds at most ``min(m, p - r)`` micro-batches for p ranks and m
    micro-batches, where GPipe holds m.

    Args:
      num_ranks: the number of ranks, one stage on each.
      num_microbatches: the number of micro-batches, any positive number.

    Returns:
      A valid schedule. With equal stages its idle fraction is that of `gpipe`.

    Raises:
      ScheduleError: if either number is less than 1.

    Example:
      >>> print(one_f_one_b(2, 2).to_text())
      0F0 0F1 0B0 0B1
      1F0 1B0 1F1 1B1

    References:
      Narayanan et al., `Memory-Efficient Pipeline-Parallel DNN Training
      <https://arxiv.org/abs/2006.09503>`_ (2021): there "PipeDream-Flush".
    """

    def row(rank: int) -> list[tuple[str, int]]:
        warmup = min(num_microbatches, num_ranks - 1 - rank)
        cells = [(FORWARD, i) for i in range(warmup)]
        for i in range(num_microbatches - warmup):
            cells += [(FORWARD, warmup + i), (BACKWARD, i)]
        cells += [
            (BACKWARD, i) for i in range(num_microbatches - warmup, num_microbatches)
        ]
        return cells

    return _one_stage_per_rank("1f1b", num_ranks, num_microbatches, row)


BY_NAME: dict[str, ScheduleBuilder] = {"1f1b": one_f_one_b, "gpipe": gpipe}


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural if number != 1 else ''}"


def _one_stage_per_rank(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    row: Callable[[int], list[tuple[str, int]]],
) -> Schedule:
    given = {"num_ranks": num_ranks, "num_microbatches": num_microbatches}
    faults = [f"{key}={value}" for key, value in given.items() if value < 1]
    if faults:
        raise ScheduleError(f"{name}: {', '.join(faults)}: must be at least 1")
    rows = tuple(
        tuple(Action(op, rank, microbatch) for op, microbatch in row(rank))
        for rank in range(num_ranks)
    )
    placement = tuple(range(num_ranks))
    return Schedule(name, num_ranks, num_microbatches, placement, rows)


def _shape_faults(schedule: Schedule) -> list[str]:
    """Actions that name something that does not exist or run in the wrong place."""
    faults = []
    stages, microbatches = schedule.num_stages, schedule.num_microbatches
    if len(schedule.placement) != stages:
        faults.append(
            f"placement has {len(schedule.placement)} entries for {stages} stages"
        )
        return faults
    for rank, row in enumerate(schedule.rows):
        for position, action in enumerate(row):
            at = f"{action} at position {position} of rank {rank}"
            if action.op not in OPS:
                faults.append(f"{at}: the ops are {', '.join(OPS)}")
            elif not 0 <= action.stage < stages:
                faults.append(f"{at}: the stages are 0 to {stages - 1}")
            elif not 0 <= action.microbatch < microbatches:
                faults.append(f"{at}: the micro-batches are 0 to {microbatches - 1}")
            elif schedule.placement[action.stage] != rank:
                faults.append(
                    f"{at}: stage {action.stage} is placed on rank "
                    f"{schedule.placement[action.stage]}"
                )
    return faults


def _count_faults(schedule: Schedule) -> list[str]:
    """Actions that are missing or appear twice."""
    count = Counter(action for row in schedule.rows for action in row)
    wanted = [
        Action(op, stage, microbatch)
        for op in OPS
        for stage in range(schedule.num_stages)
        for microbatch in range(schedule.num_microbatches)
    ]
    missing = [f"{action} never runs" for action in wanted if not count[action]]
    twice = [f"{action} runs {n} times" for action, n in count.items() if n > 1]
    return missing + twice


def _order_faults(schedule: Schedule) -> list[str]:
    """Backwards before their forward, or micro-batches out of order in a stage."""
    faults = []
    for rank, row in enumerate(schedule.rows):
        position = {action: i for i, action in enumerate(row)}
        last: dict[tuple[str, int], Action] = {}
        for action in row:
            forward = action._replace(op=FORWARD)
            if position[forward] > position[action]:
                faults.append(f"rank {rank} runs {action} before {forward}")
            before = last.get((action.op, action.stage))
            if before is not None and before.microbatch > action.microbatch:
                faults.append(
                    f"rank {rank} runs {before} before {action}: losses and gradients "
                    f"are summed in ascending order of micro-batches"
                )
            last[action.op, action.stage] = action
    return faults
