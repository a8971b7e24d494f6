"""One timeline in the picture: a row of boxes and a memory curve for each rank."""

from collections.abc import Iterator

from ..schedules import Action, Timeline
from ..schedules._units import share
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
            yield from _memory(timeline, rank, frame, y + _BAR + _GAP)


def summary(timeline: Timeline, frame: Frame) -> str:
    """The makespan and the bubble in words."""
    bubble = share(timeline.bubble_fraction)
    return f"makespan {frame.text(timeline.makespan)}, bubble {bubble}"


def _times(timeline: Timeline, action: Action) -> tuple[float, float]:
    """The start and end of an action, counted from the first start of all."""
    first = timeline.begin
    return timeline.start[action] - first, timeline.end[action] - first


def _exchanges(timeline: Timeline, rank: int) -> list[tuple[float, float]]:
    """When a rank adds up gradients with others, after the first start."""
    first = timeline.begin
    exchanges = (exchange for exchange in timeline.exchanges if rank in exchange.ranks)
    return [(exchange.start - first, exchange.end - first) for exchange in exchanges]


def _pitch(timeline: Timeline, frame: Frame) -> float:
    memory = _GAP + _MEMORY if _has_memory(timeline, frame) else 0.0
    return _BAR + _BETWEEN + memory


def _has_memory(timeline: Timeline, frame: Frame) -> bool:
    """Whether there is a curve to draw: nothing is held where all costs are time."""
    return bool(timeline.memory) and frame.most_bytes > 0


def _heading(timeline: Timeline, title: str, frame: Frame, top: float):
    text = summary(timeline, frame)
    room = frame.right - frame.left - text_width(text, LABEL) - 20
    shown = shortened(title, TITLE * 1.1, room)  # bold letters are wider
    y = top + _TITLE_HEIGHT - 9
    yield Text(frame.left, y, shown, TITLE, palette.INK, bold=True)
    yield Text(frame.right, y, text, LABEL, palette.GREY, "end")


def _boxes(timeline: Timeline, rank: int, frame: Frame, y: float) -> Iterator[Shape]:
    chunk_of, count = palette.chunks(timeline), palette.num_chunks(timeline)
    boxes, numbers = [], []
    for action in timeline.rows[rank]:
        start, end = _times(timeline, action)
        x, width = frame.x(start), frame.x(end) - frame.x(start)
        fill = palette.shade(action.op, chunk_of[action.stage], count)
        text = f"{action}: {frame.text(start)} to {frame.text(end)}"
        # An outline as wide as the box would hide it.
        edge = min(0.8, width / 8)
        boxes.append(Rect(x, y, width, _BAR, fill, text, edge=edge))
        # The room that the longest number takes decides for all: else those of the
        # first ten micro-batches alone would be shown.
        if width >= frame.number_width - 1e-9:
            size, ink = frame.number_size, palette.ink_on(fill)
            middle = centred(y + _BAR / 2, size)
            label = str(action.microbatch)
            numbers.append(Text(x + width / 2, middle, label, size, ink, "middle"))
    for start, end in _exchanges(timeline, rank):
        x, width = frame.x(start), frame.x(end) - frame.x(start)
        text = f"exchange of gradients: {frame.text(start)} to {frame.text(end)}"
        boxes.append(Rect(x, y, width, _BAR, palette.EXCHANGE, text))
    # Equal colours one after the other make a shorter file.
    yield from sorted(boxes, key=lambda box: (box.fill, box.x))
    yield from sorted(numbers, key=lambda text: (text.fill, text.x))


def _memory(timeline: Timeline, rank: int, frame: Frame, top: float) -> Iterator[Shape]:
    bottom, steps = top + _MEMORY, _steps(timeline, rank)
    if not steps:
        return
    scale = (_MEMORY - 1) / frame.most_bytes
    curve = tuple((frame.x(time), bottom - held * scale) for time, held in steps)
    yield Path((*curve, (curve[-1][0], bottom), (curve[0][0], bottom)), palette.MEMORY)
    yield Path(curve, stroke=palette.MEMORY_LINE)

    label, size = peak_label(timeline.peak_bytes[rank], frame.in_seconds), LABEL - 1
    middle = centred((top + bottom) / 2, size)
    yield Text(frame.right + 8, middle, label, size, palette.MEMORY_LINE)
    (time, _), (x, y) = max(
        zip(steps, curve, strict=True), key=lambda corner: corner[0][1]
    )
    text = f"{label}, first at {frame.text(time)}"
    yield Rect(x - 1.5, y - 1.5, 3, 3, palette.MEMORY_LINE, text)


def _steps(timeline: Timeline, rank: int) -> list[tuple[float, float]]:
    """The corners of the memory curve: time after the first start, and bytes."""
    first, last = timeline.begin, timeline.makespan
    corners: list[tuple[float, float]] = []
    for event in timeline.memory:
        if event.rank == rank:
            time = min(max(event.time - first, 0.0), last)
            if corners:
                corners.append((time, corners[-1][1]))
            corners.append((time if corners else 0.0, event.bytes))
    return [*corners, (last, corners[-1][1])] if corners else []
