"""Schedules side by side."""

from collections.abc import Iterable
from dataclasses import dataclass

from ._costs import Costs
from ._schedule import Schedule
from ._timeline import Timeline, in_words
from ._units import share


@dataclass(frozen=True)
class Comparison:
    """What schedules would take for the same work; prints as a table.

    Attributes:
      timelines: one for each schedule, in the order given.
    """

    timelines: tuple[Timeline, ...]

    def __str__(self) -> str:
        header = ["schedule", "stages", "time", "bubble", "peak bytes per rank"]
        rows = [header]
        for timeline in self.timelines:
            name, stages = timeline.name, str(timeline.num_stages)
            time, peaks = in_words(timeline)
            rows.append([name, stages, time, share(timeline.bubble_fraction), peaks])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        rows.insert(1, ["-" * width for width in widths])
        return "\n".join(
            "| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows
        )


def compare(schedules: Iterable[Schedule], costs: Costs | None = None) -> Comparison:
    """Predicts time, idle share and memory of schedules that do the same work.

    Args:
      schedules: of the same number of ranks and micro-batches.
      costs: one number per field: what all the layers of one rank cost. A schedule
        with v stages per rank cuts them in v equal chunks. Costs per stage are taken
        as they are, and then all schedules need that number of stages.

    Returns:
      A comparison; printed, it is a Markdown table.

    Raises:
      ValueError: if costs are given per stage and a schedule has another number.
      TypeError: if there is no sequence of schedules.

    Example:
      >>> from jpipe.schedules import gpipe, zb_h1
      >>> print(compare([gpipe(4, 8), zb_h1(4, 8)]))
      | schedule | stages | time | bubble | peak bytes per rank |
      | -------- | ------ | ---- | ------ | ------------------- |
      | gpipe    | 4      | 33   | 27.3 % | 8, 8, 8, 8          |
      | zb_h1    | 4      | 27   | 11.1 % | 4, 4, 4, 4          |
    """
    if isinstance(schedules, Schedule | str):
        raise TypeError(
            f"compare: {schedules!r:.60} are not several schedules; give a sequence, "
            f"such as [gpipe(4, 8), zb_h1(4, 8)]"
        )
    costs = costs or Costs()
    return Comparison(
        tuple(schedule.simulate(fitting(costs, schedule)) for schedule in schedules)
    )


def fitting(costs: Costs, schedule: Schedule) -> Costs:
    """Costs of the stages of a schedule, from those of the layers of one rank."""
    if costs.num_stages is None:
        stages, ranks = schedule.num_stages, schedule.num_ranks
        # Where several ranks share a stage it has the layers of all of them.
        return costs.per_chunk(stages // ranks if stages >= ranks else stages / ranks)
    if costs.num_stages != schedule.num_stages:
        raise ValueError(
            f"costs are for {costs.num_stages} stages, {schedule.name} has "
            f"{schedule.num_stages}; give one number per field, for the layers of one "
            f"rank, to compare schedules with different numbers of stages"
        )
    return costs
