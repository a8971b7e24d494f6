"""A plan as bars: what each rank computes and holds, under the limit."""

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, runtime_checkable

from . import _palette as palette
from ._frame import LABEL, amount
from ._shapes import Path, Picture, Rect, Shape, Text, centred, shortened, text_width

# From what stays to what comes and goes.
_PARTS = {
    "parameters": "#6b5b95",
    "gradients": "#0072b2",
    "optimizer": "#56b4e9",
    "held": "#e69f00",
    "workspace": "#b4bcc6",
}
_WIDTH, _TOP, _BAR, _PITCH, _GAP = 890.0, 46.0, 22.0, 32.0, 40.0
_LEFT, _RIGHT = 230.0, 84.0
_LIMIT = "#cc0000"


@runtime_checkable
class Planned(Protocol):
    """A plan, as far as it is drawn: see `jpipe.Plan`."""

    @property
    def forecast(self) -> Any:
        """What it would take."""

    @property
    def schedule(self) -> Any:
        """Who runs what when."""

    @property
    def stages(self) -> Any:
        """What each stage is."""


class _Side(NamedTuple):
    """One of the two columns of bars: from where to where, and what its end is."""

    left: float
    right: float
    most: float

    def x(self, value: float) -> float:
        return self.left + (self.right - self.left) * value / (self.most or 1.0)


def bars(plan: Planned) -> Picture:
    """Lays out a plan: for each rank its time in a step, and its memory at the peak.

    Args:
      plan: from `jpipe.plan`.

    Returns:
      What `svg` and `png` draw.

    Raises:
      ValueError: if nobody planned it.
    """
    forecast = plan.forecast
    if forecast is None:
        raise ValueError("a plan without a forecast: draw what jpipe.plan returns")
    limit = forecast.memory_limit
    totals = [memory.total for memory in forecast.memory]
    middle = _LEFT + (_WIDTH - _LEFT - _RIGHT - _GAP) * 0.45
    time = _Side(_LEFT, middle, forecast.seconds)
    room = _Side(middle + _GAP, _WIDTH - _RIGHT, max([*totals, limit or 0]))
    bottom = _TOP + len(totals) * _PITCH
    shapes: list[Shape] = [*_titles(plan, time, room)]
    for rank, total in enumerate(totals):
        y = _TOP + rank * _PITCH
        shapes += _name(plan, rank, y)
        shapes += _time(forecast, rank, time, y)
        shapes += _memory(forecast.memory[rank], total, room, y)
    if limit is not None:
        x = room.x(limit)
        shapes.append(Path(((x, _TOP - 6), (x, bottom)), stroke=_LIMIT, width=1.5))
        says = f"limit {amount(limit)}"
        shapes.append(Text(x, _TOP - 10, says, LABEL - 1, _LIMIT, "middle"))
    shapes += _legend(bottom + 8)
    says = f"{plan.schedule.name}: {forecast.seconds:.3g} s a step, " + ", ".join(
        f"rank {rank} {amount(total)}" for rank, total in enumerate(totals)
    )
    return Picture(_WIDTH, bottom + 34, tuple(shapes), says)


def _titles(plan: Planned, time: _Side, room: _Side) -> Iterator[Shape]:
    forecast = plan.forecast
    says = (
        f"{plan.schedule.name}, {plan.schedule.num_microbatches} micro-batches, "
        f"{forecast.seconds * 1e3:.4g} ms a step predicted"
    )
    yield Text(14.0, 18.0, says, 13.0, palette.INK, bold=True)
    yield Text(time.left, _TOP - 10, "busy in a step", LABEL - 1, palette.GREY)
    yield Text(room.left, _TOP - 10, "memory at the peak", LABEL - 1, palette.GREY)


def _name(plan: Planned, rank: int, y: float) -> Iterator[Shape]:
    """The rank, and how many layers of which stages it has."""
    own = [stage for stage in plan.stages if stage.rank == rank]
    counts = " + ".join(str(len(stage.layers)) for stage in own)
    modes = " and ".join(dict.fromkeys(stage.remat for stage in own))
    says = f"rank {rank}: {counts} layers, {modes}"
    shown = shortened(says, LABEL, _LEFT - 24)
    yield Text(
        _LEFT - 8, centred(y + _BAR / 2, LABEL), shown, LABEL, palette.INK, "end"
    )


def _time(forecast: Any, rank: int, side: _Side, y: float) -> Iterator[Shape]:
    busy = forecast.busy[rank]
    share = f"{busy / forecast.seconds:.0%}" if forecast.seconds else ""
    end = side.x(busy)
    yield Rect(side.left, y, side.right - side.left, _BAR, palette.HATCH, hatched=True)
    fill = palette.OPS["W"]
    yield Rect(side.left, y, end - side.left, _BAR, fill, f"{busy * 1e3:.4g} ms")
    ink = palette.ink_on(fill)
    middle = centred(y + _BAR / 2, LABEL)
    yield Text(side.left + 6, middle, share, LABEL, ink)


def _memory(memory: Any, total: int, side: _Side, y: float) -> Iterator[Shape]:
    now = 0.0
    for part, fill in _PARTS.items():
        size = getattr(memory, part)
        says = f"{part}: {amount(size)}"
        left, right = side.x(now), side.x(now + size)
        yield Rect(left, y, right - left, _BAR, fill, says)
        now += size
    middle = centred(y + _BAR / 2, LABEL)
    yield Text(side.right + 8, middle, amount(total), LABEL, palette.INK)


def _legend(y: float) -> Iterator[Shape]:
    x = _LEFT
    for part, fill in {"busy": palette.OPS["W"], **_PARTS}.items():
        yield Rect(x, y + 3, 14.0, 10.0, fill)
        says = "activations held" if part == "held" else part
        yield Text(x + 19, y + 12, says, LABEL, palette.INK)
        x += 19 + text_width(says, LABEL) + 14
