"""One timeline in the picture: a row of boxes and a memory curve for each rank."""

from collections.abc import Iterator, Sequence

from ..schedules import MemoryEvent, Timeline
from ..schedules._units import format_percent
from . import _palette as palette
from ._frame import LABEL, Frame, peak_label
from ._shapes import Path, Rect, Shape, Text, centred, shortened, text_width

TITLE = 13.0
_TITLE_HEIGHT = 26.0
_BAR, _GAP, _MEMORY, _BETWEEN = 24.0, 2.0, 22.0, 9.0


def height(timeline: Timeline, frame: Frame) -> float:
    """What `panel` needs."""
    return _TITLE_HEIGHT + len(timeline.rows) * _pitch(timeline, frame)


def panel(timeline: Timeline, title: str, frame: Frame, top: float) -> Iterator[Shape]:
    """The shapes of one timeline, from ``top`` on."""
    yield from _heading(timeline, title, frame, top)
    events: list[list[MemoryEvent]] = [[] for _ in timeline.rows]
    for event in timeline.memory:
        events[event.rank].append(event)
    for rank in range(len(timeline.rows)):
        y = top + _TITLE_HEIGHT + rank * _pitch(timeline, frame)
        middle = centred(y + _BAR / 2, LABEL)
        yield Text(frame.left - 8, middle, f"rank {rank}", LABEL, palette.INK, "end")
        # What is hatched is idle: boxes hide the rest.
        yield Rect(
            frame.left, y, frame.x(timeline.makespan) - frame.left, _BAR, palette.IDLE
        )
        yield from _boxes(timeline, rank, frame, y)
        if _has_memory(timeline, frame):
            steps = _steps(timeline, events[rank])
            peak = timeline.peak_bytes[rank]
            yield from _memory(steps, peak, frame, y + _BAR + _GAP)


def summary(timeline: Timeline, frame: Frame) -> str:
    """The makespan and the bubble in words."""
    bubble = format_percent(timeline.bubble_fraction)
    return f"makespan {frame.text(timeline.makespan)}, bubble {bubble}"


def _pitch(timeline: Timeline, frame: Frame) -> float:
    memory = _GAP + _MEMORY if _has_memory(timeline, frame) else 0.0
    return _BAR + _BETWEEN + memory


def _has_memory(timeline: Timeline, frame: Frame) -> bool:
    """Whether there is a curve to draw: nothing is live where all costs are time."""
    return bool(timeline.memory) and frame.most_bytes > 0


def _heading(
    timeline: Timeline, title: str, frame: Frame, top: float
) -> Iterator[Shape]:
    text = summary(timeline, frame)
    room = frame.right - frame.left - text_width(text, LABEL) - 20
    shown = shortened(title, TITLE * 1.1, room)  # bold letters are wider
    y = top + _TITLE_HEIGHT - 9
    yield Text(frame.left, y, shown, TITLE, palette.INK, bold=True)
    yield Text(frame.right, y, text, LABEL, palette.GREY, "end")


def _boxes(timeline: Timeline, rank: int, frame: Frame, y: float) -> Iterator[Shape]:
    first, row = timeline.begin, timeline.rows[rank]
    chunk_of, count = palette.chunks(timeline), palette.num_chunks(timeline)

    def box(name: str, start: float, end: float, fill: str) -> Rect:
        x, right = frame.x(start - first), frame.x(end - first)
        text = f"{name}: {frame.text(start - first)} to {frame.text(end - first)}"
        # An outline as wide as the box would hide it.
        edge = min(0.8, (right - x) / 8)
        return Rect(x, y, right - x, _BAR, fill, text, edge)

    boxes = []
    for action in row:
        fill = palette.shade(action.op, chunk_of[action.stage], count)
        times = timeline.start[action], timeline.end[action]
        boxes.append(box(str(action), *times, fill))
    size, middle = frame.number_size, centred(y + _BAR / 2, frame.number_size)
    numbers = [
        Text(x + width / 2, middle, str(action.microbatch), size, ink, "middle")
        for (x, _, width, _, fill, *_), action in zip(boxes, row, strict=True)
        for ink in [palette.ink_on(fill)]
        # The room that the longest number takes decides for all: else those of the
        # first ten micro-batches alone would be shown.
        if width >= frame.number_width - 1e-9
    ]
    for stage, ranks, start, end in timeline.exchanges:
        if rank in ranks:
            name = f"exchange of gradients of stage {stage}"
            boxes.append(box(name, start, end, palette.EXCHANGE))
    # Equal colours one after the other make a shorter file.
    yield from sorted(boxes, key=lambda box: (box.fill, box.x))
    yield from sorted(numbers, key=lambda text: (text.fill, text.x))


def _memory(
    steps: Sequence[tuple[float, float]], peak: float, frame: Frame, top: float
) -> Iterator[Shape]:
    bottom = top + _MEMORY
    if not steps:
        return
    scale = (_MEMORY - 1) / frame.most_bytes
    curve = tuple((frame.x(time), bottom - live * scale) for time, live in steps)
    yield Path((*curve, (curve[-1][0], bottom), (curve[0][0], bottom)), palette.MEMORY)
    yield Path(curve, stroke=palette.MEMORY_LINE)
    label, size = peak_label(peak, frame.in_seconds), LABEL - 1
    middle = centred((top + bottom) / 2, size)
    yield Text(frame.right + 8, middle, label, size, palette.MEMORY_LINE)


def _steps(
    timeline: Timeline, events: Sequence[MemoryEvent]
) -> list[tuple[float, float]]:
    """The corners of the memory curve of a rank: time since the first start, bytes."""
    first, last = timeline.begin, timeline.makespan
    corners: list[tuple[float, float]] = []
    for event in events:
        time = min(max(event.time - first, 0.0), last)
        if corners:
            corners.append((time, corners[-1][1]))
        corners.append((time if corners else 0.0, event.bytes))
    return [*corners, (last, corners[-1][1])] if corners else []
