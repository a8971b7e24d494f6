"""A plan of stages with several devices each, as columns of devices."""

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, runtime_checkable

from . import _palette as palette
from ._frame import LABEL, number
from ._shapes import Path, Picture, Rect, Shape, Text, centred, shortened, text_width

_LEFT, _TOP, _HEAD, _FOOT, _BETWEEN = 14.0, 26.0, 40.0, 24.0, 10.0
# How wide a column is at least and at most, the link to the next, and how tall the
# devices of a stage may be.
_NARROW, _WIDE, _LINK, _TALL, _DEVICE, _GAP = 136.0, 220.0, 62.0, 190.0, 20.0, 4.0
_SLOWEST = "#cc0000"


@runtime_checkable
class Staged(Protocol):
    """Stages with several devices each, as far as they are drawn.

    See `jpipe.Replicated`.
    """

    @property
    def stages(self) -> Any:
        """The layers of each stage, and on how many devices."""

    @property
    def shares(self) -> Any:
        """The parts of the time in which each stage computes and exchanges."""

    @property
    def links(self) -> Any:
        """What transfers between stages take."""

    @property
    def bottleneck(self) -> Any:
        """The stage that holds all up."""

    def simulate(self) -> Any:
        """When everything runs."""


class _Column(NamedTuple):
    """Where a stage is drawn."""

    stage: int
    x: float
    top: float
    width: float
    first: int  # its first device

    @property
    def right(self) -> float:
        return self.x + self.width

    def middle(self, tall: float) -> float:
        return self.top + _HEAD + tall / 2


def stages(plan: Staged, width: float) -> Picture:
    """Lays out the stages of a plan from left to right, each with its devices.

    Args:
      plan: from `jpipe.replicate`.
      width: of the picture; what does not fit stands in further lines.
    """
    most = max(stage.replicas for stage in plan.stages)
    pitch = min(_DEVICE + _GAP, _TALL / most)
    tall = most * pitch
    line = _HEAD + tall + _FOOT + _BETWEEN
    title, *_ = str(plan).partition("\n")
    room = width - 2 * _LEFT
    each = max(int((room + _LINK) // (_NARROW + _LINK)), 1)
    if each < len(plan.stages):  # then the last of a line has a link too
        each = max(int(room // (_NARROW + _LINK)), 1)
    else:
        each, room = len(plan.stages), room + _LINK
    wide = min(room / each - _LINK, _WIDE)
    shapes: list[Shape] = [
        Text(
            _LEFT,
            18.0,
            shortened(title, 14.5, width - 2 * _LEFT),
            13.0,
            palette.INK,
            bold=True,
        )
    ]
    first = 0
    for i, stage in enumerate(plan.stages):
        x = _LEFT + (i % each) * (wide + _LINK)
        column = _Column(i, x, _TOP + i // each * line, wide, first)
        shapes += _column(plan, column, pitch, tall)
        if i + 1 < len(plan.stages):
            shapes += _link(plan, column, tall)
        first += stage.replicas
    lines = -(-len(plan.stages) // each)
    y = _TOP + lines * line
    shapes += _legend(plan, y)
    return Picture(width, y + 26, tuple(shapes), title)


def _column(
    plan: Staged, column: _Column, pitch: float, tall: float
) -> Iterator[Shape]:
    stage, (computes, exchanges) = plan.stages[column.stage], plan.shares[column.stage]
    x, y = column.x, column.top + 16
    slowest = plan.bottleneck == column.stage
    ink = _SLOWEST if slowest else palette.INK
    yield Text(x, y, f"stage {column.stage}", LABEL + 1, ink, bold=True)
    count = stage.replicas
    says = f"{count} device{'s' * (count > 1)}"
    yield Text(column.right, y, says, LABEL, palette.INK, "end")
    last = stage.end - 1
    says = f"layer {last}" if stage.start == last else f"layers {stage.start} to {last}"
    yield Text(x, y + 15, says, LABEL, palette.GREY)
    y = column.top + _HEAD + (tall - count * pitch) / 2
    for i in range(count):
        yield from _device(plan, column, i, y + i * pitch, pitch - min(_GAP, pitch / 5))
    share = f"{computes:.0%} busy".replace("%", " %")
    share += f", {exchanges:.0%} exchange".replace("%", " %") if exchanges else ""
    yield Text(x, y + count * pitch + 11, share, LABEL - 1, ink)


def _device(
    plan: Staged, column: _Column, i: int, y: float, tall: float
) -> Iterator[Shape]:
    """One device: the part of its time in which it computes and exchanges."""
    computes, exchanges = plan.shares[column.stage]
    busy, exchanged = computes * column.width, exchanges * column.width
    x, rank = column.x, column.first + i
    yield Rect(x, y, column.width, tall, palette.HATCH, hatched=True)
    fill = palette.OPS["W"]
    yield Rect(x, y, busy, tall, fill, f"device {rank}: computes {computes:.1%}")
    if exchanged:
        says = f"device {rank}: exchanges {exchanges:.1%}"
        yield Rect(x + busy, y, exchanged, tall, palette.EXCHANGE, says)
    size = min(LABEL, tall * 0.8)
    if size >= 6 and text_width(str(rank), size) + 8 <= busy:
        ink = palette.ink_on(fill)
        yield Text(x + 5, centred(y + tall / 2, size), str(rank), size, ink)


def _link(plan: Staged, column: _Column, tall: float) -> Iterator[Shape]:
    """From a stage to the next, and how long transfers take there."""
    seconds = plan.links[column.stage]
    x, y = column.right, column.middle(tall)
    right = x + _LINK
    slowest = plan.bottleneck is None and seconds == max(plan.links)
    ink = _SLOWEST if slowest else palette.GREY
    yield Path(((x + 5, y), (right - 9, y)), stroke=ink, width=1.5)
    head = (right - 11, y - 4), (right - 4, y), (right - 11, y + 4)
    yield Path(head, fill=ink)
    if seconds:
        says = f"{number(seconds * 1e3)} ms"
        yield Text((x + right) / 2, y - 7, says, LABEL - 1, ink, "middle")


def _legend(plan: Staged, y: float) -> Iterator[Shape]:
    x = _LEFT
    entries = {"computes": palette.OPS["W"]}
    if any(exchanges for _, exchanges in plan.shares):
        entries["exchanges gradients"] = palette.EXCHANGE
    for says, fill in entries.items():
        yield Rect(x, y + 3, 14.0, 10.0, fill)
        yield Text(x + 19, y + 12, says, LABEL, palette.INK)
        x += 19 + text_width(says, LABEL) + 14
    yield Rect(x, y + 3, 14.0, 10.0, palette.HATCH, hatched=True)
    yield Text(x + 19, y + 12, "waits", LABEL, palette.INK)
    x += 19 + text_width("waits", LABEL) + 14
    yield Text(x, y + 12, "red: what holds it up", LABEL, _SLOWEST)
