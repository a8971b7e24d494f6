"""The colours of the ops and of the stages of a rank."""

from ..schedules import Action, Timeline

# Hues that people of every colour vision tell apart, after Okabe and Ito.
OPS = {"F": "#0072b2", "B": "#d55e00", "I": "#f0d530", "W": "#009e73"}
NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}

INK, GREY, GRID = "#1f2328", "#59636e", "#e4e7eb"
HATCH = "#b4bcc6"
EXCHANGE = "#cc79a7"
MEMORY, MEMORY_LINE = "#d8d3e8", "#6b5b95"

# How far the last stage of a rank is from its op's colour to white.
_LIGHTEST = 0.58


def shade(op: str, chunk: int, num_chunks: int) -> str:
    """The colour of an op of the n-th stage of a rank: later ones are lighter."""
    part = _LIGHTEST * chunk / max(num_chunks - 1, 1)
    return _hex(value + part * (255 - value) for value in _rgb(OPS[op]))


def ink_on(fill: str) -> str:
    """Black or white, whichever reads better on a colour."""
    light = _luminance(fill) + 0.05
    return "#ffffff" if 1.05 / light > light / (_luminance(INK) + 0.05) else INK


def chunks(timeline: Timeline) -> dict[int, int]:
    """Of each stage, how many stages its rank runs before it."""
    seen: dict[int, int] = {}
    chunk_of = {}
    for stage, rank in enumerate(timeline.placement):
        chunk_of[stage] = seen.get(rank, 0)
        seen[rank] = chunk_of[stage] + 1
    return chunk_of


def num_chunks(timeline: Timeline) -> int:
    """The most stages that a rank runs."""
    return max(chunks(timeline).values(), default=0) + 1


def ops(timelines: tuple[Timeline, ...]) -> list[str]:
    """The ops that occur, in the order of the palette."""
    actions: set[Action] = {a for timeline in timelines for a in timeline.start}
    found = {action.op for action in actions}
    return [op for op in OPS if op in found]


def _luminance(fill: str) -> float:
    """The relative luminance of a colour, as the web defines it."""
    parts = [value / 255 for value in _rgb(fill)]
    linear = [
        p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts
    ]
    return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def _rgb(fill: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(fill[1:]))


def _hex(values) -> str:
    return "#" + bytes(round(value) for value in values).hex()
