"""The frame of a picture, which all rows share: axis, scales, margins."""

import math
from dataclasses import dataclass

from ..schedules import Timeline
from ..schedules._formats import format_bytes, format_seconds
from ._elements import measure_text

LABEL = 11.0  # the font size of most texts
_MIN_NUMBER_SIZE = 6.5  # the smallest font size that can be read
_MARGIN = 14.0
# The least width that a user may set, and the range of the default width.
_LEAST_WIDTH = 400.0
_MIN_DEFAULT_WIDTH = 890.0
_MAX_DEFAULT_WIDTH = 2000.0
# The default width of a typical action, if the picture does not get too wide.
_ACTION_WIDTH = 19.0
# The distance between ticks, about.
_TICK_DISTANCE = 80


@dataclass(frozen=True)
class Frame:
    """Scales and margins of a picture.

    Attributes:
      width: the width of the picture.
      left: the x of time 0.
      right: the x of the last end of all timelines.
      span: the time between them.
      in_seconds: True if times are seconds and sizes bytes.
      max_bytes: the top of all memory curves.
      number_size: the font size of the numbers in the boxes.
      number_width: the least width of a box in which its number is written.
    """

    width: float
    left: float
    right: float
    span: float
    in_seconds: bool
    max_bytes: float
    number_size: float
    number_width: float

    def x(self, time: float) -> float:
        """The x of a time since the first start."""
        fraction = time / self.span if self.span else 0.0
        return self.left + fraction * (self.right - self.left)

    def format_time(self, time: float) -> str:
        """Formats a time, with a unit if it is in seconds."""
        return format_seconds(time) if self.in_seconds else _format_number(time)

    def ticks(self) -> list[float]:
        """Round times, some 80 pixels apart."""
        num_ticks = max((self.right - self.left) / _TICK_DISTANCE, 1)
        least_step = self.span / num_ticks
        if least_step <= 0:
            return [0.0]
        base = 10.0 ** math.floor(math.log10(least_step))
        step = next(k * base for k in (1, 2, 5, 10) if k * base >= least_step * 0.999)
        return [i * step for i in range(math.floor(self.span / step + 1e-9) + 1)]


def fit_frame(timelines: tuple[Timeline, ...], width: float | None) -> Frame:
    """Fits the frame in which timelines are drawn one below the other.

    Args:
      timelines: all timelines of the picture.
      width: its width in pixels; ``None``: what the actions need.

    Raises:
      ValueError: if the width is too small.
    """
    span = max(timeline.makespan for timeline in timelines)
    in_seconds = any(timeline.in_seconds for timeline in timelines)
    num_ranks = max(len(timeline.rows) for timeline in timelines)
    peaks = [peak for timeline in timelines for peak in timeline.peak_bytes]

    left = _MARGIN + measure_text(f"rank {num_ranks - 1}", LABEL) + 8
    labels = [format_peak(peak, in_bytes=in_seconds) for peak in peaks]
    after = _MARGIN + 8 + max(measure_text(label, LABEL - 1) for label in labels)

    # A typical action as a fraction of the span. If no action takes any time, none
    # needs room.
    fraction = _typical_duration(timelines) / span if span else 1.0
    if width is None:
        least_fraction = _ACTION_WIDTH / _MAX_DEFAULT_WIDTH
        natural = left + after + _ACTION_WIDTH / max(fraction, least_fraction)
        width = min(max(natural, _MIN_DEFAULT_WIDTH), _MAX_DEFAULT_WIDTH)
    if width < _LEAST_WIDTH:
        raise ValueError(f"width={width:g}: must be at least {_LEAST_WIDTH:g} pixels")

    # The box of a typical action has room for the longest number, if that can be read.
    num_digits = 1
    for timeline in timelines:
        for action in timeline.start:
            num_digits = max(num_digits, len(str(action.microbatch)))
    longest = "0" * num_digits
    room = fraction * (width - left - after) - 1
    number_size = min(max(room / measure_text(longest, 1), _MIN_NUMBER_SIZE), LABEL)
    return Frame(
        width=width,
        left=left,
        right=width - after,
        span=span,
        in_seconds=in_seconds,
        max_bytes=max(peaks, default=0.0),
        number_size=number_size,
        number_width=measure_text(longest, number_size) + 1,
    )


def _typical_duration(timelines: tuple[Timeline, ...]) -> float:
    """The time that a typical action computes: three quarters of all take longer."""
    durations: list[float] = []
    for timeline in timelines:
        for action, start in timeline.compute_start.items():
            if timeline.compute_end[action] > start:
                durations.append(timeline.compute_end[action] - start)
    durations.sort()
    return durations[len(durations) // 4] if durations else 0.0


def _format_number(value: float) -> str:
    """Formats a number with four digits, without exponent where it can be avoided."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def format_peak(value: float, *, in_bytes: bool) -> str:
    """Formats a peak of memory, with a unit if it is in bytes."""
    return f"peak {format_bytes(int(value)) if in_bytes else _format_number(value)}"
