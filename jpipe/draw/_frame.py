"""What all the rows of a picture share: the axis, the scales, the margins."""

import math
from dataclasses import dataclass

from ..schedules import Timeline
from ..schedules._units import duration, size
from ._shapes import text_width

LABEL = 11.0  # the size of most texts
_SMALLEST = 6.5  # that of a number that can be read
_MARGIN = 14.0
_LEAST, _NARROWEST, _WIDEST = 400.0, 890.0, 2000.0
# An ordinary action gets that many pixels as long as the picture does not get too wide.
_ACTION = 19.0


@dataclass(frozen=True)
class Frame:
    """Scales and margins of a picture.

    Attributes:
      width: of the picture.
      left: where time 0 is.
      right: where the last end of all timelines is.
      span: the time between them.
      in_seconds: whether times are seconds and sizes bytes.
      most_bytes: the top of all memory curves.
      number_size: the size of the numbers in the boxes.
      number_width: how wide a box must be for its number to be written.
    """

    width: float
    left: float
    right: float
    span: float
    in_seconds: bool
    most_bytes: float
    number_size: float
    number_width: float

    def x(self, time: float) -> float:
        """Where a time after the first start is."""
        part = time / self.span if self.span else 0.0
        return self.left + part * (self.right - self.left)

    def text(self, time: float) -> str:
        """A time as it is written."""
        return duration(time) if self.in_seconds else _number(time)

    def ticks(self) -> list[float]:
        """Round times, some 80 pixels apart."""
        rough = self.span / max((self.right - self.left) / 80, 1)
        if rough <= 0:
            return [0.0]
        base = 10.0 ** math.floor(math.log10(rough))
        step = next(k * base for k in (1, 2, 5, 10) if k * base >= rough * 0.999)
        return [i * step for i in range(math.floor(self.span / step + 1e-9) + 1)]


def frame_of(timelines: tuple[Timeline, ...], width: float | None) -> Frame:
    """The frame in which timelines are drawn one below the other.

    Args:
      timelines: all of them.
      width: in pixels; ``None``: what they need.
    """
    span = max(timeline.makespan for timeline in timelines)
    peaks = [peak for timeline in timelines for peak in timeline.peak_bytes]
    ranks = max(len(timeline.rows) for timeline in timelines)
    in_seconds = any(timeline.in_seconds for timeline in timelines)
    left = _MARGIN + text_width(f"rank {ranks - 1}", LABEL) + 8
    labels = [peak_label(peak, in_seconds) for peak in peaks]
    after = _MARGIN + 8 + max(text_width(label, LABEL - 1) for label in labels)
    # Where no action takes any time, none needs room.
    part = _ordinary(timelines) / span if span else 1.0
    if width is None:
        natural = left + after + _ACTION / max(part, _ACTION / _WIDEST)
        width = min(max(natural, _NARROWEST), _WIDEST)
    if width < _LEAST:
        raise ValueError(f"width={width:g}: must be at least {_LEAST:g} pixels")
    widest = max(
        (str(action.microbatch) for t in timelines for action in t.start),
        key=len,
        default="0",
    )
    # An ordinary box has room for its number, if that can be read.
    room = part * (width - left - after) - 1
    number = min(max(room / text_width(widest, 1), _SMALLEST), LABEL)
    return Frame(
        width=width,
        left=left,
        right=width - after,
        span=span,
        in_seconds=in_seconds,
        most_bytes=max(peaks, default=0.0),
        number_size=number,
        number_width=text_width(widest, number) + 1,
    )


def _ordinary(timelines: tuple[Timeline, ...]) -> float:
    """The time of an ordinary action: three quarters of all take longer."""
    pairs = ((t.start[a], t.end[a]) for t in timelines for a in t.start)
    taken = sorted(end - start for start, end in pairs if end > start)
    return taken[len(taken) // 4] if taken else 0.0


def _number(value: float) -> str:
    """Four digits, and never an exponent where it can be avoided."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def peak_label(value: float, in_bytes: bool) -> str:
    """A peak of memory as it is written."""
    return f"peak {size(int(value)) if in_bytes else _number(value)}"
