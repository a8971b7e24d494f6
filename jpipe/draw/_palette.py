"""The colours of the ops and of the stages of a rank."""

from ..schedules import Timeline

# Hues that people of every colour vision tell apart, after Okabe and Ito.
OPS = {"F": "#0072b2", "B": "#d55e00", "I": "#f0d530", "W": "#009e73"}
NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}

INK, GREY, GRID = "#1f2328", "#59636e", "#e4e7eb"
IDLE = "url(#jpipe-idle)"  # hatched, in the colour below
HATCH = "#b4bcc6"
EXCHANGE = "#cc79a7"
MEMORY, MEMORY_LINE = "#d8d3e8", "#6b5b95"

# How far the last stage of a rank is from its op's colour to white.
_LIGHTEST = 0.58
# How light a colour is below which white reads better on it than ink.
_DARK = 100


def shade(op: str, chunk: int, num_chunks: int) -> str:
    """The colour of an op of the n-th stage of a rank: later ones are lighter."""
    part = _LIGHTEST * chunk / max(num_chunks - 1, 1)
    values = [round(value + part * (255 - value)) for value in _rgb(OPS[op])]
    return "#" + bytes(values).hex()


def ink_on(fill: str) -> str:
    """Black or white, whichever reads better on a colour."""
    red, green, blue = _rgb(fill)
    return "#ffffff" if 0.3 * red + 0.6 * green + 0.1 * blue < _DARK else INK


def chunks(timeline: Timeline) -> list[int]:
    """Of each stage, how many stages its rank runs before it."""
    placement = timeline.placement
    return [placement[:stage].count(rank) for stage, rank in enumerate(placement)]


def num_chunks(timeline: Timeline) -> int:
    """The most stages that a rank runs."""
    return max(chunks(timeline), default=0) + 1


def ops(timelines: tuple[Timeline, ...]) -> list[str]:
    """The ops that occur, in the order of the palette."""
    found = {action.op for timeline in timelines for action in timeline.start}
    return [op for op in OPS if op in found]


def _rgb(fill: str) -> bytes:
    return bytes.fromhex(fill[1:])
