"""Compares schedules that do the same work."""

from collections.abc import Iterable
from dataclasses import dataclass

from ._costs import Costs
from ._formats import format_percent
from ._schedule import Schedule
from ._timeline import Timeline, format_time_and_peaks


@dataclass(frozen=True)
class Comparison:
    """The predicted timelines of schedules for the same work; prints as a table.

    Attributes:
      timelines: the timeline of each schedule, in the order of the argument.
    """

    timelines: tuple[Timeline, ...]

    def __str__(self) -> str:
        header = ["schedule", "stages", "time", "bubble", "peak bytes per rank"]
        rows = [header]
        for timeline in self.timelines:
            time, peaks = format_time_and_peaks(timeline)
            bubble = format_percent(timeline.bubble_fraction)
            stages = str(timeline.num_stages)
            rows.append([timeline.name, stages, time, bubble, peaks])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        rows.insert(1, ["-" * width for width in widths])
        return "\n".join(
            "| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows
        )


def compare(schedules: Iterable[Schedule], costs: Costs | None = None) -> Comparison:
    """Predicts time, idle share and memory of schedules that do the same work.

    Args:
      schedules: schedules with the same numbers of ranks and micro-batches.
      costs: one number per field, for all the layers of one rank. A schedule with v
        stages per rank cuts them in v equal chunks. Costs per stage are taken as they
        are, and then all schedules need that number of stages.

    Returns:
      A comparison; printed, it is a Markdown table.

    Raises:
      ValueError: if costs are given per stage and a schedule has another number.
      TypeError: if ``schedules`` is a single schedule or a name.

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
    rank_costs = Costs() if costs is None else costs
    timelines = [
        schedule.simulate(scale_costs(rank_costs, schedule)) for schedule in schedules
    ]
    return Comparison(tuple(timelines))


def scale_costs(costs: Costs, schedule: Schedule) -> Costs:
    """The costs of the stages of a schedule, from those of the layers of one rank.

    Costs per stage are returned as they are.

    Raises:
      ValueError: if costs are per stage and the schedule has another number of stages.
    """
    if costs.num_stages is None:
        num_stages = schedule.num_stages
        num_ranks = schedule.num_ranks
        if num_stages >= num_ranks:
            return costs.per_chunk(num_stages // num_ranks)
        # Ranks that share a stage share its layers.
        return costs.per_chunk(num_stages / num_ranks)
    if costs.num_stages != schedule.num_stages:
        raise ValueError(
            f"costs are for {costs.num_stages} stages, {schedule.name} has "
            f"{schedule.num_stages}; give one number per field, for the layers of one "
            f"rank, to compare schedules with different numbers of stages"
        )
    return costs
