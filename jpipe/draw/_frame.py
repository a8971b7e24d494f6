"""What all the rows of a picture share: the axis, the scales, the margins."""

import math
import statistics
from dataclasses import dataclass

from ..schedules import Action, Timeline
from ._shapes import text_width

LABEL = 11.0  # the size of most texts
_MARGIN = 14.0
_LEAST, NARROWEST, _WIDEST = 400.0, 760.0, 2000.0
# An ordinary action gets that many pixels as long as the picture does not get too wide.
_ACTION = 19.0
_NUMBERS = (11.0, 10.0, 9.0, 8.0, 7.0, 6.5)
_BYTES = ("", "KiB", "MiB", "GiB", "TiB")
_PAD = 0.5  # between a number and the sides of its box


@dataclass(frozen=True)
class Frame:
    """Scales and margins of a picture.

    Attributes:
      width: of the picture.
      left: where time 0 is.
      right: where the last end of all timelines is.
      span: the time between them.
      factor: by which times are multiplied before they are written.
      unit: what they are in then; empty where nobody knows.
      most_bytes: the top of all memory curves.
      number_size: the size of the numbers in the boxes.
      number_width: what a box must have inside for its number to be written.
    """

    width: float
    left: float
    right: float
    span: float
    factor: float
    unit: str
    most_bytes: float
    number_size: float
    number_width: float

    def x(self, time: float) -> float:
        """Where a time after the first start is."""
        part = time / self.span if self.span else 0.0
        return self.left + part * (self.right - self.left)

    def text(self, time: float) -> str:
        """A time as it is written."""
        return f"{number(time * self.factor)}{self.unit and ' ' + self.unit}"

    def ticks(self) -> list[float]:
        """Round times, some 80 pixels apart."""
        count = max((self.right - self.left) / 80, 1)
        rough = self.span * self.factor / count
        if rough <= 0:
            return [0.0]
        base = 10.0 ** math.floor(math.log10(rough))
        step = next(k * base for k in (1, 2, 5, 10) if k * base >= rough * 0.999)
        last = math.floor(self.span * self.factor / step + 1e-9)
        return [i * step / self.factor for i in range(last + 1)]


def checked(width: float) -> float:
    """Refuses a page on which nothing could be read."""
    if width < _LEAST:
        raise ValueError(f"width={width:g}: must be at least {_LEAST:g} pixels")
    return width


def frame_of(
    timelines: tuple[Timeline, ...],
    width: float | None,
    at_least: float = NARROWEST,
) -> Frame:
    """The frame in which timelines are drawn one below the other.

    Args:
      timelines: all of them.
      width: in pixels; ``None``: what they need.
      at_least: what it is not narrower than if no width is given.
    """
    span = max(timeline.makespan for timeline in timelines)
    peaks = [peak for timeline in timelines for peak in timeline.peak_bytes]
    ranks = max(len(timeline.rows) for timeline in timelines)
    left = _MARGIN + text_width(f"rank {ranks - 1}", LABEL) + 8
    in_bytes = _in_seconds(timelines)
    labels = [peak_label(peak, in_bytes) for peak in peaks]
    after = _MARGIN + 8 + max(text_width(label, LABEL - 1) for label in labels)
    shortest = _ordinary(timelines) / span if span else 1.0
    if width is None:
        # Where no action takes any time, none needs room.
        natural = left + after + _ACTION / max(shortest, _ACTION / _WIDEST)
        width = min(max(natural, at_least), _WIDEST)
    width = checked(width)
    factor, unit = _clock(timelines, span)
    widest = max(
        (str(action.microbatch) for t in timelines for action in t.start),
        key=len,
        default="0",
    )
    room = shortest * (width - left - after) - 2 * _PAD
    fitting = [size for size in _NUMBERS if text_width(widest, size) <= room]
    size = fitting[0] if fitting else _NUMBERS[-1]
    return Frame(
        width=width,
        left=left,
        right=width - after,
        span=span,
        factor=factor,
        unit=unit,
        most_bytes=max(peaks, default=0.0),
        number_size=size,
        number_width=text_width(widest, size) + 2 * _PAD,
    )


def _ordinary(timelines: tuple[Timeline, ...]) -> float:
    """The time of an ordinary action: of the op that is the quickest in the median."""
    times: dict[tuple[int, str], list[float]] = {}
    for i, timeline in enumerate(timelines):
        for action, start in timeline.start.items():
            taken = timeline.end[action] - start
            if taken > 0:
                times.setdefault((i, action.op), []).append(taken)
    return min(map(statistics.median, times.values()), default=0.0)


def _in_seconds(timelines: tuple[Timeline, ...]) -> bool:
    """Whether the times of any are seconds, and its sizes bytes."""
    return any(timeline.in_seconds for timeline in timelines)


def _clock(timelines: tuple[Timeline, ...], span: float) -> tuple[float, str]:
    """The factor and unit of times."""
    if not _in_seconds(timelines):
        return 1.0, ""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if span * factor >= 1:
            return factor, unit
    return 1e6, "\N{MICRO SIGN}s"


def since_start(timeline: Timeline, action: Action) -> tuple[float, float]:
    """The start and end of an action, counted from the first start of all."""
    return timeline.start[action] - timeline.begin, timeline.end[
        action
    ] - timeline.begin


def number(value: float) -> str:
    """Four digits, and never an exponent where it can be avoided."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def peak_label(value: float, in_bytes: bool) -> str:
    """A peak of memory as it is written."""
    return f"peak {amount(value)}" + " B" * (in_bytes and value < 1024)


def amount(value: float) -> str:
    """Bytes as they are written."""
    power = 0
    while value >= 1024 and power < len(_BYTES) - 1:
        value, power = value / 1024, power + 1
    return f"{number(value)} {_BYTES[power]}".rstrip()
