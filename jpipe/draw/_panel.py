"""Lays out one timeline: for each rank a row of boxes, and a memory curve below it."""

from collections.abc import Iterator, Sequence

from ..schedules import MemoryEvent, Timeline
from ..schedules._formats import format_percent
from . import _palette as palette
from ._elements import (
    BOLD,
    Path,
    Rect,
    Shape,
    Text,
    center_baseline,
    measure_text,
    shorten,
)
from ._frame import LABEL, Frame, format_peak
from ._transfers import list_transfers

TITLE = 13.0
_TITLE_HEIGHT = 26.0
# From top to bottom of a row: boxes, a gap, the memory curve, space to the next row.
_BOX_HEIGHT = 24.0
_GAP = 2.0
_MEMORY_HEIGHT = 22.0
_ROW_SPACE = 9.0


def panel_height(timeline: Timeline, frame: Frame) -> float:
    """The height of the panel of a timeline."""
    return _TITLE_HEIGHT + len(timeline.rows) * _row_height(timeline, frame)


def lay_out_panel(
    timeline: Timeline, *, title: str, frame: Frame, top: float
) -> Iterator[Shape]:
    """Yields the shapes of one timeline, from ``top`` on."""
    yield from _lay_out_heading(timeline, title=title, frame=frame, top=top)
    events: list[list[MemoryEvent]] = [[] for _ in timeline.rows]
    for event in timeline.memory:
        events[event.rank].append(event)

    for rank in range(len(timeline.rows)):
        y = top + _TITLE_HEIGHT + rank * _row_height(timeline, frame)
        yield Text(
            frame.left - 8,
            center_baseline(y + _BOX_HEIGHT / 2, LABEL),
            f"rank {rank}",
            size=LABEL,
            fill=palette.INK,
            anchor="end",
        )
        # All is hatched as idle; the boxes are drawn over it.
        width = frame.x(timeline.makespan) - frame.left
        yield Rect(frame.left, y, width, _BOX_HEIGHT, fill=palette.IDLE)
        yield from _lay_out_boxes(timeline, rank, frame=frame, y=y)
        if _has_memory(timeline, frame):
            yield from _lay_out_memory(
                _memory_corners(timeline, events[rank]),
                peak=timeline.peak_bytes[rank],
                frame=frame,
                top=y + _BOX_HEIGHT + _GAP,
            )


def format_summary(timeline: Timeline, frame: Frame) -> str:
    """Formats the makespan and the bubble."""
    bubble = format_percent(timeline.bubble_fraction)
    return f"makespan {frame.format_time(timeline.makespan)}, bubble {bubble}"


def _row_height(timeline: Timeline, frame: Frame) -> float:
    """The distance from one rank to the next."""
    memory = _GAP + _MEMORY_HEIGHT if _has_memory(timeline, frame) else 0.0
    return _BOX_HEIGHT + _ROW_SPACE + memory


def _has_memory(timeline: Timeline, frame: Frame) -> bool:
    """True if there are curves to draw: costs may be of times alone."""
    return bool(timeline.memory) and frame.max_bytes > 0


def _lay_out_heading(
    timeline: Timeline, *, title: str, frame: Frame, top: float
) -> Iterator[Shape]:
    """Yields the title at the left, the summary at the right."""
    summary = format_summary(timeline, frame)
    room = frame.right - frame.left - measure_text(summary, LABEL) - 20
    shown = shorten(title, TITLE * BOLD, room)
    y = top + _TITLE_HEIGHT - 9
    yield Text(frame.left, y, shown, size=TITLE, fill=palette.INK, bold=True)
    yield Text(frame.right, y, summary, size=LABEL, fill=palette.GREY, anchor="end")


def _lay_out_boxes(
    timeline: Timeline, rank: int, *, frame: Frame, y: float
) -> Iterator[Shape]:
    """Yields a box for all that a rank does, then the numbers of its actions."""
    first = timeline.begin
    chunk_of = palette.chunk_of_stages(timeline)
    num_chunks = palette.max_chunks(timeline)

    def make_box(name: str, *, start: float, end: float, fill: str) -> Rect:
        x = frame.x(start - first)
        width = frame.x(end - first) - x
        begins = frame.format_time(start - first)
        ends = frame.format_time(end - first)
        return Rect(
            x,
            y,
            width,
            _BOX_HEIGHT,
            fill=fill,
            tooltip=f"{name}: {begins} to {ends}",
            # An outline as wide as the box would hide it.
            edge=min(0.8, width / 8),
        )

    boxes: list[Rect] = []
    numbers: list[Text] = []
    for action in timeline.rows[rank]:
        box = make_box(
            str(action),
            start=timeline.compute_start[action],
            end=timeline.compute_end[action],
            fill=palette.shade(action.op, chunk_of[action.stage], num_chunks),
        )
        boxes.append(box)
        # The longest number decides for all boxes: else only those of the first ten
        # micro-batches would be shown.
        if box.width >= frame.number_width - 1e-9:
            number = Text(
                box.x + box.width / 2,
                center_baseline(y + _BOX_HEIGHT / 2, frame.number_size),
                str(action.microbatch),
                size=frame.number_size,
                fill=palette.ink_on(box.fill),
                anchor="middle",
            )
            numbers.append(number)
        for transfer in list_transfers(timeline, action):
            box = make_box(
                f"{action} {transfer.verb}",
                start=transfer.start,
                end=transfer.end,
                fill=palette.TRANSFER,
            )
            boxes.append(box)
    for exchange in timeline.exchanges:
        if rank in exchange.ranks:
            box = make_box(
                f"exchange of gradients of stage {exchange.stage}",
                start=exchange.start,
                end=exchange.end,
                fill=palette.EXCHANGE,
            )
            boxes.append(box)

    # The file is shorter if equal colours are neighbours.
    yield from sorted(boxes, key=lambda box: (box.fill, box.x))
    yield from sorted(numbers, key=lambda text: (text.fill, text.x))


def _lay_out_memory(
    corners: Sequence[tuple[float, float]], *, peak: float, frame: Frame, top: float
) -> Iterator[Shape]:
    """Yields the area and the line of a memory curve, and its peak at the right."""
    if not corners:
        return
    bottom = top + _MEMORY_HEIGHT
    scale = (_MEMORY_HEIGHT - 1) / frame.max_bytes
    curve = tuple((frame.x(time), bottom - live * scale) for time, live in corners)
    below = ((curve[-1][0], bottom), (curve[0][0], bottom))
    yield Path((*curve, *below), fill=palette.MEMORY)
    yield Path(curve, stroke=palette.MEMORY_LINE)
    yield Text(
        frame.right + 8,
        center_baseline((top + bottom) / 2, LABEL - 1),
        format_peak(peak, in_bytes=frame.in_seconds),
        size=LABEL - 1,
        fill=palette.MEMORY_LINE,
    )


def _memory_corners(
    timeline: Timeline, events: Sequence[MemoryEvent]
) -> list[tuple[float, float]]:
    """The corners of the memory curve of a rank: time since the first start, bytes."""
    last = timeline.makespan
    corners: list[tuple[float, float]] = []
    for event in events:
        if not corners:
            corners.append((0.0, event.bytes))
            continue
        time = min(max(event.time - timeline.begin, 0.0), last)
        corners.append((time, corners[-1][1]))
        corners.append((time, event.bytes))
    if corners:
        corners.append((last, corners[-1][1]))
    return corners
