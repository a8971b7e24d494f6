"""Schedules as text: one line of numbers, and a grid whose columns suit the costs."""

import dataclasses
import math
from fractions import Fraction

from ..schedules import Timeline

# Into so many columns the text grid cuts the shortest action at most.
_FINEST = 8


def summary(timeline: Timeline, num_microbatches: int) -> str:
    """What a schedule has and takes, in one line."""
    bubble = f"{timeline.bubble_fraction:.1%}".replace("%", " %")
    sizes = (
        (len(timeline.rows), "rank", "s"),
        (timeline.num_stages, "stage", "s"),
        (num_microbatches, "micro-batch", "es"),
    )
    counts = (f"{n} {noun}{'' if n == 1 else plural}" for n, noun, plural in sizes)
    return (
        f"{timeline.name}: {', '.join(counts)}, time {timeline.makespan:.4g}, "
        f"bubble {bubble}, peak per rank {peaks(timeline)}"
    )


def peaks(timeline: Timeline) -> str:
    """The most that each rank holds."""
    return ", ".join(f"{peak:.4g}" for peak in timeline.peak_bytes)


def grid(timeline: Timeline) -> str:
    """The text grid, in columns so fine that actions begin and end with one."""
    column = _column(timeline)
    if not column:
        return timeline.to_text()
    scaled = dataclasses.replace(
        timeline,
        start={action: time / column for action, time in timeline.start.items()},
        end={action: time / column for action, time in timeline.end.items()},
    )
    note = f"a column is {float(column):.4g} units of time\n" if column != 1 else ""
    return note + scaled.to_text()


def _column(timeline: Timeline) -> Fraction:
    """The greatest time of which all times are multiples, if that is not too fine."""
    times = [
        Fraction(time).limit_denominator(10_000)
        for time in (*timeline.start.values(), *timeline.end.values())
    ]
    common = math.lcm(*(time.denominator for time in times))
    exact = Fraction(math.gcd(*(int(time * common) for time in times)), common)
    taken = [timeline.end[action] - start for action, start in timeline.start.items()]
    shortest = min((time for time in taken if time > 0), default=0.0)
    # Rather rounded times than a grid that is wider than any screen.
    return max(exact, Fraction(shortest) / _FINEST) if exact else exact
